"""What the regularising methods share: a quadratic pull towards the past, weighted by how much each parameter matters to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.base import Learner
from onepass.memory import EpisodicMemory


class Anchored(Learner):
    """Gradient of `ℓ(θ) + λ Σ_i Ω_i (θ_i − θ*_i)²`, `θ*` the parameters at the end of the last task, `Ω` the importances, `λ` the `strength`.

    No factor ½.
    """

    keeps: ClassVar[tuple[str, ...]] = ("pull", "anchor", "anchored")
    points: ClassVar[tuple[str, ...]] = ("anchor",)
    reads_task = False

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: object,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.strength = columns["strength"]
        self.pull = torch.zeros_like(fleet.theta)  # 2 λ Ω
        self.anchor = fleet.theta.clone()
        self.anchored = False
        self._away = torch.empty_like(fleet.theta)  # room for θ − θ*, and for a direction
        self._g = fleet.theta[:, :0]  # the gradient of the step that is being taken

    def pulled(self, g: Tensor) -> Tensor:
        """`g + 2 λ Ω (θ − θ*)`; `g` stays what it is."""
        if not self.anchored:
            return g
        away = torch.sub(self.fleet.theta, self.anchor, out=self._away)
        return torch.addcmul(g, self.pull, away, out=away)

    def protect(self, importance: Tensor) -> None:
        """From now on, stay close to where `θ` is now."""
        torch.mul(2 * self.strength, importance, out=self.pull)
        self.anchor.copy_(self.fleet.theta)
        self.anchored = True


def scaled(importance: Tensor, gaps: Tensor | None = None) -> Tensor:
    """Each row scaled to [0, 1] by its minimum and maximum over the whole network; a constant row vanishes. `gaps` are columns that do not count.

    >>> scaled(torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, 4.0]])).tolist()
    [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
    """
    if gaps is None:
        low, high = importance.amin(-1, keepdim=True), importance.amax(-1, keepdim=True)
        return torch.where(high > low, (importance - low) / (high - low), 0)
    low, high = (
        importance.masked_fill(gaps, torch.inf).amin(-1, keepdim=True),
        importance.masked_fill(gaps, -torch.inf).amax(-1, keepdim=True),
    )
    return torch.where((high > low) & ~gaps, (importance - low) / (high - low), 0)


def singly(batch: Batch) -> Iterator[Batch]:
    """The examples of a batch one by one, for what is a mean over examples of something that is not linear in them."""
    for b in range(batch.x.shape[1]):
        sizes = tuple(int(b < n) for n in batch.lengths())
        yield replace(batch.piece(b, b + 1), sizes=sizes)


def examples(batch: Batch, like: Tensor) -> Tensor | int:
    """How many examples each run has in a batch, `[R, 1]`, or all of them."""
    return batch.x.shape[1] if batch.sizes is None else like.new_tensor(batch.sizes)[:, None]
