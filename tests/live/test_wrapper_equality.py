"""Same data, same random numbers: every method takes the steps that it takes in the engine."""

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
from onepass.learners.base import Learner
from onepass.learners.rehearsal import Reference
from onepass.memory import Policy
from onepass.models.mlp import mlp
from onepass.protocol import Run, Setup, assemble
from tests.live.saved_learners import SUPPORTED as BOTH
from tests.live.saved_learners import Own
from tests.toys import FEATURES, Dropped, Normed, Tied, ToyStream

HEAD_A_TASK, ONE_HEAD = ToyStream(examples=27), ToyStream(examples=27, shared=True)
TASKS = [[0, 1], [2, 3], [4, 5], [6, 7]]
STRENGTH = {"ewc": 3.0, "mas": 1.0, "pi": 0.5, "rwalk": 5.0}


@dataclass(frozen=True)
class Case:
    """A method, and the rest that decides its steps."""

    method: str
    options: Any = None
    stream: ToyStream = HEAD_A_TASK
    policy: Policy = "class-reservoir"
    build: Callable[[], nn.Module] | None = None  # by default the network of the benchmark
    pure: bool = False  # whether that network may be traced by the wrapper
    seed: int = 5
    rate: float = 0.3
    optimizer: bool = False  # whether plain SGD is a torch optimizer
    hyperparameters: dict[str, float] = field(default_factory=dict)

    def network(self) -> nn.Module:
        if self.build is not None:
            return self.build()
        layers = mlp(FEATURES, (8, 8), Slots(self.stream.heads("ev")).count)
        return layers if self.pure else Own(*layers)

    @property
    def own(self) -> dict[str, float]:
        strength = STRENGTH.get(self.method, 0.5)
        return dict.fromkeys(BOTH[self.method].hyperparameters, strength) | self.hyperparameters

    def __str__(self) -> str:
        chosen = asdict(self.options) if self.options is not None else {}
        defaults = asdict(BOTH[self.method].options())
        given = (chosen | self.hyperparameters).items()
        words = [f"{name}={value}" for name, value in given if value != defaults.get(name)]
        network = "pure" if self.pure else "mlp"
        if self.build is not None:
            network = self.build.__name__
        heads = "one-head" if self.stream.shared else "heads"
        return " ".join([self.method, *words, heads, self.policy, network, f"seed={self.seed}"])


# Every method with options that leave something to decide: a few exemplars, or a Fisher estimate
# in the middle of a task.
METHOD: list[tuple[str, Any]] = [(name, None) for name in BOTH if name not in ("ewc", "icarl")]
METHOD += [("icarl", icarl.Options(exemplars=16, reference_batch=3))]
METHOD += [("ewc", ewc.Options()), ("ewc", ewc.Options(fisher="moving-average", fisher_every=3))]
EVERY = [
    Case(name, options, stream)
    for name, options in METHOD
    for stream in (HEAD_A_TASK, ONE_HEAD)
    if not (BOTH[name].needs.own_classes and stream.shared)
]
BUILDS = (Normed, Dropped, Tied)
NETWORKS = [Case(name, options, build=build) for name, options in METHOD for build in BUILDS]
# Five of the seven examples per task.
DRAWING = ("a-gem", "er", "mega-1", "mega-2")
SOME = [(name, BOTH[name].options(reference_batch=5)) for name in DRAWING]
POLICIES = [
    Case(name, options, stream, policy)
    for name, options in [*SOME, ("gem", None), ("s-gem", None)]
    for stream in (HEAD_A_TASK, ONE_HEAD)
    for policy in get_args(Policy)
]
STILL = Reference(reference_batch=20, reference_moves_buffers=False)
RIDGE = gem.Options(ridge=0.001, reference_moves_buffers=False)
MORE = [
    *(Case("a-gem", Reference(reference_batch=5), seed=seed) for seed in (0, 1 << 40)),
    *(Case(name, STILL, build=Normed) for name in ("a-gem", "mega-1")),
    Case("gem", RIDGE, build=Normed, hyperparameters={"margin": 0.0}),
    Case("ewc", ewc.Options(labels="data", normalise=True)),
]
ALSO_TRACED = [*SOME, ("gem", None), ("mas", None), METHOD[-3]]
TRACED = [Case(name, options, pure=True) for name, options in ALSO_TRACED]


