"""PI: path integral, also known as synaptic intelligence (Zenke, Poole, Ganguli: Continual learning through synaptic intelligence, ICML 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.learners.anchored import Anchored
from onepass.memory import EpisodicMemory


@dataclass(frozen=True)
class Options:
    """`damping` is `ξ`, which keeps a parameter that hardly moved from becoming infinitely important."""

    damping: float = 1e-3


class Pi(Anchored):
    """`Ω ← Ω + relu(ω / (Δ² + ξ))` at the end of a task, `ω = −Σ_steps g · δ` the path integral of the task and `Δ` how far it moved each parameter.

    `g` is the gradient of the loss without the pull, `δ` the step that was really taken, pull included.
    """

    hyperparameters = {"strength": (0.001, 0.01, 0.1, 1, 10)}
    options = Options
    keeps = (*Anchored.keeps, "path", "importance")

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        if options.damping <= 0:
            raise InputError(
                "damping must be above 0: a parameter that has not moved would be divided by nothing"
            )
        self.damping = options.damping
        self.path = torch.zeros_like(fleet.theta)  # ω
        self.importance = torch.zeros_like(fleet.theta)  # Ω

    def direction(self, batch: Batch) -> Tensor:
        self._g, _ = self.fleet.grad(batch)
        return self.pulled(self._g)

    def after_step(self, delta: Tensor) -> None:
        self.path.addcmul_(self._g, delta, value=-1)

    def end_task(self) -> None:
        moved = self.fleet.theta - self.anchor  # since the end of the last task
        self.importance += (self.path / (moved.square() + self.damping)).relu()
        self.path.zero_()
        self.protect(self.importance)
