"""EWC: elastic weight consolidation (Kirkpatrick et al., PNAS 2017) in the online form that the A-GEM authors compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.learners.base import Learner
from onepass.memory import EpisodicMemory
from onepass.streams.batch import Batch

NEW = 0.9  # weight of the new estimate in the moving average


@dataclass(frozen=True)
class Options:
    """The Fisher estimate is averaged in every `fisher_every` steps. `flush` averages in what is left at the end of a task; without it the
    rest waits for the next task, as in the authors' code, where a task shorter than `fisher_every` steps leaves no importance at all."""

    fisher_every: int = 10
    flush: bool = True


class Ewc(Learner):
    """Gradient of `ℓ(θ) + λ Σ_i F_i (θ_i − θ*_i)²`, `θ*` the parameters at the end of the last task.

    `F ← 0.1 F + 0.9 mean(g²)` over the batch-mean gradients `g` of the last `fisher_every` steps; at the end of a task it is scaled to [0, 1]
    over the whole network (minimum and maximum). No factor ½.
    """

    hyperparameters = ("strength",)
    options = Options
    keeps = ("fisher", "squares", "count", "pull", "anchor", "anchored", "steps")

    def __init__(self, fleet: Fleet, columns: Mapping[str, Tensor], options: Options, memory: EpisodicMemory | None) -> None:
        super().__init__(fleet, columns, options, memory)
        self.every, self.flush = options.fisher_every, options.flush
        self.strength = columns["strength"]
        self.fisher = torch.zeros_like(fleet.theta)
        self.squares = torch.zeros_like(fleet.theta)  # sum of g² since the last average
        self.count = torch.zeros_like(fleet.active, dtype=torch.int64)  # and over how many steps
        self.pull = torch.zeros_like(fleet.theta)  # 2 λ F
        self.anchor = fleet.theta.clone()
        self.anchored = False
        self._away = torch.empty_like(fleet.theta)  # room for θ − θ*
        self.steps = 0

    def begin_task(self, task: int) -> None:
        self.steps = 0

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        self.squares.addcmul_(g, g)  # rows that sit out have g = 0
        self.count += self.fleet.active
        self.steps += 1
        if self.steps % self.every == 0:
            self._average(self.fleet.active, self.every)
        if not self.anchored:
            return g
        return g.addcmul_(self.pull, torch.sub(self.fleet.theta, self.anchor, out=self._away))

    def _average(self, rows: Tensor, count: Tensor | int) -> None:
        estimate = (1 - NEW) * self.fisher + NEW * self.squares / count
        self.fisher = torch.where(rows, estimate, self.fisher)
        self.squares = torch.where(rows, 0, self.squares)
        self.count = torch.where(rows, 0, self.count)

    def end_task(self) -> None:
        if self.flush:
            self._average(self.count > 0, self.count.clamp(min=1))
        low, high = self.fisher.amin(-1, keepdim=True), self.fisher.amax(-1, keepdim=True)
        importance = torch.where(high > low, (self.fisher - low) / (high - low), 0)
        self.pull = 2 * self.strength * importance
        self.anchor = self.fleet.theta.clone()
        self.anchored = True
