from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.engine.batch import Batch, joined
from onepass.engine.fleet import Fleet
from onepass.learners import METHODS
from onepass.learners.er import Er, Options
from onepass.memory import FleetMemory, Policy
from onepass.protocol import Run, Setup, assemble
from tests.toys import Normed, ToyStream, batch_of, by_hand, fleet_of

POLICIES: list[Policy] = ["class-reservoir", "ring", "reservoir"]


def of_task(batch: Batch, task: int, sizes: tuple[int, ...] | None = None) -> Batch:
    return Batch(batch.x, batch.slots % 2 + 2 * task, sizes)


def after_two_tasks(
    reference_batch: int = 5,
    policy: Policy = "class-reservoir",
    sizes: tuple[int, ...] | None = None,
    **more: object,
) -> Er:
    """A learner that has begun its third task; it may have seen unequally many examples."""
    fleet = fleet_of(**more)  # type: ignore[arg-type]
    learner = Er(fleet, {}, Options(reference_batch), FleetMemory(fleet, 4, 10, policy=policy))
    for task in range(3):
        learner.begin_task(task)
        fleet.learn(learner, of_task(batch_of(size=20, seed=task), task, sizes))
        if task < 2:
            learner.end_task()
    fleet.learning_rate.fill_(1.0)
    return learner


def seen(learner: Er) -> list[Batch]:
    """The batches whose gradients are taken from now on."""
    batches: list[Batch] = []
    grad = learner.fleet.grad

    def watched(batch: Batch) -> tuple[Tensor, Tensor]:
        batches.append(batch)
        return grad(batch)

    learner.fleet.grad = watched  # type: ignore[method-assign, assign]
    return batches


def pooled(fleet: Fleet, batch: Batch, replayed: Batch, run: int) -> Tensor:
    """The gradient of the mean over the examples of both batches, by plain autograd."""
    first, second = batch.lengths()[run], replayed.lengths()[run]
    x = torch.cat([batch.x[run, :first], replayed.x[run, :second]])
    slots = torch.cat([batch.slots[run, :first], replayed.slots[run, :second]])
    return by_hand(fleet, Batch(x.expand(run + 1, *x.shape), slots.expand(run + 1, -1)), run)[0]


@pytest.mark.parametrize(
    ("policy", "replayed"), [("class-reservoir", 3), ("ring", 11), ("reservoir", 100)]
)
def test_a_step_is_the_gradient_of_the_mean_over_both_batches(
    policy: Policy, replayed: int
) -> None:
    learner = after_two_tasks(replayed, policy)
    fleet, batch = learner.fleet, of_task(batch_of(size=8, seed=9), 2)
    for _ in range(4):
        drawn = learner.episodic.draw(replayed)
        assert drawn is not None
        assert drawn.x.shape[1] == min(replayed, 20)
        expected = torch.stack([pooled(fleet, batch, drawn, r) for r in range(3)])
        before = fleet.theta.clone()
        fleet.learn(learner, batch)
        assert torch.allclose(before - fleet.theta, expected, atol=1e-5)


def test_every_example_has_the_same_weight_whichever_batch_it_came_from() -> None:
    learner = after_two_tasks(3)
    fleet, batch = learner.fleet, of_task(batch_of(size=9, seed=9), 2)
    drawn = learner.episodic.draw(3)
    assert drawn is not None
    g, replayed = fleet.grad(batch)[0], fleet.grad(drawn)[0]
    before = fleet.theta.clone()
    fleet.learn(learner, batch)
    assert torch.allclose(before - fleet.theta, (9 * g + 3 * replayed) / 12, atol=1e-5)
    assert not torch.allclose(before - fleet.theta, (g + replayed) / 2, atol=1e-3)


@pytest.mark.parametrize("current", [False, True])
def test_the_current_task_is_replayed_only_if_asked_for(current: bool) -> None:
    setup = Setup(hidden=(5,), memory_per_task=4, memory_includes_current_task=current)
    rows = [Run(seed, {"learning_rate": 0.1}) for seed in (1, 2)]
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS["er"], rows, setup)
    assert isinstance(learner, Er)
    for task in range(3):
        learner.begin_task(task)
        batches = seen(learner)
        for batch in feed.batches(task):
            fleet.learn(learner, batch)
        learner.end_task()
        replayed = {
            slot // 2 for batch in batches for slot in batch.slots[:, 10:].flatten().tolist()
        }
        assert replayed == set(range(task + current))


