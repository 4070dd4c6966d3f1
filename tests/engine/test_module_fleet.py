from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.engine.module_fleet import ModuleFleet
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.streams.base import separate_heads
from tests.toys import (
    FEATURES,
    Dropped,
    Follow,
    Normed,
    Tied,
    batch_of,
    by_hand,
    fleet_of,
    small_net,
)

SLOTS = Slots(separate_heads(4, 2))


def follow(fleet: ModuleFleet) -> Follow:
    return Follow(lambda b: fleet.grad(b)[0])


@pytest.mark.parametrize("build", [small_net, Normed, Tied], ids=lambda b: b.__name__)
def test_gradients_and_losses_are_those_of_a_fleet(build: type[nn.Module]) -> None:
    fleet = ModuleFleet(build(), SLOTS, 0.1)
    batch = batch_of(1)
    expected, loss = by_hand(fleet, batch, 0)
    g, found = fleet.grad(batch, update_buffers=False)
    assert torch.allclose(g[0], expected, atol=1e-6)
    assert torch.allclose(found[0], loss, atol=1e-6)


def test_the_modules_parameters_are_views_of_theta() -> None:
    module = Tied()
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    fleet = ModuleFleet(module, SLOTS, 0.1)
    assert all(torch.equal(p, values[name]) for name, p in module.named_parameters())
    fleet.learn(follow(fleet), batch_of(1))
    after = dict(module.named_parameters())
    assert not torch.equal(after["first.weight"], values["first.weight"])
    assert module.second.weight is module.first.weight
    assert torch.equal(after["unused"], values["unused"])
    places = dict(
        zip(fleet.architecture.names, fleet.architecture.views(fleet.theta[0]), strict=True)
    )
    assert {name: p.data_ptr() for name, p in after.items()} == {
        name: place.data_ptr() for name, place in places.items()
    }


def test_a_torch_optimizer_is_given_the_direction_as_gradient() -> None:
    module, twin = small_net(), small_net()
    twin.load_state_dict(module.state_dict())
    fleet = ModuleFleet(
        module, SLOTS, 0.0, optimizer=torch.optim.Adam(module.parameters(), lr=0.05)
    )
    adam = torch.optim.Adam(twin.parameters(), lr=0.05)
    for step in range(5):
        batch = batch_of(1, seed=step)
        fleet.learn(follow(fleet), batch)
        adam.zero_grad()
        rows = [
            x[s // 2 * 2 : s // 2 * 2 + 2].logsumexp(0) - x[s]
            for x, s in zip(twin(batch.x[0]), batch.slots[0].tolist(), strict=True)
        ]
        torch.stack(rows).mean().backward()
        adam.step()
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=1e-5)
        assert mine.grad is None


def test_an_optimizer_leaves_frozen_parameters_alone() -> None:
    module = small_net()
    module[0].requires_grad_(False)  # type: ignore[index]
    fleet = ModuleFleet(
        module, SLOTS, 0.0, optimizer=torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    )
    before = fleet.theta.clone()
    fleet.learn(follow(fleet), batch_of(1))
    start = fleet.trainable.start
    assert torch.equal(fleet.theta[:, :start], before[:, :start])
    assert (fleet.theta[:, start:] != before[:, start:]).any()


