"""ER: experience replay (Chaudhry, Rohrbach, Elhoseiny, Ajanthan, Dokania, Torr, Ranzato: On tiny episodic memories in continual learning, 2019)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from onepass.engine.batch import Batch, joined
from onepass.engine.fleet import Fleet
from onepass.learners.base import Rehearsal
from onepass.memory import EpisodicMemory


@dataclass(frozen=True)
class Options:
    """`reference_batch` examples of the memory join each batch."""

    reference_batch: int = 10


class Er(Rehearsal):
    """`∇ 1/(|B| + |M|) Σ_{B ∪ M} ℓ`: plain SGD on the current batch `B` joined with a random batch `M` of the episodic memory."""

    options = Options
    task_free = True

    def __init__(
        self, fleet: Fleet, columns: Mapping[str, Tensor], options: Options, memory: EpisodicMemory
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.reference_batch = options.reference_batch

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        assert isinstance(options, Options)
        return min(options.reference_batch, tasks * memory_per_task)

    def largest_batch(self, batch_size: int) -> int:
        return batch_size + self.episodic.drawn(self.reference_batch)

    def form(self) -> Hashable | None:
        return self.episodic.form(self.reference_batch)

    def direction(self, batch: Batch) -> Tensor:
        replayed = self.episodic.draw(self.reference_batch)
        g, _ = self.fleet.grad(batch if replayed is None else joined(batch, replayed))
        self.episodic.observe(batch)
        return g
