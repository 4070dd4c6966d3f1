"""What the optimizer lacks is not trained, and takes no part in projections and penalties."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from tests.live.comparing import same
from tests.live.modules import LIVE
from tests.live.refused_calls import CLASSES, batch, refused
from tests.toys import FEATURES


class Two(nn.Module):
    """The body is in the middle, so that it is not first in the order of parameters."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.body = nn.Linear(5, 5).requires_grad_(not frozen)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(torch.tanh(self.first(x)))))
        return out


def part(module: Two, momentum: bool = True) -> torch.optim.Optimizer:
    parameters = [*module.first.parameters(), *module.head.parameters()]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 * momentum)


def learnt(method: str, frozen: bool, **settings: Any) -> OnePass:
    torch.manual_seed(0)
    module = Two(frozen)
    if method == "icarl":
        settings["tasks"] = [[0, 1], [2, 3]]
    learner = OnePass(module, method, optimizer=part(module), **settings)
    for task in range(2):
        data = [batch(seed=10 * task + s, classes=range(2 * task, 2 * task + 2)) for s in range(4)]
        for x, y in data:
            learner.observe(x, y)
        learner.end_task(again=data if learner.learner.needs.second_pass else None)
    return learner


@pytest.mark.parametrize("method", LIVE)
def test_a_part_that_the_optimizer_lacks_is_as_good_as_frozen(method: str) -> None:
    lacking, frozen = learnt(method, False), learnt(method, True)
    assert all(p.requires_grad for p in lacking.module.parameters())
    assert lacking.violations == frozen.violations
    for mine, other in zip(lacking.module.parameters(), frozen.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def test_the_projection_is_that_of_the_trained_part_alone() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, CLASSES))
    learner = OnePass(module, optimizer=torch.optim.SGD(module[2].parameters(), lr=0.1))
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    learner.end_task()
    other = batch(seed=1, classes=range(2, 4))
    trained = list(module[2].parameters())

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(module(x), y)
        return flat(torch.autograd.grad(loss, trained))

    g, g_ref = gradient(*other), gradient(x, y)
    assert g @ g_ref < 0
    before = flat(trained)
    learner.observe(*other)
    after = flat(trained)
    torch.testing.assert_close(after, before - 0.1 * (g - (g @ g_ref) / (g_ref @ g_ref) * g_ref))


@pytest.mark.parametrize("method", ["a-gem", "rwalk"])
def test_a_part_goes_on_bit_identically_from_a_file(method: str, tmp_path: Path) -> None:
    learner = learnt(method, False)
    learner.save(tmp_path / "saved")
    module = Two()
    again = OnePass.load(tmp_path / "saved", module, optimizer=part(module))
    for one in (learner, again):
        one.observe(*batch(seed=99))
    assert same(dict(learner.module.state_dict()), dict(module.state_dict()))


def test_a_head_that_grows_is_trained_though_it_is_new() -> None:
    learner = learnt("a-gem", False, grow=True)
    x, y = batch(seed=50)
    body = learner.module.body.weight.detach().clone()  # type: ignore[union-attr, operator]
    learner.observe(x, y + 2)
    before = learner.module.head.weight.detach().clone()  # type: ignore[union-attr, operator]
    learner.observe(x, y + 2)
    assert learner.outputs == CLASSES + 2
    assert bool((learner.module.head.weight.detach()[CLASSES:] != before[CLASSES:]).any())  # type: ignore[union-attr, index, operator]
    assert torch.equal(learner.module.body.weight, body)  # type: ignore[arg-type, union-attr]


def test_the_first_step_of_a_grown_head_moves_its_new_outputs() -> None:
    module = Two()
    learner = OnePass(module, optimizer=part(module), grow=True)
    x, y = batch()
    learner.observe(x, y)
    seen: list[Tensor] = []
    original = learner.fleet._apply

    def apply(direction: Tensor) -> None:
        seen.append(module.head.weight.detach().clone())
        original(direction)

    learner.fleet._apply = apply  # type: ignore[method-assign]
    learner.observe(x, y + 2)
    assert bool((module.head.weight.detach() != seen[0])[CLASSES:].any())


def test_a_head_that_is_not_trained_does_not_grow() -> None:
    module = Two()
    sgd = torch.optim.SGD(module.first.parameters(), lr=0.1)
    learner = OnePass(module, optimizer=sgd, grow=True)
    x, y = batch()
    learner.observe(x, y)
    with refused(learner, "layer 'head' would grow", "optimizer does not have it"):
        learner.observe(x, y + 2)
    learner.observe(x, y)


def test_parameters_that_an_optimizer_is_given_later_are_trained_from_then_on() -> None:
    module = Two()
    optimizer = part(module, momentum=False)
    learner = OnePass(module, optimizer=optimizer)
    learner.observe(*batch())
    before = module.body.weight.detach().clone()
    learner.observe(*batch(seed=1))
    assert torch.equal(module.body.weight, before)
    optimizer.add_param_group({"params": list(module.body.parameters())})
    learner.observe(*batch(seed=2))
    assert not torch.equal(module.body.weight, before)


def test_parameters_of_another_module_that_an_optimizer_is_given_later_are_noticed() -> None:
    module = Two()
    optimizer = part(module)
    learner = OnePass(module, optimizer=optimizer)
    learner.observe(*batch())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for _ in range(2):
        with refused(learner, "not the module's"):
            learner.observe(*batch(seed=1))
    optimizer.param_groups.pop()
    learner.observe(*batch(seed=1))


def test_an_optimizer_of_nothing_that_is_trainable_is_refused() -> None:
    module = Two(frozen=True)
    with pytest.raises(InputError, match="none of the module's trainable parameters: make it from"):
        OnePass(module, optimizer=torch.optim.SGD(module.body.parameters(), lr=0.1))


def test_a_loss_that_depends_on_the_other_part_alone_is_refused() -> None:
    module = Two()

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return module.body.weight.square().sum()

    learner = OnePass(module, optimizer=part(module), loss=loss)
    with refused(learner, "does not depend on the module's trainable parameters"):
        learner.observe(*batch())
