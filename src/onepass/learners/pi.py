"""PI: path integral, also known as synaptic intelligence.

Zenke, Poole, Ganguli: Continual learning through synaptic intelligence, ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onepass.learners.anchored import Anchored, check_damping
from onepass.learners.declarations import Needs
from onepass.learners.state import over_theta


@dataclass(frozen=True)
class Options:
    """`damping` is `ξ`: without it, a parameter that hardly moved could become too important."""

    damping: float = 1e-3

    def __post_init__(self) -> None:
        check_damping(self.damping)


class Pi(Anchored):
    """`Ω ← Ω + relu(ω / (Δ² + ξ))` at the end of a task, `ω = −Σ_steps g · δ`.

    `Δ` is how far the task moved each parameter, `g` the gradient of the loss without the pull,
    `δ` the step that was really taken, pull included.
    """

    hyperparameters = {"strength": (0.001, 0.01, 0.1, 1, 10)}
    options = Options
    needs = Needs(delta=True)
    path: Tensor = over_theta()  # ω
    importance: Tensor = over_theta()  # Ω

    def after_step(self, delta: Tensor) -> None:
        self.path.addcmul_(self._g, delta, value=-1)

    def end_task(self) -> None:
        moved = self.fleet.theta - self.anchor  # since the end of the last task
        self.importance += (self.path / (moved.square() + self.option.damping)).relu()
        self.path.zero_()
        self.protect(self.importance)
