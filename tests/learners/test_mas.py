from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Build, Fleet
from onepass.engine.slots import Slots
from onepass.learners.mas import Mas, Options
from onepass.streams.base import separate_heads
from tests.learners.oracles import examples_of, learn, module_of, slope, task, task_batch, uneven
from tests.toys import Normed, fleet_of, small_net


def mas(fleet: Fleet, strength: float = 2.0, **options: bool) -> Mas:
    return Mas(fleet, {"strength": torch.full((fleet.runs, 1), strength)}, Options(**options), None)


def by_hand(fleet: Fleet, batches: list[Batch], per_batch: bool = False) -> Tensor:
    """Mean over a run's own examples of |d (f_1² + f_2²)|.

    Example by example; or of what is left of a batch.
    """
    rows = []
    for run in range(fleet.runs):
        module, total, seen = module_of(fleet, run), torch.zeros_like(fleet.theta[run]), 0
        for batch in batches:
            signed = []
            for x, slot in examples_of([batch], run):
                outputs = module(x[None])[0]
                signed.append(
                    slope(module, outputs[slot // 2 * 2] ** 2 + outputs[slot // 2 * 2 + 1] ** 2)
                )
            if signed:
                total += (
                    torch.stack(signed).sum(0).abs()
                    if per_batch
                    else torch.stack(signed).abs().sum(0)
                )
            seen += len(signed)
        rows.append(total / seen)
    return torch.stack(rows)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("build", [small_net, Normed])
def test_importance_is_the_mean_absolute_slope_of_the_squared_outputs_of_the_tasks_own_slots(
    build: Build, per_batch: bool
) -> None:
    learner, batches = mas(fleet_of(build), per_batch=per_batch), uneven(1)
    learn(learner, 1, batches)
    expected = by_hand(learner.fleet, batches, per_batch)
    learner.review(batches)
    learner.end_task()
    assert torch.allclose(learner.importance, expected, rtol=1e-4, atol=1e-7)
    assert torch.allclose(learner.pull, 2 * 2.0 * expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(learner.anchor, learner.fleet.theta)
    weights = learner.fleet.architecture.views(learner.importance)[
        -2
    ]  # [R, slots, features] of the head
    assert (weights[:, 2:4] > 0).any(2).all()
    assert (weights[:, [0, 1, 4, 5, 6, 7]] == 0).all()


def test_the_second_look_is_in_evaluation_mode() -> None:
    learner, batches = mas(fleet_of(Normed)), uneven()
    learn(learner, 0, batches)
    learner.fleet.buffers["norm.running_var"].mul_(100)
    learner.review(batches)
    assert torch.allclose(learner.importance, by_hand(learner.fleet, batches), rtol=1e-4, atol=1e-7)


def test_the_authors_absolute_value_of_a_batch_is_smaller_since_signs_cancel() -> None:
    batches = task(0, 4, size=10)
    found = []
    for per_batch in (False, True):
        learner = mas(fleet_of(), per_batch=per_batch)
        learn(learner, 0, batches)
        learner.review(batches)
        found.append(learner.importance)
    assert (found[1] <= found[0] * 1.0001 + 1e-7).all()
    assert (found[1].sum(1) < 0.9 * found[0].sum(1)).all()


def test_how_the_second_pass_is_cut_into_batches_matters_only_per_batch() -> None:
    whole = task_batch(0, 5, size=12)
    pieces = [
        replace(whole, x=whole.x[:, a:b], slots=whole.slots[:, a:b])
        for a, b in ((0, 5), (5, 11), (11, 12))
    ]
    for per_batch in (False, True):
        learner = mas(fleet_of(), last_task_only=True, per_batch=per_batch)
        learner.review([whole])
        together = learner.importance.clone()
        learner.review(pieces)
        assert torch.allclose(learner.importance, together, rtol=1e-4, atol=1e-7) is not per_batch


def test_labels_are_not_used() -> None:
    batches = uneven()
    learner = mas(fleet_of(), last_task_only=True)
    learn(learner, 0, batches)
    learner.review(batches)
    before = learner.importance
    learner.review([replace(batch, slots=1 - batch.slots) for batch in batches])
    assert torch.equal(before, learner.importance)


@pytest.mark.parametrize("last_only", [False, True])
def test_importances_of_all_tasks_add_up_unless_only_the_last_one_counts(last_only: bool) -> None:
    learner, fresh = mas(fleet_of(), last_task_only=last_only), []
    for number in range(3):
        batches = task(number, 3)
        learn(learner, number, batches)
        fresh.append(by_hand(learner.fleet, batches))
        learner.review(batches)
        learner.end_task()
    expected = fresh[-1] if last_only else fresh[0] + fresh[1] + fresh[2]
    assert torch.allclose(learner.importance, expected, rtol=1e-4, atol=1e-6)
    assert torch.allclose(learner.pull, 4 * expected, rtol=1e-4, atol=1e-6)
    head = learner.fleet.architecture.views(learner.pull)[-2][:, 0:2]
    assert (head == 0).all() if last_only else (head > 0).any()


def test_a_run_without_examples_in_a_task_keeps_its_importance() -> None:
    learner = mas(fleet_of())
    learner.review(task(0, 2))
    before = learner.importance.clone()
    learner.review([task_batch(1, sizes=(7, 0, 7))])
    assert torch.equal(learner.importance[1], before[1])
    assert (learner.importance[[0, 2]] > before[[0, 2]]).any(1).all()


def test_where_all_slots_compete_in_the_loss_importance_is_still_of_the_tasks_own_outputs() -> None:
    batch = task_batch(1)
    found = []
    for union in (False, True):
        learner = mas(
            Fleet(
                small_net, [10, 11, 12], Slots(Slots(separate_heads(4, 2)).table, union), [0.1] * 3
            )
        )
        learner.review([batch])
        found.append(learner.importance)
    assert torch.equal(*found)


def test_a_step_uses_no_importance_of_its_own_task() -> None:
    learner, plain = mas(fleet_of()), fleet_of()
    batches = task(0, 3)
    for batch in batches:
        plain.theta -= 0.1 * plain.grad(batch)[0]
    learn(learner, 0, batches)
    learner.review(batches)
    assert torch.allclose(learner.fleet.theta, plain.theta, atol=1e-6)
    g = plain.grad(batches[0], theta=learner.fleet.theta)[0]
    assert torch.allclose(learner.direction(batches[0]), g, atol=1e-6)
