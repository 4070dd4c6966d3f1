from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Build, Fleet
from onepass.learners.ewc import Ewc, Options
from tests.learners.oracles import chances, examples_of, module_of, slope, task, task_batch, uneven
from tests.toys import FEATURES, Normed, batch_of, fleet_of, small_net


def ewc(fleet: Fleet, strength: float = 2.0, **options: object) -> Ewc:
    """The online form that the A-GEM authors compare with."""
    return original(fleet, strength, **{"fisher": "moving-average", "normalise": True} | options)


def original(fleet: Fleet, strength: float = 2.0, **options: object) -> Ewc:
    columns = {"strength": torch.full((fleet.runs, 1), strength)}
    return Ewc(fleet, columns, Options(**options), None)  # type: ignore[arg-type]


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


def test_importance_is_a_moving_average_of_squares_with_nine_tenths_on_the_new() -> None:
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
        assert torch.allclose(
            learner.fisher, 0.9 * torch.stack([x.square() for x in g]).mean(0), rtol=1e-4
        )


def test_the_authors_cadence_leaves_a_short_task_without_importance_and_carries_the_rest_over() -> (
    None
):
    learner = ewc(fleet_of(), fisher_every=10, flush=False)
    first = learn(learner, 7)
    learner.end_task()
    assert (learner.pull == 0).all()
    second = learn(learner, 10, task=1)
    learner.end_task()
    assert torch.allclose(
        learner.fisher,
        0.9 * torch.stack([x.square() for x in first + second]).sum(0) / 10,
        rtol=1e-4,
    )


def test_the_anchor_is_the_end_of_the_last_task() -> None:
    learner = ewc(fleet_of())
    for number in range(2):
        learn(learner, 3, number)
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
    assert torch.allclose(
        learner.fisher,
        0.1 * first + 0.9 * torch.stack([x.square() for x in g]).mean(0),
        rtol=1e-3,
        atol=1e-9,
    )


def test_without_scaling_the_pull_is_the_moving_average_itself() -> None:
    learner = ewc(fleet_of(), strength=3.0, normalise=False)
    learn(learner, 4)
    learner.end_task()
    assert torch.equal(learner.pull, 6 * learner.fisher)
    assert learner.total.numel() == 0


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


def second_look(learner: Ewc, number: int, batches: list[Batch]) -> None:
    """A whole task."""
    learner.begin_task(number)
    for batch in batches:
        learner.fleet.learn(learner, batch)
    learner.review(batches)
    learner.end_task()


def fisher_of(fleet: Fleet, batches: list[Batch]) -> Tensor:
    """The mean over each run's examples of squared gradients with the labels of the data."""
    rows = []
    for run in range(fleet.runs):
        module = module_of(fleet, run)
        rows.append(
            torch.stack(
                [
                    slope(module, chances(module, x, slot)[slot % 2]) ** 2
                    for x, slot in examples_of(batches, run)
                ]
            ).mean(0)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("build", [small_net, Normed])
def test_the_fisher_information_of_a_task_is_that_of_its_end_example_by_example_in_evaluation_mode(
    build: Build,
) -> None:
    learner, batches = original(fleet_of(build), labels="data"), uneven()
    second_look(learner, 0, batches)
    expected = fisher_of(learner.fleet, batches)
    assert torch.allclose(learner.fisher, expected, rtol=1e-3, atol=1e-9)
    assert torch.allclose(learner.pull, 2 * 2.0 * expected, rtol=1e-3, atol=1e-9)
    assert torch.equal(learner.anchor, learner.fleet.theta)


def line() -> nn.Module:
    return nn.Linear(FEATURES, 8)


def test_labels_drawn_from_the_models_own_prediction_give_the_fisher_information_on_average() -> (
    None
):
    """Five hundred runs that differ in their draws alone, against the sum over both labels."""
    fleet, batch = fleet_of(line, runs=500), task_batch(1, runs=1, size=4)
    fleet.theta.copy_(3 * fleet.theta[0])
    learner = original(fleet)
    learner.review([Batch(batch.x.expand(500, -1, -1), batch.slots.expand(500, -1))])
    exact, module = torch.zeros_like(fleet.theta[0]), module_of(fleet, 0)
    for x, slot in examples_of([batch], 0):
        logs = chances(module, x, slot)
        exact += (
            torch.stack([log.exp().detach() * slope(module, log) ** 2 for log in logs]).sum(0) / 4
        )
    error = learner.fisher.std(0) / 500**0.5
    assert ((learner.fisher.mean(0) - exact).abs() <= 4.5 * error + 1e-7).all()
    assert (error < 0.1 * exact.clamp(min=1e-6)).all()  # so a wrong distribution would show
    assert (exact - fisher_of(fleet_at(fleet, 0), [batch])[0]).abs().max() > 0.2 * exact.max()


def fleet_at(fleet: Fleet, run: int) -> Fleet:
    alone = fleet_of(line, runs=1)
    alone.theta.copy_(fleet.theta[run : run + 1])
    return alone


def test_labels_are_drawn_anew_for_every_example_run_and_task_by_the_model() -> None:
    fleet, one = fleet_of(line, runs=40), task_batch(2, runs=1, size=1)
    fleet.theta.copy_(2 * fleet.theta[0])
    learner, batch = original(fleet), Batch(one.x.expand(40, -1, -1), one.slots.expand(40, -1))
    draws = torch.stack(
        [
            learner.relabelled(batch, torch.full((40, 1), number)).slots[:, 0] - 4
            for number in range(60)
        ],
        1,
    )
    fleet.step += 7
    later = torch.stack(
        [
            learner.relabelled(batch, torch.full((40, 1), number)).slots[:, 0] - 4
            for number in range(60)
        ],
        1,
    )
    p = float(chances(module_of(fleet, 0), one.x[0, 0], 4)[1].exp().detach())
    for drawn in (draws, later):
        assert abs(float(drawn.float().mean()) - p) < 4 * (p * (1 - p) / 2400) ** 0.5
    for a, b in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1]), (draws, later)):
        table = [[int(((a == i) & (b == j)).sum()) for j in (0, 1)] for i in (0, 1)]
        assert chi2_contingency(table).pvalue > 1e-4


