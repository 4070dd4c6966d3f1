"""New classes enlarge the head in the middle of a stream: what was there stays as it was, in the module, the optimizer and the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils import parametrizations

from onepass import InputError, Memory, OnePass
from onepass.draws import Purpose, Source
from onepass.learners import METHODS
from onepass.live.saving import packed
from toys import FEATURES, Tied

SUPPORTED = {name: found.learner for name, found in METHODS.items() if not (found.joined or found.learner.own_network)}
GROWING = [name for name, learner in SUPPORTED.items() if not learner.needs_own_classes]
SETTINGS: dict[str, dict[str, Any]] = {name: {} for name in GROWING} | {"ewc, online": {"fisher": "moving-average", "fisher_every": 2}}
every_method = pytest.mark.parametrize("name", SETTINGS)


class Own(nn.Sequential):
    """A class of somebody's own, which is called as it is."""


def net(outputs: int = 2) -> Own:
    return Own(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs))


def batch(seed: int, classes: int = 2, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (size,), generator=generator)
    y[0] = classes - 1
    return torch.randn(size, FEATURES, generator=generator) + y[:, None], y


def learner_of(name: str = "a-gem", module: nn.Module | None = None, **more: Any) -> OnePass:
    method = name.partition(",")[0]
    rate = {} if "optimizer" in more else {"learning_rate": 0.1}
    strength = {"strength": 0.5} if "strength" in SUPPORTED[method].hyperparameters else {}
    settings = {"grow": True, "memory": Memory(per_task=10)} | rate | strength | SETTINGS.get(name, {}) | more
    return OnePass(net(2) if module is None else module, method, **settings)


def learn(learner: OnePass, tasks: int = 2, first: int = 0, classes: int = 2) -> None:
    """Some tasks, and the beginning of another one."""
    for task in range(first, first + tasks):
        seen = [batch(10 * task + number, classes) for number in range(3)]
        for x, y in seen:
            learner.observe(x, y)
        learner.end_task(again=seen)
    learner.observe(*batch(10 * (first + tasks), classes))


def head_of(learner: OnePass) -> nn.Linear:
    assert learner.head is not None
    head = learner.module.get_submodule(learner.head)
    assert isinstance(head, nn.Linear)
    return head


def named(learner: OnePass, whole: Tensor) -> dict[str, Tensor]:
    """A `[1, P]` tensor by the names of the parameters."""
    architecture = learner.fleet.architecture
    return {name: view[0].clone() for name, view in zip(architecture.names, architecture.views(whole), strict=True)}


# ---- the module


def test_growth_keeps_old_outputs_and_initialises_new_ones_as_torch_does() -> None:
    learner = learner_of(seed=6)
    learn(learner)
    before = {name: p.detach().clone() for name, p in learner.module.named_parameters()}
    objects = dict(learner.module.named_parameters())
    random = torch.get_rng_state()
    learner._grow(5)
    assert torch.equal(torch.get_rng_state(), random), "torch's own generator is left alone"
    after = dict(learner.module.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in after.values())
    assert all((after[name] is parameter) == name.startswith("0.") for name, parameter in objects.items())
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["2.weight"][:2], before["2.weight"])
    assert torch.equal(after["2.bias"][:2], before["2.bias"])
    torch.manual_seed(int(Source([6], Purpose.INITIAL).bits(1, 1)))
    expected = nn.Linear(5, 5)
    assert torch.equal(after["2.weight"][2:], expected.weight[2:])
    assert torch.equal(after["2.bias"][2:], expected.bias[2:])
    assert head_of(learner).out_features == learner.outputs == 5
    assert learner.module(torch.zeros(3, FEATURES)).shape == (3, 5)
    learner.fleet.intact()


def test_new_outputs_depend_on_the_seed_and_on_how_often_the_head_has_grown_alone() -> None:
    def rows(seed: int) -> Tensor:
        torch.manual_seed(torch.seed() % 1000)
        learner = learner_of(seed=seed)
        learner.observe(*batch(0))
        for outputs in (4, 6):
            learner._grow(outputs)
        return head_of(learner).weight.detach()[2:].clone()

    one, again, other = rows(1), rows(1), rows(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.unique(dim=0)) == 4


@pytest.mark.parametrize(
    "head", [nn.Linear(5, 2), nn.Linear(5, 2, bias=False), nn.Linear(5, 2, dtype=torch.float64)], ids=["plain", "no bias", "float64"]
)
def test_heads_of_every_kind_grow_and_learn(head: nn.Linear) -> None:
    kind = head.weight.dtype
    module = nn.Sequential(nn.Linear(FEATURES, 5, dtype=kind), nn.Tanh(), head)
    learner = learner_of(module=module)
    for classes in (2, 3, 7):
        x, y = batch(classes, classes)
        before = head.weight.detach().clone()
        learner.observe(x.to(kind), y)
        assert head.weight.shape == (classes, 5)
        assert head.weight.dtype == kind
        assert not torch.equal(head.weight[: len(before)], before), "old outputs go on learning"
    assert learner.predict(batch(0)[0].to(kind)).max() < 7


