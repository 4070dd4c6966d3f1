from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.pi import Options, Pi
from tests.learners.oracles import Plain, double_net, learn, lone, task, task_batch
from tests.toys import FEATURES, fleet_of


def pi(fleet: Fleet, strength: float = 2.0, damping: float = 1e-3) -> Pi:
    return Pi(fleet, {"strength": torch.full((fleet.runs, 1), strength)}, Options(damping), None)


def shove(fleet: Fleet) -> None:
    """Parameters away from the anchor: the pull acts, and takes some of them uphill."""
    fleet.theta += 0.3 * torch.randn_like(fleet.theta)


class ByHand(Plain):
    """The paper's equations for one run, step by step."""

    def __init__(self, fleet: Fleet, rate: float, strength: float, damping: float) -> None:
        super().__init__(fleet, rate)
        self.strength, self.damping, self.anchor = strength, damping, self.theta.clone()
        self.omega, self.importance = torch.zeros_like(self.theta), torch.zeros_like(self.theta)

    def learn(self, batches: list[Batch]) -> None:
        self.omega = torch.zeros_like(self.theta)
        for batch in batches:
            _, g = self.loss_and_gradient(batch)
            step = -self.rate * (
                g + self.strength * 2 * self.importance * (self.theta - self.anchor)
            )
            self.theta = self.theta + step
            self.omega -= g * step

    def end_task(self) -> None:
        per_distance = self.omega / ((self.theta - self.anchor) ** 2 + self.damping)
        self.importance = self.importance + per_distance.clamp(min=0)
        self.anchor = self.theta.clone()


@pytest.mark.parametrize(("strength", "damping"), [(1 / 32, 1e-3), (1.0, 0.1), (4.0, 0.25)])
def test_it_walks_as_the_equations_say_over_three_tasks(strength: float, damping: float) -> None:
    learner = pi(lone(), strength, damping)
    hand = ByHand(learner.fleet, 0.125, strength, damping)
    for number in range(3):
        shove(learner.fleet)
        hand.theta = learner.fleet.theta[0].clone()
        batches = task(number, 6, runs=1, double=True)
        learn(learner, number, batches)
        hand.learn(batches)
        assert torch.allclose(learner.fleet.theta[0], hand.theta, rtol=1e-9)
        assert torch.allclose(learner.path[0], hand.omega, rtol=1e-9, atol=1e-15)
        learner.end_task()
        hand.end_task()
        assert torch.allclose(learner.importance[0], hand.importance, rtol=1e-9, atol=1e-15)
        assert torch.allclose(
            learner.pull[0], 2 * strength * hand.importance, rtol=1e-9, atol=1e-15
        )
        assert torch.equal(learner.anchor[0], learner.fleet.theta[0])
        assert (learner.path == 0).all()
    assert (hand.omega < 0).any()


def after_a_task(strength: float) -> Pi:
    learner = pi(lone(), strength, damping=0.1)
    learn(learner, 0, task(0, 10, runs=1, double=True))
    learner.end_task()
    return learner


def path_and_drop(strength: float, rate: float, steps: int) -> tuple[Tensor, float]:
    """The path integral of a second task on one fixed batch, and how far its own loss fell."""
    learner, batch = after_a_task(strength), task_batch(0, 99, runs=1, double=True)
    learner.fleet.learning_rate.fill_(rate)
    before = Plain(learner.fleet, rate).loss_and_gradient(batch)[0]
    learn(learner, 1, [batch] * steps)
    return learner.path, before - Plain(learner.fleet, rate).loss_and_gradient(batch)[0]


@pytest.mark.parametrize("strength", [0.0, 4.0], ids=["without a pull", "with a strong pull"])
def test_the_path_integral_sums_to_the_drop_of_the_loss_itself_up_to_the_step_size(
    strength: float,
) -> None:
    errors = []
    for rate, steps in ((1 / 32, 16), (1 / 64, 32), (1 / 128, 64)):
        path, drop = path_and_drop(strength, rate, steps)
        assert drop > 0
        errors.append(float(path.sum()) / drop - 1)
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.2)
    assert errors[1] / errors[2] == pytest.approx(2, abs=0.1)
    assert abs(errors[-1]) < 0.01


def test_a_strong_pull_changes_the_path_so_that_the_two_cases_above_are_two() -> None:
    free, pulled = (path_and_drop(strength, 1 / 64, 32)[1] for strength in (0.0, 4.0))
    assert pulled < 0.8 * free


