"""S-GEM: stochastic GEM, the paper's ablation between GEM and A-GEM (Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.agem import project
from onepass.learners.base import Rehearsal
from onepass.memory import EpisodicMemory
from onepass.random_numbers import Purpose, RandomNumbers


@dataclass(frozen=True)
class Options:
    """`reference_moves_buffers` lets the pass over the memory move batch-norm statistics, as the A-GEM authors' code does."""

    reference_moves_buffers: bool = True


class SGem(Rehearsal):
    """A-GEM's projection with `g_ref` the gradient on the whole memory of one past task, drawn anew for every step.

    So one of GEM's constraints `g̃ᵀ g_k ≥ 0` holds a step, a random one.
    """

    options = Options
    keeps = ("violations", "number")
    counts = ("number",)

    def __init__(
        self, fleet: Fleet, columns: Mapping[str, Tensor], options: Options, memory: EpisodicMemory
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.moves = options.reference_moves_buffers
        self.violations: Tensor = torch.zeros(fleet.runs, dtype=torch.int64, device=fleet.device)
        self._random = RandomNumbers(fleet.seeds.cpu(), Purpose.CONSTRAINT)
        self.number = (
            0  # of the step in its task: the host draws, since it has to know how large a memory is
        )

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        return memory_per_task

    def begin_task(self, task: int) -> None:
        super().begin_task(task)
        self.number = 0

    def direction(self, batch: Batch) -> Tensor:
        g_ref = (
            self.fleet.grad(self.episodic.of_chosen(self.choose), update_buffers=self.moves)[0]
            if self.episodic.task
            else None
        )
        g, _ = self.fleet.grad(batch)
        if g_ref is not None:
            g, violated = project(g, g_ref, out=g)
            self.violations += (violated & self.fleet.active)[:, 0]
        self.episodic.observe(batch)
        return g

    def accept(self) -> None:
        self.number += 1

    def form(self) -> Hashable | None:
        return self.episodic.form() if self.episodic.task else ()

    def choose(self, steps: int) -> Tensor:
        """A uniform past task for each run and each of the next steps, `[R, steps]`, on the host."""
        numbers = (self.episodic.task << 32) + self.number + torch.arange(steps)
        uniform = self._random.spread(steps).uniform(numbers.repeat(self.fleet.runs), 1)
        return (uniform * self.episodic.task).long().view(self.fleet.runs, steps)