def test_after_growth_all_outputs_compete() -> None:
    learner = learner_of("van")
    learner.observe(*batch(0))
    learner._grow(4)
    x, y = batch(1, 4)
    expected = float(functional.cross_entropy(learner.module(x).detach(), y))
    assert learner.observe(x, y) == pytest.approx(expected, rel=1e-6)
    assert learner.scores(x).shape == (8, 4)


def test_a_label_far_above_the_others_makes_room_for_all_below_it() -> None:
    learner = learner_of()
    learner.observe(*batch(0))
    learner.observe(batch(0)[0], torch.tensor([0, 11, 0, 1, 1, 0, 1, 0]))
    assert learner.outputs == head_of(learner).out_features == 12


def test_a_class_that_appears_is_learnt() -> None:
    learner = learner_of("mega-1")
    for classes in (2, 3, 4):
        for number in range(100):
            learner.observe(*batch(1000 * classes + number, classes))
        learner.end_task()
    x, y = batch(7, 4, 200)
    answers = learner.predict(x)
    assert (answers == y).float().mean() > 0.5  # chance is a quarter
    assert (answers[y == 3] == 3).float().mean() > 0.5


def test_the_head_grows_without_task_boundaries_too() -> None:
    learner = learner_of("er", task_free=True, memory=Memory(examples=20, recent=1))
    for number in range(12):
        learner.observe(*batch(number, 2 + number // 2))
    assert learner.outputs == 7
    assert learner.memory is not None
    assert set(learner.memory.counts()) == set(range(7))


class Two(nn.Module):
    """A head that is not the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)
        self.body = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_the_head_is_the_last_linear_layer_or_the_one_of_that_name() -> None:
    assert learner_of().head == "2"
    assert learner_of(module=nn.Sequential(net(2))).head == "0.2"
    module = Two()
    learner = learner_of("mega-1", module, grow="head")
    for classes in (2, 3, 5):
        learn(learner, 1, classes, classes)
    assert module.head.weight.shape == (5, 5)
    assert module.body.weight.shape == (5, FEATURES)


@pytest.mark.parametrize("grow", [True, "body"])
def test_a_layer_whose_outputs_are_not_the_classes_is_refused_and_stays_as_it_is(grow: bool | str) -> None:
    module = Two()
    with pytest.raises(InputError, match=r"grow|head|outputs"):  # noqa: PT012 - at once, or when it would have to grow
        learner = learner_of(module=module, grow=grow)
        learner.observe(*batch(0))
        learner.observe(*batch(1, 3))
    assert module.body.weight.shape == (5, FEATURES)
    assert module.head.weight.shape == (2, 5)


# ---- the optimizer

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.02),
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.02, amsgrad=True),
    "RMSprop": lambda parameters: optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "Adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_keeps_its_state_of_old_outputs_and_has_zeros_for_new_ones(kind: str) -> None:
    module = net(2)
    optimizer = OPTIMIZERS[kind](module.parameters())
    learner = learner_of(module=module, optimizer=optimizer)
    learn(learner)
    order = [id(p) for p in module.parameters()]
    before = {
        order.index(id(p)): {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)} for p, state in optimizer.state.items()
    }
    learner._grow(5)
    assert all(mine is its for mine, its in zip(optimizer.param_groups[0]["params"], module.parameters(), strict=True))
    for place, state in before.items():
        parameter = list(module.parameters())[place]
        after = optimizer.state[parameter]
        assert state.keys() == {key for key, value in after.items() if isinstance(value, Tensor)}
        for key, value in state.items():
            if value.dim() == 0:
                assert torch.equal(after[key], value)
                continue
            assert after[key].shape == parameter.shape
            assert torch.equal(after[key][: len(value)], value)
            assert not after[key][len(value) :].any()
    assert kind == "SGD" or len(before) == 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_after_growth_are_those_of_torch_with_a_head_enlarged_by_hand(kind: str) -> None:
    module = net(2)
    twin = net(2)
    twin.load_state_dict(module.state_dict())
    learner = learner_of("van", module, optimizer=OPTIMIZERS[kind](module.parameters()))
    theirs = OPTIMIZERS[kind](twin.parameters())

    def step(seed: int, classes: int) -> None:
        x, y = batch(seed, classes)
        theirs.zero_grad()
        functional.cross_entropy(twin(x), y).backward()
        theirs.step()

    for seed in range(3):
        learner.observe(*batch(seed))
        step(seed, 2)
    learner._grow(4)
    larger = net(4)
    with torch.no_grad():
        for mine, old, grown in zip(larger.parameters(), twin.parameters(), module.parameters(), strict=True):
            mine.copy_(grown)
            mine[: len(old)] = old
    optimizer = OPTIMIZERS[kind](larger.parameters())
    for mine, old in zip(larger.parameters(), twin.parameters(), strict=True):
        for key, value in theirs.state.get(old, {}).items():
            room = torch.zeros_like(mine) if isinstance(value, Tensor) and value.shape == old.shape else value
            if room is not value:
                room[: len(value)] = value
            optimizer.state[mine][key] = room
    twin, theirs = larger, optimizer
    for seed in range(3, 7):
        learner.observe(*batch(seed, 4))
        step(seed, 4)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-5)


# ---- the method's own state


@every_method
def test_a_methods_state_of_old_parameters_stays_and_new_ones_begin_at_nothing(name: str) -> None:
    """A sum over the past has nothing of a parameter that was not there; a place in the space of parameters is where they are."""
    learner = learner_of(name)
    learn(learner)
    size = learner.fleet.theta.shape[1]
    own = learner.learner
    before = {key: named(learner, tensor) for key, tensor in own.state().items() if tensor.shape == (1, size)}
    rest = {key: tensor.clone() for key, tensor in own.state().items() if tensor.shape != (1, size)}
    counters = own.counters()
    assert name.partition(",")[0] not in ("ewc", "mas", "pi", "rwalk") or {"pull", "anchor"} <= before.keys()
    learner._grow(5)
    theta = named(learner, learner.fleet.theta)
    for key, values in before.items():
        after = named(learner, own.state()[key])
        for parameter, old in values.items():
            assert torch.equal(after[parameter][: len(old)], old), (key, parameter)
            new = after[parameter][len(old) :]
            assert torch.equal(new, theta[parameter][len(old) :] if key in own.points else torch.zeros_like(new)), (key, parameter)
            assert len(new) == (3 if parameter.startswith("2.") else 0)
    for key, tensor in rest.items():
        assert torch.equal(own.state()[key], tensor), key
    assert own.counters() == counters
    if any(key in before for key in ("pull", "importance")):
        assert any(values.any() for values in before["pull"].values()), "there was something to carry over"
    learn(learner, 2, 5, 5)  # and on it goes
    assert learner.fleet.theta.isfinite().all()


@pytest.mark.parametrize("name", ["van", "ewc", "ewc, online", "pi", "gem", "s-gem", "a-gem", "er", "mega-1", "mega-2"])
def test_a_head_that_grows_ends_where_one_does_that_was_large_from_the_start(name: str) -> None:
    """As long as its further outputs take no part in the loss, so that nothing that is summed over the past knows of them.

    (Not so MAS, which looks at all outputs, and RWalk, which scales by the whole network.)
    """
    settings = {"memory": Memory(per_task=10, policy="reservoir")} | ({"labels": "data"} if name.startswith("ewc") else {})
    small, large = net(2), net(4)
    growing = learner_of(name, small, **settings)
    classes = 2

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[:, :classes], y)

    with torch.no_grad():
        for mine, its in zip(large.parameters(), small.parameters(), strict=True):
            mine[: len(its)] = its
    fixed = learner_of(name, large, grow=False, loss=loss, **settings)
    rows = {name: p.detach()[2:].clone() for name, p in large.named_parameters() if name.startswith("2.")}
    learn(growing)
    learn(fixed)
    assert all(torch.equal(dict(large.named_parameters())[name][2:], values) for name, values in rows.items())
    classes = 4
    growing._grow(4)
    with torch.no_grad():  # the values that large outputs would have begun with
        for parameter, values in rows.items():
            dict(small.named_parameters())[parameter][2:] = values
    if "anchor" in vars(growing.learner):
        named_anchor = dict(zip(growing.fleet.architecture.names, growing.fleet.architecture.views(growing.learner.anchor), strict=True))
        for parameter, values in rows.items():
            named_anchor[parameter][0, 2:] = values
    learn(growing, 2, 5, 4)
    learn(fixed, 2, 5, 4)
    assert growing.violations == fixed.violations
    assert torch.allclose(growing.fleet.theta, fixed.fleet.theta, atol=1e-5)


@pytest.mark.parametrize("name", [*SETTINGS, "icarl"])
def test_tasks_with_more_classes_than_outputs_grow_the_head_at_once_as_if_it_had_been_large(name: str) -> None:
    tasks = [[0, 1], [2, 3], [4, 5]]

    def run(learner: OnePass) -> None:
        for task in range(3):
            seen = [(x, y + 2 * task) for x, y in (batch(10 * task + number) for number in range(3))]
            for one in seen:
                learner.observe(*one)
            learner.end_task(again=seen)

    growing = learner_of(name, tasks=tasks)
    values = {key: p.detach().clone() for key, p in growing.module.named_parameters()}
    x, y = batch(0)
    growing._begin(growing._batch([x], y, None), y.tolist(), 0, crossing=False)  # what the first batch does first
    assert growing.outputs == 6
    assert all(torch.equal(p[: len(values[key])], values[key]) for key, p in growing.module.named_parameters())
    large = net(6)
    large.load_state_dict(growing.module.state_dict())
    fixed = learner_of(name, large, tasks=tasks, grow=False)
    run(growing)
    run(fixed)
    assert torch.equal(growing.fleet.theta, fixed.fleet.theta)
    assert growing.violations == fixed.violations


@pytest.mark.parametrize("name", [*SETTINGS, "icarl"])
def test_outputs_beyond_the_declared_classes_take_no_part(name: str) -> None:
    module = net(6)
    learner = learner_of(name, module, tasks=[[0, 1], [2, 3]], grow=False)
    before = {key: p.detach()[4:].clone() for key, p in module.named_parameters() if key.startswith("2.")}
    for task in range(2):
        seen = [(x, y + 2 * task) for x, y in (batch(10 * task + number) for number in range(3))]
        for one in seen:
            learner.observe(*one)
        learner.end_task(again=seen)
    assert all(torch.equal(dict(module.named_parameters())[key][4:], rows) for key, rows in before.items())
    assert set(learner.predict(batch(3)[0], task=1).tolist()) <= {2, 3}


# ---- what is refused


class Shared(nn.Module):
    """A head that is also an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4, FEATURES), nn.Linear(FEATURES, 4, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def frozen() -> nn.Module:
    module = net(2)
    module[2].bias.requires_grad_(False)
    return module


def parametrised() -> nn.Module:
    module = net(2)
    parametrizations.weight_norm(module[2])
    return module


@pytest.mark.parametrize(
    ("module", "grow", "words"),
    [
        (Shared(), True, "shares its weights"),
        (Tied(), "second", "shares its weights"),
        (frozen(), True, "frozen"),
        (parametrised(), True, "parametrised"),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten()), True, "no nn.Linear layer"),
        (net(2), "hed", "no nn.Linear layer 'hed' to grow: choose one of 0, 2"),
        (net(2), "1", "no nn.Linear layer '1'"),
    ],
    ids=["tied", "tied too", "frozen", "parametrised", "none", "unknown", "not linear"],
)
def test_a_head_that_cannot_grow_is_refused_before_anything_happens(module: nn.Module, grow: bool | str, words: str) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(InputError) as caught:
        learner_of(module=module, grow=grow)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_loss_of_ones_own_has_no_classes_to_grow_by() -> None:
    with pytest.raises(InputError, match="only classes can grow the head"):
        learner_of(loss=lambda outputs, y: outputs.mean())


