"""What regularising methods share: a pull towards the past, by importance of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.errors import InputError
from onepass.learners.base import Learner
from onepass.learners.declarations import Capture
from onepass.learners.state import counter, over_theta, point, workspace


class Anchored(Learner):
    """Gradient of `ℓ(θ) + λ Σ_i Ω_i (θ_i − θ*_i)²`, without a factor ½.

    `θ*` are the parameters at the end of the last task, `Ω` the importances, `λ` the `strength`.
    """

    pull: Tensor = over_theta()  # 2 λ Ω
    anchor: Tensor = point()  # θ*
    anchored: bool = counter(False)
    _away: Tensor = workspace()  # θ − θ*, then a direction
    _g: Tensor  # the gradient of the step that is being taken

    def direction(self, batch: Batch) -> Tensor:
        self._g, _ = self.fleet.grad(batch)
        return self.pulled(self._g)

    def capture(self) -> Capture | None:
        return Capture(reads_task=False)

    def pulled(self, g: Tensor) -> Tensor:
        """`g + 2 λ Ω (θ − θ*)`; `g` stays what it is."""
        if not self.anchored:
            return g
        away = torch.sub(self.fleet.theta, self.anchor, out=self._away)
        return torch.addcmul(g, self.pull, away, out=away)

    def protect(self, importance: Tensor) -> None:
        """From now on, pull towards where `θ` is now."""
        torch.mul(2 * self.columns["strength"], importance, out=self.pull)
        self.anchor.copy_(self.fleet.theta)
        self.anchored = True


def check_damping(damping: float) -> None:
    """Raise unless a damping term is positive."""
    if damping <= 0:
        raise InputError(
            "damping must be above 0: a parameter that has not moved would be divided by nothing"
        )


def scaled(importance: Tensor, gaps: Tensor | None = None) -> Tensor:
    """Each row scaled to [0, 1] by its minimum and maximum; a constant row vanishes.

    `gaps` are columns that hold no parameter, and do not count.

    >>> scaled(torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, 4.0]])).tolist()
    [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
    """
    if gaps is None:
        gaps = torch.zeros_like(importance[0], dtype=torch.bool)
    low = importance.masked_fill(gaps, torch.inf).amin(-1, keepdim=True)
    high = importance.masked_fill(gaps, -torch.inf).amax(-1, keepdim=True)
    return torch.where((high > low) & ~gaps, (importance - low) / (high - low), 0)


def singly(batch: Batch) -> Iterator[Batch]:
    """The examples of a batch one by one, for means of what is not linear in examples."""
    for b in range(batch.x.shape[1]):
        sizes = tuple(int(b < n) for n in batch.lengths())
        yield replace(batch.piece(b, b + 1), sizes=sizes)


def examples(batch: Batch, like: Tensor) -> Tensor | int:
    """How many examples each run has in a batch, `[R, 1]`, or one number for all."""
    return batch.x.shape[1] if batch.sizes is None else like.new_tensor(batch.sizes)[:, None]