def test_squares_are_of_examples_and_not_of_batches() -> None:
    whole = task_batch(0, size=12)
    pieces = [
        replace(whole, x=whole.x[:, a:b], slots=whole.slots[:, a:b])
        for a, b in ((0, 5), (5, 11), (11, 12))
    ]
    learner = original(fleet_of(), labels="data")
    learner.review([whole])
    together = learner.fisher
    learner.review(pieces)
    assert torch.allclose(learner.fisher, together, rtol=1e-4, atol=1e-9)
    of_the_batch = learner.fleet.grad(whole)[0] ** 2
    assert (together.sum(1) > 3 * of_the_batch.sum(1)).all()


def test_the_draws_do_not_depend_on_how_the_second_look_is_cut_into_batches() -> None:
    whole = task_batch(0, size=12)
    pieces = [
        replace(whole, x=whole.x[:, a:b], slots=whole.slots[:, a:b])
        for a, b in ((0, 5), (5, 11), (11, 12))
    ]
    learner = original(fleet_of())
    learner.review([whole])
    together = learner.fisher
    learner.review(pieces)
    assert torch.allclose(learner.fisher, together, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("normalise", [False, True])
def test_one_anchor_stands_for_the_pulls_of_all_past_tasks(normalise: bool) -> None:
    learner, past = original(fleet_of(), strength=3.0, labels="data", normalise=normalise), []
    shapes = {name: tensor.shape for name, tensor in learner.state().items()}
    for number in range(3):
        batches = task(number, 4)
        second_look(learner, number, batches)
        fisher = fisher_of(learner.fleet, batches)
        past.append((scaled(fisher) if normalise else fisher, learner.fleet.theta.clone()))
    assert shapes == {name: tensor.shape for name, tensor in learner.state().items()}
    learner.fleet.theta += 0.3 * torch.randn_like(learner.fleet.theta)
    theta, batch = learner.fleet.theta.clone().requires_grad_(), task_batch(3)
    penalty = 3.0 * torch.stack([(fisher * (theta - end) ** 2).sum() for fisher, end in past]).sum()
    pull = torch.autograd.grad(penalty, theta)[0]
    found = learner.direction(batch).clone() - learner.fleet.grad(batch)[0]
    assert torch.allclose(found, pull, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(
        found, 2 * 3.0 * learner.total * (learner.fleet.theta - past[-1][1]), rtol=1e-3, atol=1e-4
    )


def test_information_of_earlier_tasks_is_kept_whole() -> None:
    learner, fishers = original(fleet_of()), []
    for number in range(3):
        second_look(learner, number, task(number, 3))
        fishers.append(learner.fisher.clone())
        heads = learner.fleet.architecture.views(learner.pull)[-1]  # biases of the head, [R, slots]
        assert (heads[:, : 2 * number + 2] > 0).all()
        assert (heads[:, 2 * number + 2 :] == 0).all()
    assert torch.allclose(learner.total, fishers[0] + fishers[1] + fishers[2], rtol=1e-5)
    assert torch.allclose(learner.pull, 4 * learner.total)


def test_in_its_first_task_the_original_is_plain_sgd_and_looks_at_the_data_a_second_time() -> None:
    learner, plain = original(fleet_of()), fleet_of()
    for g in learn(learner, 5):
        plain.theta -= 0.1 * g
    assert torch.allclose(learner.fleet.theta, plain.theta, atol=1e-6)
    assert Ewc.needs_with(Options()).second_pass
    assert not Ewc.needs_with(Options(fisher="moving-average")).second_pass


def test_a_run_without_examples_in_a_task_keeps_its_pull_and_its_anchor() -> None:
    learner = original(fleet_of())
    second_look(learner, 0, task(0, 3))
    pull, anchor = learner.pull.clone(), learner.anchor.clone()
    second_look(learner, 1, [task_batch(1, sizes=(7, 0, 7))])
    learned = pull[1] > 0
    assert torch.equal(learner.pull[1], pull[1])
    assert torch.equal(learner.anchor[1][learned], anchor[1][learned])
    assert (learner.pull[0] > pull[0]).any()