@pytest.mark.parametrize(("grow", "label"), [(False, 2), (False, 9), (True, 20_000), (True, -1)])
def test_labels_that_are_out_of_range_are_refused_and_change_nothing(grow: bool, label: int) -> None:
    learner = learner_of(grow=grow)
    learn(learner)
    before = packed(learner)
    x, y = batch(99)
    y[3] = label
    with pytest.raises(InputError, match=f"label {label} is out of range"):
        learner.observe(x, y)
    assert packed(learner) == before


def test_a_first_batch_with_a_label_out_of_range_changes_nothing() -> None:
    learner = learner_of(grow=False)
    before = {name: value.clone() for name, value in learner.module.state_dict().items()}
    with pytest.raises(InputError, match="label 2 is out of range: the module has 2 outputs"):
        learner.observe(*batch(0, 3))
    assert all(torch.equal(value, before[name]) for name, value in learner.module.state_dict().items())
    assert learner.steps == 0
    learner.observe(*batch(0))


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "er"])  # which joins it with others
def test_a_batch_that_the_module_refuses_does_not_grow_the_head(name: str) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    learner = learner_of(name, module)
    learn(learner)
    before = packed(learner)
    with pytest.raises(InputError, match="nothing was learnt"):
        learner.observe(torch.randn(1, FEATURES), torch.tensor([4]))  # one example has no variance
    assert module[2].weight.shape == (2, 5)
    assert packed(learner) == before
    learner.observe(*batch(3, 5))
    assert learner.outputs == 5


def test_outputs_that_somebody_holds_on_to_do_not_keep_the_head_from_growing() -> None:
    learner = learner_of()
    learner.observe(*batch(0))
    held = learner.module(batch(1)[0])
    learner.observe(*batch(2, 3))
    assert learner.outputs == 3
    assert held.shape == (8, 2)
