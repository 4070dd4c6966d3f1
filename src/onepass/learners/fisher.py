"""The Fisher information as a moving average over the stream: EWC++ (Chaudhry, Dokania, Ajanthan, Torr: Riemannian walk, ECCV 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.learners.anchored import Anchored
from onepass.memory import EpisodicMemory

NEW = 0.9  # weight of the new estimate in the moving average


class Cadence(Protocol):
    """The Fisher estimate is averaged in every `fisher_every` steps. `flush` averages in what is left at the end of a task; without it the
    rest waits for the next task, as in the authors' code, where a task shorter than `fisher_every` steps leaves no importance at all."""

    @property
    def fisher_every(self) -> int: ...
    @property
    def flush(self) -> bool: ...


class MovingFisher(Anchored):
    """`F ← 0.1 F + 0.9 mean(g²)` over the batch-mean gradients `g` of the last `fisher_every` steps, all through the stream."""

    keeps: ClassVar[tuple[str, ...]] = (*Anchored.keeps, "fisher", "squares", "count", "steps")

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Cadence,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.every, self.flush = options.fisher_every, options.flush
        self.counts, self.period = ("steps",), self.every
        self.fisher = torch.zeros_like(fleet.theta)
        self.squares = torch.zeros_like(fleet.theta)  # sum of g² since the last average
        self.count = torch.zeros_like(fleet.active, dtype=torch.int64)  # and over how many steps
        self.steps = 0

    def begin_task(self, task: int) -> None:
        self.steps = 0

    def watch(self, g: Tensor) -> None:
        """Take in the unregularised gradient of a step."""
        self.squares.addcmul_(g, g)  # rows that sit out have g = 0
        self.count += self.fleet.active

    def count_step(self) -> None:
        """Once a step: is it time to average?"""
        self.steps += 1
        if self.steps % self.every == 0:
            self.average(self.fleet.active, torch.full_like(self.count, self.every))

    def rest(self) -> None:
        """At the end of a task: average in what is left."""
        if self.flush:
            self.average(self.count > 0, self.count.clamp(min=1))

    def average(self, rows: Tensor, count: Tensor) -> None:
        """Average the squares of the last `count` steps in, for some rows."""
        estimate = (1 - NEW) * self.fisher + NEW * self.squares / count
        self.fisher.copy_(torch.where(rows, estimate, self.fisher))
        self.squares.masked_fill_(rows, 0)
        self.count.masked_fill_(rows, 0)
