"""VAN: plain stochastic gradient descent on the current task."""

from __future__ import annotations

from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.base import Learner
from onepass.learners.declarations import Capture, Needs


class Van(Learner):
    """`θ ← θ − α ∇ℓ(θ, batch)`: nothing against forgetting (the paper's VAN)."""

    needs = Needs(boundaries=False)

    def capture(self) -> Capture | None:
        return Capture(reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        return g