def test_replayed_examples_are_those_of_the_memory() -> None:
    learner = after_two_tasks(6)
    contents = learner.episodic.contents()
    assert contents is not None
    kept = [
        {
            (*x, s)
            for x, s in zip(contents[0].x[r].tolist(), contents[0].slots[r].tolist(), strict=True)
        }
        for r in range(3)
    ]
    batches, batch = seen(learner), of_task(batch_of(size=8, seed=9), 2)
    for _ in range(10):
        learner.fleet.learn(learner, batch)
    assert len({tuple(b.slots[0].tolist()) for b in batches}) > 1  # drawn anew for every step
    for b in batches:
        assert torch.equal(b.x[:, :8], batch.x)
        for r in range(3):
            drawn = {
                (*x, s) for x, s in zip(b.x[r, 8:].tolist(), b.slots[r, 8:].tolist(), strict=True)
            }
            assert len(drawn) == 6
            assert drawn <= kept[r]


def test_one_pass_moves_batch_norm_statistics_by_both_batches_together() -> None:
    learner = after_two_tasks(5, build=Normed)
    fleet, batch = learner.fleet, of_task(batch_of(size=8, seed=9), 2)
    drawn = learner.episodic.draw(5)
    assert drawn is not None
    before = {name: b.clone() for name, b in fleet.buffers.items()}
    parameters = dict(
        zip(fleet.architecture.names, fleet.architecture.views(fleet.theta.clone()), strict=True)
    )
    fleet.learn(learner, batch)
    assert torch.equal(
        fleet.buffers["norm.num_batches_tracked"] - before["norm.num_batches_tracked"],
        torch.ones(3, dtype=torch.int64),
    )
    for r in range(3):
        x = torch.cat([batch.x[r], drawn.x[r]])
        seen_by_norm = torch.conv1d(
            x[:, None], parameters["conv.weight"][r], parameters["conv.bias"][r], padding=1
        )
        expected = 0.9 * before["norm.running_mean"][r] + 0.1 * seen_by_norm.mean((0, 2))
        assert torch.allclose(fleet.buffers["norm.running_mean"][r], expected, atol=1e-5)


def numbered(start: int, width: int, sizes: tuple[int, ...] | None) -> Batch:
    x = torch.arange(start, start + width).expand(3, width)
    return Batch(x[..., None], x % 4, sizes)


@pytest.mark.parametrize("first", [None, (3, 1, 0), (0, 2, 3)])
@pytest.mark.parametrize("second", [None, (2, 0, 1), (0, 0, 2)])
def test_joined_batches_hold_every_real_example_of_both_and_a_row_that_sits_out_sits_out(
    first: tuple[int, ...] | None, second: tuple[int, ...] | None
) -> None:
    one, other = numbered(0, 3, first), numbered(10, 2, second)
    both = joined(one, other)
    for r, (n, m) in enumerate(zip(first or (3, 3, 3), second or (2, 2, 2), strict=True)):
        expected = [*range(n), *range(10, 10 + m)] if n else []
        size = both.lengths()[r]
        assert both.x[r, :size, 0].tolist() == expected
        assert both.slots[r, :size].tolist() == [number % 4 for number in expected]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_unequal_size_are_joined_with_what_their_own_memory_has(policy: Policy) -> None:
    learner = after_two_tasks(7, policy, sizes=(20, 2, 1))
    fleet, batch = learner.fleet, of_task(batch_of(size=8, seed=9), 2, (8, 0, 3))
    assert learner.episodic.sizes == [20, 4, 2]
    drawn = learner.episodic.draw(7)
    assert drawn is not None
    assert drawn.sizes == (7, 4, 2)
    expected = [
        pooled(fleet, batch, drawn, 0),
        torch.zeros(fleet.theta.shape[1]),
        pooled(fleet, batch, drawn, 2),
    ]
    before, steps = fleet.theta.clone(), fleet.step.clone()
    fleet.learn(learner, batch)
    assert torch.allclose(before - fleet.theta, torch.stack(expected), atol=1e-5)
    assert (fleet.step - steps).tolist() == [1, 0, 1]
