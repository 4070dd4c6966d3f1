from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.learners.declarations import Needs
from onepass.streams.base import separate_heads
from tests.toys import (
    FEATURES,
    Asking,
    Described,
    Dropped,
    Follow,
    Normed,
    Tied,
    batch_of,
    by_hand,
    fleet_of,
    small_net,
)

MODES: list[Mode] = ["looped", "stacked"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", [small_net, Normed, Tied, Asking], ids=lambda b: b.__name__)
def test_gradients_and_losses_are_those_of_plain_autograd(
    build: Callable[[], nn.Module], mode: Mode
) -> None:
    fleet, batch = fleet_of(build, mode=mode), batch_of()
    expected = [by_hand(fleet, batch, r) for r in range(3)]
    for _ in range(2):  # the first call traces and verifies programs, the second one uses them
        g, losses = fleet.grad(batch, update_buffers=False)
        for r, (gradient, loss) in enumerate(expected):
            assert torch.allclose(g[r], gradient, atol=1e-6)
            assert torch.allclose(losses[r], loss, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_rows_count_only_their_true_batch_and_empty_rows_have_no_gradient(mode: Mode) -> None:
    fleet, batch = fleet_of(Normed, mode=mode), batch_of(sizes=(7, 0, 4))
    before = {name: b.clone() for name, b in fleet.buffers.items()}
    expected = {r: by_hand(fleet, batch, r) for r in (0, 2)}
    g, losses = fleet.grad(batch)
    for r, (gradient, loss) in expected.items():
        assert torch.allclose(g[r], gradient, atol=1e-6)
        assert torch.allclose(losses[r], loss, atol=1e-6)
    assert (g[1] == 0).all()
    assert losses[1] == 0
    for name, b in fleet.buffers.items():
        assert torch.equal(b[1], before[name][1])
        assert not torch.equal(b[2], before[name][2])


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_moves_batch_norm_statistics_only_if_asked_to(mode: Mode) -> None:
    fleet, batch = fleet_of(Normed, mode=mode), batch_of()
    alone = nn.BatchNorm1d(3)
    conv = fleet.architecture.views(fleet.theta)
    names = fleet.architecture.names
    before = {name: b.clone() for name, b in fleet.buffers.items()}
    fleet.grad(batch, update_buffers=False)
    assert all(torch.equal(b, before[name]) for name, b in fleet.buffers.items())
    for _ in range(2):
        fleet.grad(batch)
    weight, bias = (conv[names.index(f"conv.{kind}")][1] for kind in ("weight", "bias"))
    for _ in range(2):
        alone(nn.functional.conv1d(batch.x[1][:, None], weight, bias, padding=1))
    assert torch.allclose(fleet.buffers["norm.running_mean"][1], alone.running_mean, atol=1e-6)  # type: ignore[arg-type]
    assert torch.allclose(fleet.buffers["norm.running_var"][1], alone.running_var, atol=1e-6)  # type: ignore[arg-type]
    assert fleet.buffers["norm.num_batches_tracked"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_may_be_of_another_theta_and_another_loss(mode: Mode) -> None:
    fleet, batch = fleet_of(mode=mode), batch_of()
    target = torch.randn(3, 7, 8)

    def distance(logits: Tensor, slots: Tensor, extra: object) -> Tensor:
        assert isinstance(extra, dict)
        return (logits - extra["target"]).square().sum(-1).mean()

    elsewhere = fleet.theta + 0.1
    g, losses = fleet.grad(
        Batch(batch.x, batch.slots, extra={"target": target}), loss=distance, theta=elsewhere
    )
    leaves = elsewhere.clone().requires_grad_()
    parameters = fleet.architecture.views(leaves)
    rows = ([p[r] for p in parameters] for r in range(3))
    passes = [
        fleet.architecture.call(row, {}, x, None) for row, x in zip(rows, batch.x, strict=True)
    ]
    logits = torch.stack([logits for logits, _ in passes])
    expected = (logits - target).square().sum(-1).mean(1)
    assert torch.allclose(losses, expected, atol=1e-5)
    assert torch.allclose(g, torch.autograd.grad(expected.sum(), leaves)[0], atol=1e-5)
    assert torch.equal(fleet.grad(batch)[0], fleet.grad(batch, theta=fleet.theta.clone())[0])


@pytest.mark.parametrize("mode", MODES)
def test_descriptors_are_an_input_of_each_run(mode: Mode) -> None:
    descriptors = torch.randn(3, 8, 4)
    fleet, batch = fleet_of(Described, mode=mode, descriptors=descriptors), batch_of()
    g, _ = fleet.grad(batch)
    for r in range(3):
        assert torch.allclose(g[r], by_hand(fleet, batch, r)[0], atol=1e-6)
    assert fleet.forward(batch).logits.shape == (3, 7, 8)


def test_forward_gives_logits_and_the_features_before_the_head() -> None:
    fleet, batch = fleet_of(), batch_of()
    out = fleet.forward(batch)
    weight, bias = fleet.architecture.views(fleet.theta)[-2:]
    assert out.features.shape == (3, 7, 5)
    assert torch.allclose(
        out.features @ weight.transpose(1, 2) + bias[:, None], out.logits, atol=1e-6
    )


def test_a_model_that_cannot_be_traced_is_trained_by_plain_autograd_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        fleet_of(Asking, mode="stacked").grad(batch_of())
    assert "plain autograd" in caplog.text


def test_dropout_is_drawn_from_the_runs_seed_and_step() -> None:
    batch = batch_of(runs=2)
    two = Batch(batch.x, batch.slots)
    fleet = fleet_of(Dropped, runs=2)
    state = torch.get_rng_state()
    first, again = fleet.grad(two)[0], fleet.grad(two)[0]
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    fleet.step += 1
    assert not torch.equal(first, fleet.grad(two)[0])
    alone = Fleet(Dropped, [11], Slots(separate_heads(4, 2)), [0.1])
    assert torch.allclose(
        alone.grad(Batch(batch.x[1:], batch.slots[1:]))[0][0], first[1], atol=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
def test_even_the_lightest_dropout_is_noticed(mode: Mode) -> None:
    fleet = fleet_of(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(1e-4)), mode=mode)
    batch, state = batch_of(), torch.get_rng_state()
    assert torch.equal(fleet.grad(batch)[0], fleet.grad(batch)[0])
    assert fleet.gradients._random
    assert torch.equal(state, torch.get_rng_state())


def test_two_passes_of_one_step_have_different_dropout() -> None:
    fleet, found = fleet_of(Dropped), []

    def direction(batch: Batch) -> Tensor:
        found.append(not torch.equal(fleet.grad(batch)[0], fleet.grad(batch)[0]))
        return torch.zeros_like(fleet.theta)

    fleet.learn(Follow(direction), batch_of())
    assert found == [True]


def test_the_direction_is_applied_at_each_runs_rate_and_the_learner_hears_the_step() -> None:
    fleet = Fleet(small_net, [1, 2], Slots(separate_heads(4, 2)), [0.5, 0.25])
    before, direction = fleet.theta.clone(), torch.randn_like(fleet.theta)
    learner = Follow(lambda _: direction, delta=True)
    fleet.learn(learner, batch_of(2))
    assert torch.allclose(fleet.theta, before - torch.tensor([[0.5], [0.25]]) * direction)
    assert torch.equal(learner.deltas[0], fleet.theta - before)
    assert fleet.step.tolist() == [1, 1]


def test_a_run_without_examples_sits_the_step_out() -> None:
    fleet = fleet_of(Normed)
    before = fleet.theta.clone()
    learner = Follow(lambda b: fleet.grad(b)[0] + 1, delta=True)
    fleet.learn(learner, batch_of(sizes=(7, 0, 3)))
    assert torch.equal(fleet.theta[1], before[1])
    assert (learner.deltas[0][1] == 0).all()
    assert fleet.step.tolist() == [1, 0, 1]
    assert fleet.active[:, 0].tolist() == [True, False, True]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_with_a_huge_learning_rate_diverges_alone(mode: Mode) -> None:
    seeds, slots = [1, 2, 3], Slots(separate_heads(4, 2))
    wild = Fleet(small_net, seeds, slots, [0.1, 1e6, 0.1], gradients=mode)
    calm = Fleet(small_net, seeds, slots, [0.1, 0.1, 0.1], gradients=mode)
    for step in range(20):
        for fleet in (wild, calm):
            fleet.learn(Follow(lambda b, f=fleet: f.grad(b)[0]), batch_of(seed=step))  # type: ignore[misc]
    assert wild.diverged() == [False, True, False]
    assert calm.diverged() == [False, False, False]
    assert torch.equal(wild.theta[[0, 2]], calm.theta[[0, 2]])
    assert wild.step[1] < 20


@pytest.mark.parametrize("mode", MODES)
def test_a_row_equals_the_same_run_alone_whatever_its_neighbours(mode: Mode) -> None:
    together = fleet_of(Normed, mode=mode)
    alone = Fleet(Normed, [11], Slots(separate_heads(4, 2)), [0.1], gradients="looped")
    assert torch.equal(together.theta[1], alone.theta[0])
    for step in range(20):
        batch = batch_of(seed=step)
        together.learn(Follow(lambda b: together.grad(b)[0]), batch)
        alone.learn(Follow(lambda b: alone.grad(b)[0]), Batch(batch.x[1:2], batch.slots[1:2]))
    assert torch.allclose(together.theta[1], alone.theta[0], atol=1e-5)
    assert torch.allclose(
        together.buffers["norm.running_var"][1], alone.buffers["norm.running_var"][0], atol=1e-5
    )


def test_inside_a_step_two_gradients_do_not_share_memory() -> None:
    fleet, seen = fleet_of(), {}

    def direction(batch: Batch) -> Tensor:
        g, other = fleet.grad(batch)[0], fleet.grad(batch_of(seed=5))[0]
        again = fleet.grad(batch, theta=fleet.theta.clone())[0]
        seen["ok"] = torch.equal(g, again) and not torch.equal(g, other)
        return g

    for _ in range(2):
        fleet.learn(Follow(direction), batch_of())
        assert seen["ok"]


@pytest.mark.parametrize("mode", MODES)
def test_forward_is_in_evaluation_mode_and_gradients_are_in_training_mode(mode: Mode) -> None:
    fleet, batch = fleet_of(Normed, mode=mode), batch_of()
    fleet.grad(batch)
    before = {name: b.clone() for name, b in fleet.buffers.items()}
    logits = fleet.forward(batch).logits
    assert all(torch.equal(b, before[name]) for name, b in fleet.buffers.items())
    alone = Normed().eval()
    values = fleet.architecture.named_views(fleet.theta[1])
    alone.load_state_dict(values | {name: b[1] for name, b in fleet.buffers.items()})
    assert torch.allclose(alone(batch.x[1]), logits[1], atol=1e-5)
    other = batch_of(size=5, seed=4)
    assert torch.allclose(fleet.grad(other)[0][1], by_hand(fleet, other, 1)[0], atol=1e-5)


def test_two_losses_of_one_shape_are_two_programs() -> None:
    fleet, batch = fleet_of(), batch_of()

    def square(logits: Tensor, slots: Tensor, extra: object) -> Tensor:
        return logits.square().mean()

    def cube(logits: Tensor, slots: Tensor, extra: object) -> Tensor:
        return logits.pow(3).mean()

    assert not torch.allclose(fleet.grad(batch, loss=square)[1], fleet.grad(batch, loss=cube)[1])


def test_extras_are_known_by_name_not_by_order() -> None:
    fleet, batch, a, b = fleet_of(), batch_of(), torch.ones(3, 7), torch.zeros(3, 7)

    def weighted(logits: Tensor, slots: Tensor, extra: Any) -> Tensor:
        return (extra["a"] * logits[:, 0]).mean() + 0 * extra["b"].sum()

    first = fleet.grad(Batch(batch.x, batch.slots, extra={"a": a, "b": b}), loss=weighted)[1]
    assert torch.equal(
        first, fleet.grad(Batch(batch.x, batch.slots, extra={"b": b, "a": a}), loss=weighted)[1]
    )


def test_a_run_that_diverges_in_a_step_does_not_take_it() -> None:
    fleet, batch = fleet_of(), batch_of()
    fleet.theta[1] *= 1e8
    before = fleet.theta.clone()
    fleet.learn(Follow(lambda b: fleet.grad(b)[0]), batch)
    assert torch.equal(fleet.theta[1], before[1])
    assert fleet.step.tolist() == [1, 0, 1]


def test_neither_a_large_custom_loss_nor_a_gradient_at_a_bad_theta_is_divergence() -> None:
    fleet, batch = fleet_of(), batch_of()

    def large(logits: Tensor, slots: Tensor, extra: object) -> Tensor:
        return 1e6 + logits.square().mean()

    fleet.grad(batch, loss=large)
    fleet.grad(batch, theta=fleet.theta * torch.nan)
    assert fleet.diverged() == [False, False, False]


def test_what_is_new_after_a_change_is_initialised_anew() -> None:
    fleet = fleet_of(lambda: nn.Linear(FEATURES, 8))
    first = fleet.theta.clone()
    fleet.rebuild(lambda: nn.Sequential(nn.Linear(FEATURES, 8)))  # another name, so nothing is kept
    assert not torch.equal(fleet.theta, first)


# ---- the two throw-away learners that prove the contract


class Balance:
    """Mixes the gradients of two batches by their losses."""

    needs = Needs()

    def __init__(self, fleet: Fleet, other: Batch) -> None:
        self.fleet, self.other = fleet, other

    def direction(self, batch: Batch) -> Tensor:
        g, loss = self.fleet.grad(batch)
        h, other = self.fleet.grad(self.other, update_buffers=False)
        share = (loss / (loss + other))[:, None]
        return share * g + (1 - share) * h

    def accept(self) -> None: ...
    def after_step(self, delta: Tensor) -> None: ...


def test_a_learner_can_mix_gradients_by_their_losses() -> None:
    fleet, batch, other = fleet_of(), batch_of(seed=1), batch_of(seed=2)
    expected = []
    for r in range(3):
        (g, a), (h, b) = by_hand(fleet, batch, r), by_hand(fleet, other, r)
        expected.append(fleet.theta[r] - 0.1 * (a * g + b * h) / (a + b))
    fleet.learn(Balance(fleet, other), batch)
    assert torch.allclose(fleet.theta, torch.stack(expected), atol=1e-6)


class Columns(nn.Module):
    """One column per task; all but the last are frozen."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(FEATURES, 4) for _ in range(count))
        self.head = nn.Linear(4, 2 * count)
        for column in self.columns[:-1]:
            column.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.stack([torch.tanh(c(x)) for c in self.columns]).sum(0))
        return out


class Grow:
    """Adds a column and two outputs for each task, and keeps a sum of squared gradients."""

    needs = Needs()

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.trace = torch.zeros_like(fleet.theta)

    def begin_task(self, task: int) -> None:
        if task:
            carry = self.fleet.rebuild(lambda: Columns(task + 1))
            self.trace = carry(self.trace)

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        self.trace += g.square()
        return g

    def accept(self) -> None: ...
    def after_step(self, delta: Tensor) -> None: ...


def named(fleet: Fleet, tensor: Tensor) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in fleet.architecture.named_views(tensor).items()}


@pytest.mark.parametrize("mode", MODES)
def test_parameters_may_grow_and_freeze_between_tasks(mode: Mode) -> None:
    fleet = Fleet(
        lambda: Columns(1), [1, 2], Slots(((0, 1), (0, 1), (0, 1))), [0.1, 0.1], gradients=mode
    )
    learner = Grow(fleet)
    for task in range(3):
        before, trace = named(fleet, fleet.theta), named(fleet, learner.trace)
        learner.begin_task(task)
        after = named(fleet, fleet.theta)
        for name, old in before.items():
            assert torch.equal(after[name][:, : old.shape[1]], old)
            assert torch.equal(named(fleet, learner.trace)[name][:, : old.shape[1]], trace[name])
        if task:
            new = f"columns.{task}.weight"
            assert not torch.equal(after[new][0], after[new][1])  # each run has its own seed
        for step in range(3):
            batch = batch_of(2, seed=step)
            fleet.learn(learner, Batch(batch.x, batch.slots % 2))
        learnt = named(fleet, fleet.theta)
        g, _ = fleet.grad(Batch(batch.x, batch.slots % 2))
        for name, value in learnt.items():
            frozen = name.startswith("columns.") and not name.startswith(f"columns.{task}.")
            assert torch.equal(value, after[name]) == frozen
            assert (named(fleet, g)[name] == 0).all() == frozen
        assert (g[:, : fleet.trainable.start] == 0).all()


def test_building_a_fleet_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    fleet_of().grad(batch_of())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("seeds", "rates"), [([], []), ([1, 2], [0.1])])
def test_impossible_fleets_are_refused_with_a_sentence(
    seeds: list[int], rates: list[float]
) -> None:
    with pytest.raises(InputError, match="fleet"):
        Fleet(small_net, seeds, Slots(separate_heads(4, 2)), rates)
