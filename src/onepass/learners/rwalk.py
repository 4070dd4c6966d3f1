"""RWalk: Riemannian walk (Chaudhry, Dokania, Ajanthan, Torr: Riemannian walk for incremental learning, ECCV 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.learners.anchored import scaled
from onepass.learners.fisher import MovingFisher
from onepass.memory import EpisodicMemory


@dataclass(frozen=True)
class Options:
    """Scores and the Fisher estimate are brought up to date every `fisher_every` steps; `flush` does it for what is left at the end of a task.
    `damping` is `ε`. Three deviations of the A-GEM authors' code: `whole_distance` leaves the ½ out of the distance, `growing_scores` makes
    scores `1.5 s + 0.5 s_task` where the paper averages, `growing_squares` never empties the sum of squared gradients within a task.
    """

    fisher_every: int = 10
    flush: bool = True
    damping: float = 1e-3
    whole_distance: bool = False
    growing_scores: bool = False
    growing_squares: bool = False


class RWalk(MovingFisher):
    """`Ω = F + s`, each scaled to [0, 1] over the whole network: the Fisher information by `MovingFisher`, and scores.

    A task's score adds `relu(−Σ g·δ / (½ F Δ² + ε))` every `fisher_every` steps: how much the loss fell by moving a parameter (`g` without
    the pull, `δ` the step really taken), by how far it moved in the geometry of `F`. At the end of a task `s ← ½ (s + s_task)`; after the
    first one `s = s_task`.
    """

    hyperparameters = {"strength": (0.1, 1, 10, 100, 1000)}
    options = Options
    keeps = (*MovingFisher.keeps, "path", "start", "fresh", "score")
    points = (*MovingFisher.points, "start")

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        if options.damping <= 0:
            raise InputError(
                "damping must be above 0: a parameter that has not moved would be divided by nothing"
            )
        self.damping, self.half = options.damping, 1.0 if options.whole_distance else 0.5
        self.growing_scores, self.growing_squares = options.growing_scores, options.growing_squares
        self.path = torch.zeros_like(fleet.theta)  # −Σ g·δ since the scores were brought up to date
        self.start = fleet.theta.clone()  # where that was
        self.fresh = torch.zeros_like(fleet.theta)  # s_task
        self.score = torch.zeros_like(fleet.theta)  # s

    def direction(self, batch: Batch) -> Tensor:
        self._g, _ = self.fleet.grad(batch)
        return self.pulled(self._g)

    def accept(self) -> None:
        self.watch(self._g)

    def after_step(self, delta: Tensor) -> None:
        self.path.addcmul_(self._g, delta, value=-1)
        self.count_step()

    def average(self, rows: Tensor, count: Tensor) -> None:
        distance = (
            self.half * self.fisher * (self.fleet.theta - self.start).square()
        )  # by the information before this stretch
        self.fresh += torch.where(rows, (self.path / (distance + self.damping)).relu(), 0)
        self.path.masked_fill_(rows, 0)
        self.start.copy_(torch.where(rows, self.fleet.theta, self.start))
        squares = self.squares.clone() if self.growing_squares else self.squares
        super().average(rows, torch.full_like(count, self.every) if self.growing_squares else count)
        if self.growing_squares:
            self.squares.copy_(squares)

    def end_task(self) -> None:
        self.rest()
        if not self.anchored:
            self.score.copy_(self.fresh)
        else:
            self.score.mul_(1.5 if self.growing_scores else 0.5).add_(0.5 * self.fresh)
        self.fresh.zero_()
        if self.growing_squares:
            self.squares.zero_()
        gaps = self.fleet.gaps
        self.protect(scaled(self.fisher, gaps) + scaled(self.score, gaps))
