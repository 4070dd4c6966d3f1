"""Bases of the methods that look back at an episodic memory."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.base import Learner
from onepass.learners.declarations import Capture, Cost, Needs, Workload
from onepass.memory import EpisodicMemory


class Rehearsal(Learner):
    """Base of the methods with an episodic memory."""

    needs = Needs(memory=True)

    @property
    def episodic(self) -> EpisodicMemory:
        assert self.memory is not None
        return self.memory

    def begin_task(self, task: int) -> None:
        super().begin_task(task)
        self.episodic.begin_task(task)

    def end_task(self) -> None:
        self.episodic.end_task()


@dataclass(frozen=True)
class Reference:
    """`reference_batch` examples are drawn from the memory in each step.

    `reference_moves_buffers` lets that pass move batch-norm statistics, as the A-GEM authors' code
    does.
    """

    reference_batch: int = 256
    reference_moves_buffers: bool = True


class Referring(Rehearsal):
    """Base of the methods that correct a step by a random reference batch: `correct` says how."""

    options = Reference
    needs = Needs(memory=True, boundaries=False)

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        count, held = options.reference_batch, work.tasks * work.memory_per_task
        return Cost(examples=min(count, held), largest_batch=work.drawn(count), held=held)

    def capture(self) -> Capture | None:
        form = self.episodic.form(self.option.reference_batch)
        return None if form is None else Capture(form, reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        reference = self.episodic.draw(self.option.reference_batch)
        if reference is None:
            g, _ = self.fleet.grad(batch)
        else:  # the batch last, so that it is what running statistics have seen last
            g_ref, loss_ref = self.reference_gradient(reference)
            g, loss = self.fleet.grad(batch)
            g = self.correct(g, loss[:, None], g_ref, loss_ref[:, None])
        self.episodic.observe(batch)
        return g

    def reference_gradient(self, reference: Batch) -> tuple[Tensor, Tensor]:
        """`g_ref [R, P]` and the loss `[R]` on the reference batch."""
        return self.fleet.grad(reference, update_buffers=self.option.reference_moves_buffers)

    @abstractmethod
    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        """The direction from the gradients `[R, P]` and losses `[R, 1]` of batch and reference."""
