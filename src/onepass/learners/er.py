"""ER: experience replay.

Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On tiny episodic memories in
continual learning, 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onepass.engine.batch import Batch, joined
from onepass.learners.declarations import Capture, Cost, Needs, Workload
from onepass.learners.rehearsal import Rehearsal


@dataclass(frozen=True)
class Options:
    """`reference_batch` examples of the memory join each batch."""

    reference_batch: int = 10


class Er(Rehearsal):
    """`∇ 1/(|B| + |M|) Σ_{B ∪ M} ℓ`: plain SGD on the batch `B` joined with a random batch `M`.

    `M` is drawn from the episodic memory.
    """

    options = Options
    needs = Needs(memory=True, boundaries=False)

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        count, kept = options.reference_batch, work.tasks * work.memory_per_task
        largest = work.batch_size + work.drawn(count)
        return replace(
            super().cost(options, work), examples=min(count, kept), largest_batch=largest
        )

    def capture(self) -> Capture | None:
        form = self.episodic.form(self.option.reference_batch)
        return None if form is None else Capture(form, reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        replayed = self.episodic.draw(self.option.reference_batch)
        g, _ = self.fleet.grad(batch if replayed is None else joined(batch, replayed))
        self.episodic.observe(batch)
        return g