@dataclass(frozen=True)
class Ends:
    """Where both ways end."""

    fleet: Fleet
    learner: Learner
    live: OnePass
    prepare: Callable[[Tensor], Tensor]


def both(case: Case) -> Ends:
    """The same stream through the engine and through a module with the same parameters."""
    setup = Setup(memory_per_task=7, memory=case.policy, gradients="looped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.models.Network.build", lambda *_: case.network())
        run = Run(case.seed, case.own | {"learning_rate": case.rate})
        method = METHODS[case.method]
        feed, fleet, learner = assemble(case.stream, "ev", method, [run], setup, case.options)
    module = case.network()
    own = dict(module.named_parameters())
    views = fleet.architecture.views(fleet.theta[0])
    with torch.no_grad():
        for name, view in zip(fleet.architecture.names, views, strict=True):
            own[name].copy_(view)
    asked: dict[str, Any] = {"seed": case.seed, "learning_rate": case.rate, **case.own}
    if case.optimizer:
        asked["learning_rate"] = None
        asked["optimizer"] = torch.optim.SGD(module.parameters(), lr=case.rate)
    if not case.stream.shared:
        asked["tasks"] = TASKS
    if case.method != "icarl":
        asked["memory"] = Memory(per_task=setup.memory_per_task, policy=case.policy)
    if case.options is not None:
        asked |= asdict(case.options)
    live = OnePass(module, case.method, **asked)
    prepare = case.stream.pool.prepare
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            fleet.learn(learner, batch)
            live.observe(prepare(batch.x[0]), batch.slots[0])
        if learner.needs.second_pass:
            learner.review(feed.batches(phase))
        learner.end_task()
        again = ((prepare(batch.x[0]), batch.slots[0]) for batch in feed.batches(phase))
        live.end_task(again=again)
    return Ends(fleet, learner, live, prepare)


def assert_same(ends: Ends, same: Callable[[Tensor, Tensor], bool]) -> None:
    """Parameters, buffers and state are the `same`; counters and memories are equal."""
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
    found = live.take(torch.tensor(live.rows.visible))
    assert torch.equal(found.x, ends.prepare(batch.x))
    assert torch.equal(found.slots, batch.slots)
    assert [live.rows.group[row][0] for row in live.rows.visible] == owner[0].tolist()
    assert live.size == live.visible == 28
    assert live.counts() == dict.fromkeys(range(4), 7)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def _plain_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine without traced programs, which may round otherwise than a module's operations."""
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


DRIVEN = [Case(name, options, optimizer=True) for name, options in METHOD]


@pytest.mark.usefixtures("_plain_autograd")
@pytest.mark.parametrize("case", DRIVEN, ids=str)
def test_plain_sgd_as_a_torch_optimizer_ends_where_the_engine_does(case: Case) -> None:
    """Torch may fuse its addition of a scaled gradient, and then it rounds once, not twice."""
    assert_same(both(case), close)


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
        predicted = ends.live.predict(ends.prepare(x[mine]), task=task)
        assert torch.equal(predicted, chosen[expected[:, chosen].argmax(1)])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BOTH)
def test_a_task_that_has_ended_can_be_asked_about_while_others_are_still_to_come(
    name: str, precision: str
) -> None:
    asked: dict[str, Any] = {"tasks": [[0, 1], [2, 3]], "precision": precision}
    live = OnePass(Own(*mlp(FEATURES, (8,), 4)), name, learning_rate=0.1, **asked)
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
            x = torch.randn(6, FEATURES, generator=generator)
            y = torch.randint(0, 2, (6,), generator=generator)
            assert both[0].observe(x, y) == pytest.approx(both[1].observe(x, y), rel=1e-4)
