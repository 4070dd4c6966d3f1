"""Same data, same draws: around a module of one's own, every method takes the steps that it takes in the benchmark's engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Gradients
from onepass.engine.slots import Slots
from onepass.learners import METHODS, ewc, gem, icarl
from onepass.learners.base import Learner, Reference
from onepass.memory import Policy
from onepass.models.mlp import mlp
from onepass.protocol import Run, Setup, assemble
from tests.toys import FEATURES, Dropped, Normed, Tied, ToyStream

HEAD_A_TASK, ONE_HEAD = ToyStream(examples=27), ToyStream(examples=27, shared=True)
TASKS = [[0, 1], [2, 3], [4, 5], [6, 7]]
BOTH = {
    name: found.learner
    for name, found in METHODS.items()
    if not (found.joined or found.learner.own_network)
}
STRENGTH = {"ewc": 3.0, "mas": 1.0, "pi": 0.5, "rwalk": 5.0}


class Own(nn.Sequential):
    """A class of somebody's own: nobody knows what it does, so it is called as it is."""


@dataclass(frozen=True)
class Case:
    """A method, and the rest that decides its steps."""

    method: str
    options: Any = None
    stream: ToyStream = HEAD_A_TASK
    policy: Policy = "class-reservoir"
    build: Callable[[], nn.Module] | None = (
        None  # the benchmark's own network, unless said otherwise
    )
    pure: bool = False  # is that network one that may be traced around a module of one's own?
    seed: int = 5
    rate: float = 0.3
    optimizer: bool = False  # is plain SGD a torch optimizer?
    hyperparameters: dict[str, float] = field(default_factory=dict)

    def network(self) -> nn.Module:
        if self.build is not None:
            return self.build()
        layers = mlp(FEATURES, (8, 8), Slots(self.stream.heads("ev")).count)
        return layers if self.pure else Own(*layers)

    @property
    def own(self) -> dict[str, float]:
        return (
            dict.fromkeys(BOTH[self.method].hyperparameters, STRENGTH.get(self.method, 0.5))
            | self.hyperparameters
        )

    def __str__(self) -> str:
        chosen = asdict(self.options) if self.options is not None else {}
        defaults = asdict(BOTH[self.method].options())
        words = [
            f"{name}={value}"
            for name, value in (chosen | self.hyperparameters).items()
            if value != defaults.get(name)
        ]
        network = self.build.__name__ if self.build is not None else "pure" if self.pure else "mlp"
        return " ".join(
            [
                self.method,
                *words,
                "one-head" if self.stream.shared else "heads",
                self.policy,
                network,
                f"seed={self.seed}",
            ]
        )


# Every method with options that leave something to decide: a few exemplars, a Fisher estimate in the middle of a task.
METHOD: list[tuple[str, Any]] = [(name, None) for name in BOTH if name not in ("ewc", "icarl")]
METHOD += [("icarl", icarl.Options(exemplars=16, reference_batch=3))]
METHOD += [("ewc", ewc.Options()), ("ewc", ewc.Options(fisher="moving-average", fisher_every=3))]
EVERY = [
    Case(name, options, stream)
    for name, options in METHOD
    for stream in (HEAD_A_TASK, ONE_HEAD)
    if not (BOTH[name].needs_own_classes and stream.shared)
]
NETWORKS = [
    Case(name, options, build=build)
    for name, options in METHOD
    for build in (Normed, Dropped, Tied)
]
SOME = [
    (name, BOTH[name].options(reference_batch=5)) for name in ("a-gem", "er", "mega-1", "mega-2")
]  # of 7 a task
POLICIES = [
    Case(name, options, stream, policy)
    for name, options in [*SOME, ("gem", None), ("s-gem", None)]
    for stream in (HEAD_A_TASK, ONE_HEAD)
    for policy in get_args(Policy)
]
MORE = [
    *(Case("a-gem", Reference(reference_batch=5), seed=seed) for seed in (0, 1 << 40)),
    *(
        Case(name, Reference(reference_batch=20, reference_moves_buffers=False), build=Normed)
        for name in ("a-gem", "mega-1")
    ),
    Case(
        "gem",
        gem.Options(ridge=0.001, reference_moves_buffers=False),
        build=Normed,
        hyperparameters={"margin": 0.0},
    ),
    Case("ewc", ewc.Options(labels="data", normalise=True)),
]
TRACED = [
    Case(name, options, pure=True)
    for name, options in [*SOME, ("gem", None), ("mas", None), METHOD[-3]]
]


@dataclass(frozen=True)
class Ends:
    """Where both ways end."""

    fleet: Fleet
    learner: Learner
    live: OnePass
    prepare: Callable[[Tensor], Tensor]


def both(case: Case) -> Ends:
    """The same stream through the engine and through a module that starts at the same parameters."""
    setup = Setup(memory_per_task=7, memory=case.policy, gradients="looped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.models.Network.build", lambda *_: case.network())
        run = Run(case.seed, case.own | {"learning_rate": case.rate})
        feed, fleet, learner = assemble(
            case.stream, "ev", METHODS[case.method], [run], setup, case.options
        )
    module = case.network()
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, view in zip(
            fleet.architecture.names, fleet.architecture.views(fleet.theta[0]), strict=True
        ):
            own[name].copy_(view)
    live = OnePass(
        module,
        case.method,
        learning_rate=None if case.optimizer else case.rate,
        optimizer=torch.optim.SGD(module.parameters(), lr=case.rate) if case.optimizer else None,
        tasks=None if case.stream.shared else TASKS,
        memory=None
        if case.method == "icarl"
        else Memory(per_task=setup.memory_per_task, policy=case.policy),
        seed=case.seed,
        **case.own,
        **({} if case.options is None else asdict(case.options)),
    )
    prepare = case.stream.pool.prepare
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            fleet.learn(learner, batch)
            live.observe(prepare(batch.x[0]), batch.slots[0])
        if learner.needs_review:
            learner.review(feed.batches(phase))
        learner.end_task()
        live.end_task(
            again=((prepare(batch.x[0]), batch.slots[0]) for batch in feed.batches(phase))
        )
    return Ends(fleet, learner, live, prepare)