def scales() -> nn.Module:
    return nn.Linear(FEATURES, 8, bias=False).double()


def test_without_damping_importance_times_squared_distance_sums_to_the_drop_of_the_loss() -> None:
    """A logistic regression on examples that share no input: each parameter goes downhill."""
    batch = Batch(
        torch.eye(FEATURES, dtype=torch.float64)[None], torch.tensor([[0, 1, 0, 1, 1, 0]])
    )
    learner = pi(lone(scales, rate=1 / 16), damping=1e-15)
    start = learner.fleet.theta.clone()
    before = Plain(learner.fleet, 0).loss_and_gradient(batch)[0]
    learn(learner, 0, [batch] * 100)
    learner.end_task()
    drop = before - Plain(learner.fleet, 0).loss_and_gradient(batch)[0]
    assert float(
        (learner.importance * (learner.fleet.theta - start).square()).sum()
    ) == pytest.approx(drop, rel=0.01)
    assert drop > 0.1


def test_a_parameter_that_the_pull_moved_uphill_loses_no_importance() -> None:
    learner = pi(fleet_of(), strength=40.0, damping=0.25)
    learn(learner, 0, task(0, 6))
    assert (learner.path >= 0).all()  # plain SGD goes downhill
    learner.end_task()
    first = learner.importance.clone()
    shove(learner.fleet)
    learn(learner, 1, task(1, 2))
    uphill = learner.path < 0
    assert uphill.any(1).all()
    learner.end_task()
    assert torch.equal(learner.importance[uphill], first[uphill])
    assert (learner.importance >= first).all()


@pytest.mark.parametrize("damping", [1e-4, 1e-3, 1.0])
def test_damping_bounds_the_importance_of_what_hardly_moved(damping: float) -> None:
    learner = pi(fleet_of(), damping=damping)
    start = learner.fleet.theta.clone()
    learn(learner, 0, task(0, 3))
    path, moved = learner.path.clone(), learner.fleet.theta - start
    learner.end_task()
    assert torch.allclose(learner.importance, (path / (moved**2 + damping)).clamp(min=0), rtol=1e-5)
    assert (learner.importance <= path.clamp(min=0) / damping).all()
    assert (learner.importance[moved == 0] == 0).all()  # the heads of other tasks


def test_importance_of_earlier_tasks_lives_on_and_only_of_the_tasks_own_steps_is_added() -> None:
    learner = pi(fleet_of())
    learn(learner, 0, task(0, 5))
    learner.end_task()
    first, begin = learner.importance.clone(), learner.fleet.theta.clone()
    learn(learner, 1, task(1, 5))
    path, moved = learner.path.clone(), learner.fleet.theta - begin
    learner.end_task()
    assert torch.allclose(
        learner.importance - first, (path / (moved**2 + 1e-3)).clamp(min=0), rtol=1e-3, atol=1e-5
    )
    assert (
        (first[:, -8:-6] > 0).any(1).all()
    )  # the first task's head: the second one does not move it
    assert torch.equal(learner.importance[:, -8:-6], first[:, -8:-6])


def test_a_run_that_sits_out_changes_nothing_of_its_own() -> None:
    learner = pi(fleet_of())
    learn(learner, 0, task(0, 4))
    path, theta = learner.path.clone(), learner.fleet.theta.clone()
    learner.fleet.learn(learner, task_batch(0, 9, sizes=(7, 0, 3)))
    assert torch.equal(learner.path[1], path[1])
    assert torch.equal(learner.fleet.theta[1], theta[1])
    assert (learner.path[[0, 2]] != path[[0, 2]]).any(1).all()


def wild() -> tuple[Pi, Pi]:
    """A fleet whose second run diverges in its second task, and the same fleet without that."""
    made = []
    for factor in (1e6, 1.0):
        learner = pi(fleet_of(double_net))
        learn(learner, 0, task(0, 3, double=True))
        learner.end_task()
        learner.fleet.theta[1] *= factor
        learn(learner, 1, task(1, 3, double=True))
        made.append(learner)
    return made[0], made[1]


def test_a_run_that_diverged_changes_no_more_and_its_neighbours_do_not_notice() -> None:
    learner, calm = wild()
    assert learner.fleet.diverged() == [False, True, False]
    assert (learner.path[1] == 0).all()
    before = learner.importance.clone()
    learner.end_task()
    calm.end_task()
    assert torch.equal(learner.importance[1], before[1])
    for name, tensor in learner.state().items():
        assert torch.equal(tensor[[0, 2]], calm.state()[name][[0, 2]])
