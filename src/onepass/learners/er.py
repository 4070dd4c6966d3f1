"""ER: experience replay (Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On tiny episodic memories in continual learning, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onepass.learners.base import Reference, Referring
from onepass.streams.batch import Batch, joined


@dataclass(frozen=True)
class Options(Reference):
    """`reference_batch` examples of the memory join each batch. They are one batch, so they move batch-norm statistics together."""

    reference_batch: int = 10


class Er(Referring):
    """`∇ 1/(|B| + |M|) Σ_{B ∪ M} ℓ`: plain SGD on the current batch `B` joined with a random batch `M` of the episodic memory."""

    options = Options

    def largest_batch(self, batch_size: int) -> int:
        return batch_size + self.reference_batch

    def direction(self, batch: Batch) -> Tensor:
        replayed = self.episodic.draw(self.reference_batch)
        self.episodic.observe(batch)
        g, _ = self.fleet.grad(batch if replayed is None else joined(batch, replayed))
        return g
