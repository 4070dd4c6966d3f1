"""RWalk: Riemannian walk.

Chaudhry, Dokania, Ajanthan, Torr: Riemannian walk for incremental learning, ECCV 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.learners.anchored import check_damping, scaled
from onepass.learners.declarations import Needs
from onepass.learners.fisher import MovingFisher
from onepass.learners.state import over_theta, point


@dataclass(frozen=True)
class Options:
    """Scores and Fisher information are updated every `fisher_every` steps.

    `flush` does it for what is left at the end of a task; `damping` is `ε`. Three deviations of the
    A-GEM authors' code: `whole_distance` leaves the ½ out of the distance, `growing_scores` makes
    scores `1.5 s + 0.5 s_task` where the paper averages, and `growing_squares` never empties the
    sum of squared gradients within a task.
    """

    fisher_every: int = 10
    flush: bool = True
    damping: float = 1e-3
    whole_distance: bool = False
    growing_scores: bool = False
    growing_squares: bool = False

    def __post_init__(self) -> None:
        check_damping(self.damping)


class RWalk(MovingFisher):
    """`Ω = F + s`, each scaled to [0, 1]: the Fisher information by `MovingFisher`, and scores.

    Every `fisher_every` steps a task's score adds `relu(−Σ g·δ / (½ F Δ² + ε))`: how much the loss
    fell by moving a parameter (`g` without the pull, `δ` the step really taken), by how far it
    moved in the geometry of `F`. At the end of a task `s ← ½ (s + s_task)`; after the first one
    `s = s_task`.
    """

    hyperparameters = {"strength": (0.1, 1, 10, 100, 1000)}
    options = Options
    needs = Needs(delta=True)
    path: Tensor = over_theta()  # −Σ g·δ since the last update of scores
    start: Tensor = point()  # where that was
    fresh: Tensor = over_theta()  # s_task
    score: Tensor = over_theta()  # s

    def accept(self) -> None:
        self.watch(self._g)

    def after_step(self, delta: Tensor) -> None:
        self.path.addcmul_(self._g, delta, value=-1)
        self.average_if_due()

    def average(self, rows: Tensor, count: Tensor) -> None:
        half = 1.0 if self.option.whole_distance else 0.5
        moved = self.fleet.theta - self.start
        distance = half * self.fisher * moved.square()  # by the information before this stretch
        self.fresh += torch.where(rows, (self.path / (distance + self.option.damping)).relu(), 0)
        self.path.masked_fill_(rows, 0)
        self.start.copy_(torch.where(rows, self.fleet.theta, self.start))
        if not self.option.growing_squares:
            super().average(rows, count)
            return
        squares = self.squares.clone()
        super().average(rows, torch.full_like(count, self.option.fisher_every))
        self.squares.copy_(squares)

    def end_task(self) -> None:
        self.average_rest()
        if not self.anchored:
            self.score.copy_(self.fresh)
        else:
            self.score.mul_(1.5 if self.option.growing_scores else 0.5).add_(0.5 * self.fresh)
        self.fresh.zero_()
        if self.option.growing_squares:
            self.squares.zero_()
        gaps = self.fleet.gaps
        self.protect(scaled(self.fisher, gaps) + scaled(self.score, gaps))