def assert_same(ends: Ends, same: Callable[[Tensor, Tensor], bool]) -> None:
    """Parameters, buffers and the method's state are the `same`; what is counted and what is remembered is equal."""
    fleet, learner, live = ends.fleet, ends.learner, ends.live
    assert live.steps == int(fleet.step[0]) == 12
    assert fleet.theta.isfinite().all()
    assert same(live.fleet.theta, fleet.theta)
    for name, buffer in fleet.buffers.items():
        assert same(live.fleet.buffers[name], buffer), name
    found, expected = live.learner.state(), learner.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        exemplars = isinstance(learner, icarl.ICarl) and name == "x"  # the engine keeps bytes
        assert same(found[name], ends.prepare(tensor) if exemplars else tensor), name
    assert live.learner.counters() == learner.counters()
    assert live.violations == (None if learner.violations is None else int(learner.violations[0]))
    if learner.memory is not None:
        assert_same_memory(ends)


def assert_same_memory(ends: Ends) -> None:
    memory, live = ends.learner.memory, ends.live.memory
    assert memory is not None
    assert live is not None
    contents = memory.contents()
    assert contents is not None
    batch, owner = contents
    found = live.take(torch.tensor(live._visible))
    assert torch.equal(found.x, ends.prepare(batch.x))
    assert torch.equal(found.slots, batch.slots)
    assert [live._group[row][0] for row in live._visible] == owner[0].tolist()
    assert live.size == live.visible == 28
    assert live.counts() == dict.fromkeys(range(4), 7)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def _plain_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine without traced programs, which may round otherwise than the operations that a module calls."""
    monkeypatch.setattr(Gradients, "_program", lambda *_, **__: None)


@pytest.mark.usefixtures("_plain_autograd")
@pytest.mark.parametrize("case", [*EVERY, *NETWORKS, *POLICIES, *MORE], ids=str)
def test_a_method_ends_bit_identical_to_the_engine(case: Case) -> None:
    ends = both(case)
    assert_same(ends, torch.equal)
    if ends.live.violations is not None:
        assert ends.live.violations > 0, "there was nothing to correct"


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_a_method_ends_where_the_engine_does_where_both_replay_what_they_traced(case: Case) -> None:
    ends = both(case)
    assert_same(ends, close)
    assert ends.fleet.gradients._programs
    assert ends.live.fleet.gradients._programs or case.method == "icarl"  # whose loss is its own


@pytest.mark.usefixtures("_plain_autograd")
@pytest.mark.parametrize(
    "case", [Case(name, options, optimizer=True) for name, options in METHOD], ids=str
)
def test_plain_sgd_as_a_torch_optimizer_ends_where_the_engine_does(case: Case) -> None:
    assert_same(
        both(case), close
    )  # torch's own addition of a scaled gradient may be fused, and then rounds once instead of twice


@pytest.mark.usefixtures("_plain_autograd")
@pytest.mark.parametrize("name", ["a-gem", "icarl", "ewc"])
def test_answers_are_those_of_the_engine(name: str) -> None:
    ends = both(Case(name))
    x, slots = HEAD_A_TASK.pool.x[240:], HEAD_A_TASK.pool.classes[240:]
    for task, classes in enumerate(TASKS):
        mine = torch.isin(slots, torch.tensor(classes))
        expected = ends.learner.scores(Batch(x[mine][None], slots[mine][None], task=task))[0]
        assert torch.equal(ends.live.scores(ends.prepare(x[mine]), task=task), expected)
        chosen = torch.tensor(classes)
        assert torch.equal(
            ends.live.predict(ends.prepare(x[mine]), task=task),
            chosen[expected[:, chosen].argmax(1)],
        )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BOTH)
def test_a_task_that_has_ended_can_be_asked_about_while_others_are_still_to_come(
    name: str, precision: str
) -> None:
    live = OnePass(
        Own(*mlp(FEATURES, (8,), 4)),
        name,
        learning_rate=0.1,
        tasks=[[0, 1], [2, 3]],
        precision=precision,
    )
    batches = [(torch.randn(6, FEATURES) + 3 * y[:, None], y) for y in torch.randint(0, 2, (5, 6))]
    for x, y in batches:
        live.observe(x, y)
    live.end_task(again=batches)
    assert set(live.predict(batches[0][0], task=0).tolist()) <= {0, 1}
    live.observe(batches[0][0], batches[0][1] + 2)
    assert set(live.predict(batches[0][0], task=0).tolist()) <= {0, 1}


def test_a_layer_that_is_changed_after_it_was_traced_is_followed() -> None:
    pure = nn.Sequential(nn.Linear(FEATURES, 5), nn.LeakyReLU(0.01), nn.Linear(5, 2))
    own = Own(nn.Linear(FEATURES, 5), nn.LeakyReLU(0.01), nn.Linear(5, 2))
    own.load_state_dict(pure.state_dict())
    both = [OnePass(module, "van", learning_rate=0.1) for module in (pure, own)]
    for slope in (0.01, 0.9):
        pure[1].negative_slope = own[1].negative_slope = slope
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, y = (
                torch.randn(6, FEATURES, generator=generator),
                torch.randint(0, 2, (6,), generator=generator),
            )
            assert both[0].observe(x, y) == pytest.approx(both[1].observe(x, y), rel=1e-4)
