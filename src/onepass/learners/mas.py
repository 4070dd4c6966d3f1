"""MAS: memory aware synapses.

Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars: Memory aware synapses, ECCV 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.anchored import Anchored, examples, singly
from onepass.learners.declarations import Needs
from onepass.learners.state import over_theta, workspace


@dataclass(frozen=True)
class Options:
    """Two deviations of the A-GEM authors' code.

    `per_batch` takes the absolute value of the gradient of a whole batch's sum, where signs have
    cancelled. `last_task_only` forgets the importances of earlier tasks at every task's end.
    """

    per_batch: bool = False
    last_task_only: bool = False


class Mas(Anchored):
    """`Ω ← Ω + 1/N Σ_n |∂ ‖f(x_n; θ)‖² / ∂θ|` at the end of a task, over all its examples.

    `f` are the outputs of the task's own slots, in evaluation mode; no label is used.
    """

    hyperparameters = {"strength": (0.01, 0.1, 1, 10)}
    options = Options
    needs = Needs(second_pass=True)
    importance: Tensor = over_theta()  # Ω
    _total: Tensor = workspace()  # in the second pass
    _seen: Tensor = workspace(lambda learner: torch.zeros_like(learner.columns["strength"]))

    def begin_review(self) -> None:
        self._total.zero_()
        self._seen.zero_()

    def review_batch(self, batch: Batch) -> None:
        for some in (batch,) if self.option.per_batch else singly(batch):
            with self.fleet.workspace():
                g, _ = self.fleet.grad(some, loss=self.squared_outputs, training=False)
                self._total += g.abs()
            self._seen += examples(some, self._seen)

    def end_review(self) -> None:
        fresh = self._total / self._seen.clamp(min=1)
        self.importance.copy_(fresh if self.option.last_task_only else self.importance + fresh)

    def squared_outputs(self, logits: Tensor, slots: Tensor, _: object) -> Tensor:
        """`Σ_n ‖f(x_n)‖²`: the sum over a batch."""
        return self.fleet.competition.outputs(logits, slots).square().sum()

    def end_task(self) -> None:
        self.protect(self.importance)