def test_parameters_stay_views_if_an_optimizer_replaces_their_tensors() -> None:
    class Careless(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - group["lr"] * p.grad

    module = small_net()
    fleet = ModuleFleet(module, SLOTS, 0.0, optimizer=Careless(module.parameters(), lr=0.1))
    twin = ModuleFleet(small_net(), SLOTS, 0.1)
    twin.theta.copy_(fleet.theta)
    for step in range(3):
        fleet.learn(follow(fleet), batch_of(1, seed=step))
        twin.learn(follow(twin), batch_of(1, seed=step))
        fleet.intact()
    assert torch.allclose(fleet.theta, twin.theta, atol=1e-6)


def test_batch_norm_statistics_move_in_steps_alone() -> None:
    module = Normed()
    fleet = ModuleFleet(module, SLOTS, 0.1)
    for step in range(3):
        fleet.learn(follow(fleet), batch_of(1, seed=step))
    assert module.norm.num_batches_tracked == 3
    mean = module.norm.running_mean.clone()  # type: ignore[union-attr]
    fleet.grad(batch_of(1, seed=7), update_buffers=False)
    fleet.grad(batch_of(1, seed=7), training=False)
    fleet.forward(batch_of(1, seed=7))
    assert torch.equal(module.norm.running_mean, mean)  # type: ignore[arg-type]
    assert module.norm.num_batches_tracked == 3


class Reassigning(nn.Module):
    """A module that assigns its buffer anew in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 8)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.level = 0.9 * self.level + x.mean().detach()
        out: Tensor = self.head(x)
        return out


def test_a_buffer_that_is_assigned_anew_is_restored_after_passes_that_must_not_move_it() -> None:
    module = Reassigning()
    fleet = ModuleFleet(module, SLOTS, 0.1)
    fleet.learn(follow(fleet), batch_of(1))
    level = module.level.clone()
    assert level != 0
    fleet.grad(batch_of(1, seed=3), update_buffers=False)
    fleet.forward(batch_of(1, seed=3))
    assert torch.equal(module.level, level)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    module = Normed()
    fleet = ModuleFleet(module, SLOTS, 0.1)
    fleet.learn(follow(fleet), batch_of(1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    huge = Follow(lambda b: fleet.grad(b)[0] * torch.inf)
    with pytest.raises(InputError, match="not finite"):
        fleet.learn(huge, batch_of(1, seed=2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert fleet.steps == 1


def test_going_back_restores_every_attribute_that_growth_and_a_step_assign() -> None:
    module = small_net()
    fleet = ModuleFleet(module, SLOTS, 0.1)

    def grown() -> nn.Module:
        module[2] = nn.Linear(5, 10)  # type: ignore[operator]
        return module

    fleet.learn(follow(fleet), batch_of(1))
    mark, before = fleet.marked(), dict(vars(fleet))
    fleet.rebuild(grown)
    fleet.compete(Slots(separate_heads(5, 2)))
    fleet.traced_sizes = {10}
    fleet.measures = True
    both = Follow(lambda b: fleet.grad(b)[0] + fleet.grad(batch_of(1, seed=2))[0])
    fleet.learn(both, batch_of(1, seed=1))
    fleet.measures = False
    fleet.go_back(mark)
    after: dict[str, Any] = vars(fleet)
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert fleet.step.tolist() == [fleet.steps] == [1]


def test_dropout_is_a_function_of_seed_and_step_and_leaves_torchs_generator_alone() -> None:
    one, other = (
        ModuleFleet(Dropped(), SLOTS, 0.1, seed=4),
        ModuleFleet(Dropped(), SLOTS, 0.1, seed=4),
    )
    other.theta.copy_(one.theta)
    state = torch.get_rng_state()
    for step in range(3):
        one.learn(follow(one), batch_of(1, seed=step))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(123)
    for step in range(3):
        other.learn(follow(other), batch_of(1, seed=step))
    assert torch.equal(one.theta, other.theta)


def test_dropout_is_that_of_a_fleet_with_the_same_seed() -> None:
    alone = fleet_of(Dropped, runs=1)
    bound = ModuleFleet(Dropped(), SLOTS, 0.1, seed=10)
    bound.theta.copy_(alone.theta)
    for step in range(3):
        bound.learn(follow(bound), batch_of(1, seed=step))
        alone.learn(Follow(lambda b: alone.grad(b)[0]), batch_of(1, seed=step))
    assert torch.allclose(bound.theta, alone.theta, atol=1e-6)


def test_parts_of_the_module_stay_in_the_mode_they_were_in() -> None:
    module = Normed()
    fleet = ModuleFleet(module, SLOTS, 0.1)
    module.norm.eval()
    for _ in range(2):
        fleet.forward(batch_of(1))
        fleet.learn(follow(fleet), batch_of(1))
    assert module.training
    assert not module.norm.training
    assert module.norm.num_batches_tracked == 0
