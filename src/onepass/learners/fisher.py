"""The Fisher information as a moving average over the stream: EWC++.

Chaudhry, Dokania, Ajanthan, Torr: Riemannian walk, ECCV 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.learners.anchored import Anchored
from onepass.learners.declarations import Capture
from onepass.learners.state import over_theta, per_run

NEW = 0.9  # weight of the new estimate in the moving average


class MovingFisher(Anchored):
    """`F ← 0.1 F + 0.9 mean(g²)` over the batch gradients `g` of the last `fisher_every` steps.

    `flush` averages in what is left at the end of a task. Without it the rest waits for the next
    task, as in the authors' code, where a task shorter than `fisher_every` steps leaves no
    importance at all.
    """

    former = ("steps",)
    fisher: Tensor = over_theta()
    squares: Tensor = over_theta()  # sum of g² since the last average
    count: Tensor = per_run(1)  # and over how many steps

    def capture(self) -> Capture | None:
        return Capture(period=self.option.fisher_every, reads_task=False)

    def watch(self, g: Tensor) -> None:
        """Add the unregularised gradient of a step."""
        self.squares.addcmul_(g, g)  # rows that sit out have g = 0
        self.count += self.fleet.active

    def average_if_due(self) -> None:
        """Average after every `fisher_every` steps of the task; called once in each step."""
        if (self.fleet.steps_in_task + 1) % self.option.fisher_every == 0:
            self.average(self.fleet.active, torch.full_like(self.count, self.option.fisher_every))

    def average_rest(self) -> None:
        """At the end of a task, average in what is left."""
        if self.option.flush:
            self.average(self.count > 0, self.count.clamp(min=1))

    def average(self, rows: Tensor, count: Tensor) -> None:
        """Average the squares of the last `count` steps in, for some rows."""
        estimate = (1 - NEW) * self.fisher + NEW * self.squares / count
        self.fisher.copy_(torch.where(rows, estimate, self.fisher))
        self.squares.masked_fill_(rows, 0)
        self.count.masked_fill_(rows, 0)
