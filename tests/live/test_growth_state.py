"""The states of the optimizer and of the method when the head grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.nn import functional

from onepass import Memory, OnePass
from onepass.live.batches import read_batch
from onepass.live.growth import enlarge
from onepass.live.learning import begin
from tests.live.growing import SETTINGS, batch, learn, learner_of
from tests.live.saved_learners import net

every_method = pytest.mark.parametrize("name", SETTINGS)


def named(learner: OnePass, whole: Tensor) -> dict[str, Tensor]:
    """A `[1, P]` tensor by the names of the parameters."""
    architecture = learner.fleet.architecture
    return {
        name: view[0].clone()
        for name, view in zip(architecture.names, architecture.views(whole), strict=True)
    }


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
    before: dict[int, dict[str, Tensor]] = {}
    for p, state in optimizer.state.items():
        tensors = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        before[order.index(id(p))] = tensors
    enlarge(learner, 5)
    driven = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert driven == [id(p) for p in module.parameters()]
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
    enlarge(learner, 4)
    larger = net(4)
    three = (m.parameters() for m in (larger, twin, module))
    with torch.no_grad():
        for mine, old, grown in zip(*three, strict=True):
            mine.copy_(grown)
            mine[: len(old)] = old
    optimizer = OPTIMIZERS[kind](larger.parameters())
    for mine, old in zip(larger.parameters(), twin.parameters(), strict=True):
        for key, value in theirs.state.get(old, {}).items():
            if isinstance(value, Tensor) and value.shape == old.shape:
                room = torch.zeros_like(mine)
                room[: len(value)] = value
                value = room
            optimizer.state[mine][key] = value
    twin, theirs = larger, optimizer
    for seed in range(3, 7):
        learner.observe(*batch(seed, 4))
        step(seed, 4)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-5)


# ---- the method's own state


@every_method
def test_a_methods_state_of_old_parameters_stays_and_new_ones_begin_at_nothing(name: str) -> None:
    """A sum over the past has nothing of new parameters; a point in theta's space is theta."""
    learner = learner_of(name)
    learn(learner)
    size = learner.fleet.theta.shape[1]
    own = learner.learner
    state, counters = own.state(), own.counters()
    sized = {key for key, tensor in state.items() if tensor.shape == (1, size)}
    before = {key: named(learner, state[key]) for key in sized}
    rest = {key: state[key].clone() for key in state.keys() - sized}
    if name.partition(",")[0] in ("ewc", "mas", "pi", "rwalk"):
        assert {"pull", "anchor"} <= sized
    enlarge(learner, 5)
    theta = named(learner, learner.fleet.theta)
    for key, values in before.items():
        after = named(learner, own.state()[key])
        for parameter, old in values.items():
            assert torch.equal(after[parameter][: len(old)], old), (key, parameter)
            new = after[parameter][len(old) :]
            expected = torch.zeros_like(new)
            if own.fields()[key].kind == "point":
                expected = theta[parameter][len(old) :]
            assert torch.equal(new, expected), (key, parameter)
            assert len(new) == (3 if parameter.startswith("2.") else 0)
    for key, tensor in rest.items():
        assert torch.equal(own.state()[key], tensor), key
    assert own.counters() == counters
    if any(key in before for key in ("pull", "importance")):
        assert any(values.any() for values in before["pull"].values()), "it carries nothing over"
    learn(learner, 2, 5, 5)  # and on it goes
    assert learner.fleet.theta.isfinite().all()


BY_OUTPUTS = ["van", "ewc", "ewc, online", "pi", "gem", "s-gem", "a-gem", "er", "mega-1", "mega-2"]


@pytest.mark.parametrize("name", BY_OUTPUTS)
def test_a_head_that_grows_ends_where_one_does_that_was_large_from_the_start(name: str) -> None:
    """Its further outputs take no part in the loss, so that no sum over the past knows of them.

    MAS differentiates all outputs, and RWalk scales by the whole network: they are left out.
    """
    settings: dict[str, Any] = {"memory": Memory(per_task=10, policy="reservoir")}
    settings |= {"labels": "data"} if name.startswith("ewc") else {}
    small, large = net(2), net(4)
    growing = learner_of(name, small, **settings)
    classes = 2

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[:, :classes], y)

    with torch.no_grad():
        for mine, its in zip(large.parameters(), small.parameters(), strict=True):
            mine[: len(its)] = its
    fixed = learner_of(name, large, grow=False, loss=loss, **settings)
    head = dict(large[2].named_parameters(prefix="2"))
    rows = {key: p.detach()[2:].clone() for key, p in head.items()}
    learn(growing)
    learn(fixed)
    assert all(torch.equal(head[key][2:], values) for key, values in rows.items())
    classes = 4
    enlarge(growing, 4)
    with torch.no_grad():  # the values that large outputs would have begun with
        for parameter, values in rows.items():
            dict(small.named_parameters())[parameter][2:] = values
    if "anchor" in vars(growing.learner):
        architecture = growing.fleet.architecture
        views = architecture.views(growing.learner.anchor)
        anchor = dict(zip(architecture.names, views, strict=True))
        for parameter, values in rows.items():
            anchor[parameter][0, 2:] = values
    learn(growing, 2, 5, 4)
    learn(fixed, 2, 5, 4)
    assert growing.violations == fixed.violations
    assert torch.allclose(growing.fleet.theta, fixed.fleet.theta, atol=1e-5)


def of_task(task: int) -> list[tuple[Tensor, Tensor]]:
    batches = [batch(10 * task + number) for number in range(3)]
    return [(x, y + 2 * task) for x, y in batches]


@pytest.mark.parametrize("name", [*SETTINGS, "icarl"])
def test_tasks_with_more_classes_than_outputs_grow_the_head_at_once_as_if_it_had_been_large(
    name: str,
) -> None:
    tasks = [[0, 1], [2, 3], [4, 5]]

    def run(learner: OnePass) -> None:
        for task in range(3):
            seen = of_task(task)
            for one in seen:
                learner.observe(*one)
            learner.end_task(again=seen)

    growing = learner_of(name, tasks=tasks)
    values = {key: p.detach().clone() for key, p in growing.module.named_parameters()}
    x, y = batch(0)
    # What the first batch does first.
    begin(growing, read_batch(growing, x, y)[0], y.tolist(), 0)
    assert growing.outputs == 6
    for key, p in growing.module.named_parameters():
        assert torch.equal(p[: len(values[key])], values[key])
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
    head = dict(module[2].named_parameters())
    before = {key: p.detach()[4:].clone() for key, p in head.items()}
    for task in range(2):
        seen = of_task(task)
        for one in seen:
            learner.observe(*one)
        learner.end_task(again=seen)
    assert all(torch.equal(head[key][4:], rows) for key, rows in before.items())
    assert set(learner.predict(batch(3)[0], task=1).tolist()) <= {2, 3}
