"""S-GEM: stochastic GEM, the paper's ablation between GEM and A-GEM.

Chaudhry, Ranzato, Rohrbach, Elhoseiny: Efficient Lifelong Learning with A-GEM, ICLR 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.agem import project
from onepass.learners.declarations import Capture, Cost, Workload
from onepass.learners.rehearsal import Rehearsal
from onepass.learners.state import per_run
from onepass.random_numbers import Purpose, RandomNumbers


@dataclass(frozen=True)
class Options:
    """`reference_moves_buffers` lets the pass over the memory move batch-norm statistics.

    The A-GEM authors' code does.
    """

    reference_moves_buffers: bool = True


class SGem(Rehearsal):
    """A-GEM's projection with `g_ref` the gradient on the whole memory of one past task.

    The task is drawn anew for every step: one of GEM's constraints `g̃ᵀ g_k ≥ 0` holds in it.
    """

    options = Options
    former = ("number",)
    violations: Tensor = per_run()

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        return replace(super().cost(options, work), examples=work.memory_per_task)

    def capture(self) -> Capture | None:
        form = self.episodic.form() if self.episodic.task else ()
        return None if form is None else Capture(form, reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        g_ref = None
        if self.episodic.task:
            memory, moves = (
                self.episodic.of_chosen(self.choose),
                self.option.reference_moves_buffers,
            )
            g_ref, _ = self.fleet.grad(memory, update_buffers=moves)
        g, _ = self.fleet.grad(batch)
        if g_ref is not None:
            g, violated = project(g, g_ref, out=g)
            self.violations += (violated & self.fleet.active)[:, 0]
        self.episodic.observe(batch)
        return g

    @cached_property
    def _random(self) -> RandomNumbers:
        # On the host, which has to know how large the memory of the chosen task is.
        return RandomNumbers(self.fleet.seeds.cpu(), Purpose.CONSTRAINT)

    def choose(self, steps: int) -> Tensor:
        """A uniform past task for each run and each of the next steps, `[R, steps]`."""
        first = (self.episodic.task << 32) + self.fleet.steps_in_task
        numbers = (first + torch.arange(steps)).repeat(self.fleet.runs)
        uniform = self._random.spread(steps).uniform(numbers, 1)
        return (uniform * self.episodic.task).long().view(self.fleet.runs, steps)
