from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.rwalk import Options, RWalk
from tests.learners.oracles import Plain, learn, lone, task, task_batch
from tests.toys import fleet_of


def rwalk(fleet: Fleet, strength: float = 2.0, **options: object) -> RWalk:
    return RWalk(
        fleet, {"strength": torch.full((fleet.runs, 1), strength)}, Options(**options), None
    )  # type: ignore[arg-type]


def unit(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


class ByHand(Plain):
    """One run, step by step."""

    def __init__(self, fleet: Fleet, rate: float, strength: float, options: Options) -> None:
        super().__init__(fleet, rate)
        self.strength, self.options = strength, options
        self.anchor = self.start = self.theta.clone()
        self.fisher, self.score, self.task_score, self.importance, self.path, self.squares = (
            torch.zeros_like(self.theta) for _ in range(6)
        )
        self.since = self.tasks = 0

    def stretch(self, steps: int) -> None:
        """The end of a stretch: first the scores, by the old information, then the information."""
        moved, half = self.theta - self.start, 1.0 if self.options.whole_distance else 0.5
        self.task_score = self.task_score + (
            self.path / (half * self.fisher * moved**2 + self.options.damping)
        ).clamp(min=0)
        self.fisher = 0.1 * self.fisher + 0.9 * self.squares / steps
        self.start, self.path, self.since = self.theta.clone(), torch.zeros_like(self.path), 0
        if not self.options.growing_squares:
            self.squares = torch.zeros_like(self.squares)

    def learn(self, batches: list[Batch]) -> None:
        for number, batch in enumerate(batches, start=1):
            _, g = self.loss_and_gradient(batch)
            step = -self.rate * (
                g + self.strength * 2 * self.importance * (self.theta - self.anchor)
            )
            self.theta = self.theta + step
            self.path = self.path - g * step
            self.squares = self.squares + g**2
            self.since += 1
            if number % self.options.fisher_every == 0:
                self.stretch(self.options.fisher_every)

    def end_task(self) -> None:
        if self.options.flush and self.since:
            self.stretch(self.since)
        if self.tasks == 0:
            self.score = self.task_score
        elif self.options.growing_scores:
            self.score = 1.5 * self.score + 0.5 * self.task_score
        else:
            self.score = (self.score + self.task_score) / 2
        if self.options.growing_squares:
            self.squares = torch.zeros_like(self.squares)
        self.task_score = torch.zeros_like(self.task_score)
        self.importance = unit(self.fisher) + unit(self.score)
        self.anchor, self.tasks = self.theta.clone(), self.tasks + 1


@pytest.mark.parametrize(
    "options",
    [
        Options(fisher_every=3),
        Options(fisher_every=1),
        Options(fisher_every=100),
        Options(),
        Options(fisher_every=3, damping=0.05),
        Options(fisher_every=3, whole_distance=True),
        Options(fisher_every=3, growing_scores=True),
        Options(fisher_every=4, growing_squares=True),
        Options(fisher_every=3, flush=False),
        Options(
            fisher_every=3,
            flush=False,
            whole_distance=True,
            growing_scores=True,
            growing_squares=True,
        ),
    ],
    ids=[
        "every 3",
        "every 1",
        "every 100",
        "default",
        "damping",
        "whole distance",
        "growing scores",
        "growing squares",
        "no flush",
        "authors",
    ],
)
def test_it_walks_as_the_equations_say_over_three_tasks(options: Options) -> None:
    learner = RWalk(lone(rate=0.25), {"strength": torch.ones(1, 1)}, options, None)
    hand = ByHand(learner.fleet, 0.25, 1.0, options)
    for number in range(3):
        learner.fleet.theta += 0.3 * torch.randn_like(
            learner.fleet.theta
        )  # a shove, so that the pull has something to do
        hand.theta = learner.fleet.theta[0].clone()
        batches = task(number, 8, runs=1, double=True)
        learn(learner, number, batches)
        hand.learn(batches)
        close(learner, hand)
        learner.end_task()
        hand.end_task()
        close(learner, hand)
        assert torch.allclose(learner.pull[0], 2 * hand.importance, rtol=1e-7, atol=1e-14)
        assert (hand.importance > 0).any()


def close(learner: RWalk, hand: ByHand) -> None:
    pairs = [
        (learner.fisher, hand.fisher),
        (learner.score, hand.score),
        (learner.fresh, hand.task_score),
        (learner.path, hand.path),
    ]
    for found, expected in [
        *pairs,
        (learner.squares, hand.squares),
        (learner.start, hand.start),
        (learner.fleet.theta, hand.theta),
    ]:
        assert torch.allclose(found[0], expected, rtol=1e-8, atol=1e-14)


def test_in_the_first_interval_there_is_no_distance_yet() -> None:
    learner = rwalk(fleet_of(), fisher_every=3, damping=0.01)
    learn(learner, 0, task(0, 2))
    path = learner.path.clone()
    batch = task_batch(0, 2)
    g = learner.fleet.grad(batch)[0].clone()
    learner.fleet.learn(learner, batch)
    assert torch.allclose(learner.fresh, (path + 0.1 * g * g) / 0.01, rtol=1e-4, atol=1e-9)
    assert (learner.fisher > 0).any(1).all()


@pytest.mark.parametrize("whole", [False, True])
def test_in_the_second_stretch_the_distance_is_in_the_geometry_of_the_first(whole: bool) -> None:
    learner = rwalk(fleet_of(), fisher_every=2, damping=1e-6, whole_distance=whole)
    learn(learner, 0, task(0, 2))
    fisher, score, start = (
        learner.fisher.clone(),
        learner.fresh.clone(),
        learner.fleet.theta.clone(),
    )
    path = torch.zeros_like(start)
    for batch in task(0, 4)[2:]:
        path += 0.1 * learner.fleet.grad(batch)[0] ** 2
        learner.fleet.learn(learner, batch)
    distance = (1.0 if whole else 0.5) * fisher * (learner.fleet.theta - start) ** 2
    assert torch.allclose(learner.fresh - score, path / (distance + 1e-6), rtol=1e-3, atol=0.05)
    assert (distance > 1e-6).any()


def test_both_terms_are_scaled_to_one_over_the_whole_network() -> None:
    learner = rwalk(fleet_of(), strength=3.0)
    for number in range(2):
        learn(learner, number, task(number, 12))
        learner.end_task()
        expected = torch.stack(
            [unit(f) + unit(s) for f, s in zip(learner.fisher, learner.score, strict=True)]
        )
        assert torch.allclose(learner.pull, 6 * expected, rtol=1e-5)
        assert (learner.pull.amin(1) == 0).all()
        assert (learner.pull.amax(1) <= 12).all()
        assert (learner.pull.amax(1) >= 6).all()
        layers = [
            layer.amax((1, 2))
            for layer in learner.fleet.architecture.views(learner.pull)
            if layer.dim() == 3
        ]
        assert not torch.allclose(layers[0], layers[1])  # not each tensor on its own


@pytest.mark.parametrize("growing", [False, True])
def test_scores_of_the_first_task_are_its_own_and_later_ones_are_averaged_in(growing: bool) -> None:
    learner = rwalk(fleet_of(), growing_scores=growing)
    scores = []
    for number in range(3):
        learn(learner, number, task(number, 10))
        scores.append(learner.fresh.clone())  # ten steps are a stretch: nothing is left for the end
        assert (scores[-1] > 0).any(1).all()
        learner.end_task()
        assert (learner.fresh == 0).all()
    first, second, third = scores
    keep = 1.5 if growing else 0.5
    assert torch.allclose(
        learner.score, keep * (keep * first + 0.5 * second) + 0.5 * third, rtol=1e-5
    )


def test_scores_are_never_negative_although_the_pull_takes_parameters_uphill() -> None:
    learner = rwalk(fleet_of(), strength=4.0, fisher_every=2)
    learn(learner, 0, task(0, 4))
    learner.end_task()
    learner.fleet.theta += 0.5 * torch.randn_like(learner.fleet.theta)
    learner.fleet.learn(learner, task_batch(1, 0))
    uphill = learner.path < 0
    assert uphill.any(1).all()
    learner.fleet.learn(learner, task_batch(1, 1))
    assert (learner.fresh >= 0).all()
    assert (learner.fresh == 0).any(1).all()


def test_the_authors_cadence_leaves_a_short_task_without_importance() -> None:
    learner = rwalk(fleet_of(), fisher_every=50, flush=False)
    learn(learner, 0, task(0, 30))
    learner.end_task()
    assert (learner.pull == 0).all()


def test_a_run_whose_task_ends_early_is_as_if_alone_and_one_that_diverged_scores_no_more() -> None:
    learner = rwalk(fleet_of(), fisher_every=4)
    alone = rwalk(fleet_of(), fisher_every=4)
    for step in range(9):
        batch = task_batch(0, step)
        learner.fleet.learn(learner, replace(batch, sizes=(7, 7 if step < 6 else 0, 7)))
        if step < 6:
            alone.fleet.learn(alone, batch)
    for one in (learner, alone):
        one.end_task()
    for name in ("fisher", "score", "pull", "anchor", "start"):
        assert torch.allclose(
            learner.state()[name][1], alone.state()[name][1], rtol=1e-4, atol=1e-6
        )
    learner.fleet.theta[1] *= 1e6
    learn(learner, 1, task(1, 5))
    assert learner.fleet.diverged() == [False, True, False]
    assert (learner.fresh[1] == 0).all()
    assert (learner.path[1] == 0).all()
