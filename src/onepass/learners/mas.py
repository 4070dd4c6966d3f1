"""MAS: memory aware synapses (Aljundi, Babiloni, Elhoseiny, Rohrbach, Tuytelaars: Memory aware synapses, ECCV 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.anchored import Anchored, examples, singly
from onepass.memory import EpisodicMemory


@dataclass(frozen=True)
class Options:
    """Two deviations of the A-GEM authors' code: `per_batch` takes the absolute value of the gradient of a whole batch's sum, where signs
    have cancelled, and `last_task_only` forgets the importances of earlier tasks at every task's end."""

    per_batch: bool = False
    last_task_only: bool = False


class Mas(Anchored):
    """`Ω ← Ω + 1/N Σ_n |∂ ‖f(x_n; θ)‖² / ∂θ|` at the end of a task, `f` the outputs of its own slots, over all examples of the task again.

    The network is as in evaluation; no label is used.
    """

    hyperparameters = {"strength": (0.01, 0.1, 1, 10)}
    options = Options
    keeps = (*Anchored.keeps, "importance")

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.per_batch, self.last_task_only = options.per_batch, options.last_task_only
        self.importance = torch.zeros_like(fleet.theta)  # Ω
        self._total, self._seen = (
            torch.zeros_like(fleet.theta),
            torch.zeros_like(self.strength),
        )  # in the second look

    @classmethod
    def looks_again(cls, options: object) -> bool:
        return True

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        return self.pulled(g)

    def begin_review(self) -> None:
        self._total.zero_()
        self._seen.zero_()

    def look_again(self, batch: Batch) -> None:
        for some in (batch,) if self.per_batch else singly(batch):
            with self.fleet.workspace():
                g, _ = self.fleet.grad(some, loss=self.squared_outputs, training=False)
                self._total += g.abs()
            self._seen += examples(some, self._seen)

    def end_review(self) -> None:
        fresh = self._total / self._seen.clamp(min=1)
        self.importance.copy_(fresh if self.last_task_only else self.importance + fresh)

    def squared_outputs(self, logits: Tensor, slots: Tensor, _: object) -> Tensor:
        """`Σ_n ‖f(x_n)‖²`: the sum over a batch."""
        return self.fleet.competition.outputs(logits, slots).square().sum()

    def end_task(self) -> None:
        self.protect(self.importance)
