from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.learners.ewc import Ewc, Options
from toys import Normed, batch_of, fleet_of


def ewc(fleet: Fleet, strength: float = 2.0, **options: object) -> Ewc:
    return Ewc(fleet, {"strength": torch.full((fleet.runs, 1), strength)}, Options(**options), None)  # type: ignore[arg-type]


def learn(learner: Ewc, steps: int, task: int = 0) -> list[Tensor]:
    """Steps of a task; returns the unregularised gradients it saw."""
    learner.begin_task(task)
    gradients = []
    for step in range(steps):
        batch = batch_of(seed=100 * task + step)
        gradients.append(learner.fleet.grad(batch, update_buffers=False)[0])
        learner.fleet.learn(learner, batch)
    return gradients


def scaled(fisher: Tensor) -> Tensor:
    low, high = fisher.amin(1, keepdim=True), fisher.amax(1, keepdim=True)
    return (fisher - low) / (high - low)


def test_the_first_task_is_plain_sgd() -> None:
    fleet, plain = fleet_of(), fleet_of()
    for g in learn(ewc(fleet), 5):
        plain.theta -= 0.1 * g
    assert torch.allclose(fleet.theta, plain.theta, atol=1e-6)


def test_importance_is_the_moving_average_of_squared_batch_gradients_with_nine_tenths_on_the_new() -> None:
    learner = ewc(fleet_of(), fisher_every=3)
    g = learn(learner, 6)
    learner.end_task()
    first = 0.9 * torch.stack([x.square() for x in g[:3]]).mean(0)
    fisher = 0.1 * first + 0.9 * torch.stack([x.square() for x in g[3:]]).mean(0)
    assert torch.allclose(learner.fisher, fisher, rtol=1e-4)
    assert torch.allclose(learner.pull, 2 * 2.0 * scaled(fisher), rtol=1e-3, atol=1e-6)


def test_the_pull_is_the_gradient_of_the_penalty_without_a_half() -> None:
    learner = ewc(fleet_of(), strength=3.0)
    learn(learner, 4)
    learner.end_task()
    fleet, anchor = learner.fleet, learner.fleet.theta.clone()
    importance = scaled(learner.fisher)
    fleet.theta += 0.05
    batch = batch_of(seed=9)
    theta = fleet.theta.clone().requires_grad_()
    penalty = 3.0 * (importance * (theta - anchor).square()).sum()
    expected = fleet.grad(batch)[0] + torch.autograd.grad(penalty, theta)[0]
    assert torch.allclose(learner.direction(batch), expected, atol=1e-5)


@pytest.mark.parametrize("steps", [2, 7, 10, 13])
def test_importance_is_not_zero_after_a_task_however_short(steps: int) -> None:
    learner = ewc(fleet_of(), fisher_every=10)
    g = learn(learner, steps)
    learner.end_task()
    assert (learner.pull > 0).any(1).all()
    if steps < 10:
        assert torch.allclose(learner.fisher, 0.9 * torch.stack([x.square() for x in g]).mean(0), rtol=1e-4)


def test_the_authors_cadence_leaves_a_short_task_without_importance_and_carries_the_rest_over() -> None:
    learner = ewc(fleet_of(), fisher_every=10, flush=False)
    first = learn(learner, 7)
    learner.end_task()
    assert (learner.pull == 0).all()
    second = learn(learner, 10, task=1)
    learner.end_task()
    assert torch.allclose(learner.fisher, 0.9 * torch.stack([x.square() for x in first + second]).sum(0) / 10, rtol=1e-4)


def test_the_anchor_is_the_end_of_the_last_task() -> None:
    learner = ewc(fleet_of())
    for task in range(2):
        learn(learner, 3, task)
        learner.end_task()
        assert torch.equal(learner.anchor, learner.fleet.theta)
    fisher = learner.fisher.clone()
    learn(learner, 3, 2)
    assert not torch.equal(learner.anchor, learner.fleet.theta)
    assert torch.equal(fisher, learner.fisher)


def test_importance_of_earlier_tasks_lives_on() -> None:
    learner = ewc(fleet_of())
    learn(learner, 10)
    learner.end_task()
    first = learner.fisher.clone()
    g = learn(learner, 10, task=1)
    learner.end_task()
    assert torch.allclose(learner.fisher, 0.1 * first + 0.9 * torch.stack([x.square() for x in g]).mean(0), rtol=1e-3, atol=1e-9)


def test_consolidation_leaves_the_model_unchanged() -> None:
    learner = ewc(fleet_of(Normed))
    learn(learner, 5)
    theta, buffers = learner.fleet.theta.clone(), {name: b.clone() for name, b in learner.fleet.buffers.items()}
    learner.end_task()
    assert torch.equal(theta, learner.fleet.theta)
    assert all(torch.equal(b, buffers[name]) for name, b in learner.fleet.buffers.items())


def test_a_run_whose_task_ends_early_averages_over_its_own_steps() -> None:
    learner, alone = ewc(fleet_of(), fisher_every=4), ewc(fleet_of(), fisher_every=4)
    for step in range(9):
        learner.fleet.learn(learner, batch_of(seed=step, sizes=(7, 7 if step < 6 else 0, 7)))
        if step < 6:
            alone.fleet.learn(alone, batch_of(seed=step))
    learner.end_task()
    alone.end_task()
    assert torch.allclose(learner.fisher[1], alone.fisher[1], rtol=1e-5)
    assert torch.allclose(learner.pull[1], alone.pull[1], rtol=1e-5)
