"""VAN: plain stochastic gradient descent on the current task."""

from __future__ import annotations

from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.base import Learner


class Van(Learner):
    """`θ ← θ − α ∇ℓ(θ, batch)`: a single model trained continually without anything against forgetting (the paper's VAN)."""

    task_free = True
    reads_task = False

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        return g
