"""PROG-NN: progressive neural networks (Rusu et al., 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.learners.base import Learner
from onepass.learners.declarations import Capture, Cost, Needs, Workload
from onepass.learners.state import counter
from onepass.memory import EpisodicMemory
from onepass.models.progressive import Progressive
from onepass.models.stages import stages
from onepass.settings import setting


@dataclass(frozen=True)
class Options:
    """`input_laterals` connects the raw inputs laterally too.

    The A-GEM authors' code does so in the first layer of an MLP: the same input reaches a new
    column once more for each column before it. `lateral_biases` gives every lateral connection a
    bias of its own, as that code does.
    """

    input_laterals: bool = False
    lateral_biases: bool = setting(False, later=True)


class ProgNN(Learner):
    """Plain SGD on a new column for each task, with lateral connections from all earlier ones.

    `h_s^k = relu(W_s^k h_{s−1}^k + Σ_{j<k} U_s^{kj} h_{s−1}^j)`. Earlier columns are frozen:
    nothing is ever forgotten. Each task is predicted by its own column, so the task must be known;
    parameters grow with the square of the number of tasks.
    """

    options = Options
    needs = Needs(own_network=True, task_to_predict=True)
    grown: int = counter()  # columns

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None = None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        stages(fleet.architecture.module)  # before anything is learnt: can it be taken apart?
        self._laterals = options.input_laterals, options.lateral_biases

    def begin_task(self, task: int) -> None:
        super().begin_task(task)
        self._grow(task + 1)

    def _grow(self, columns: int) -> None:
        self.grown = columns
        self.fleet.rebuild(lambda: Progressive(self.fleet.build, columns, *self._laterals))

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        return g

    def scores(self, batch: Batch) -> Tensor:
        if batch.task is None:
            raise InputError("prog-nn has a column a task: say whose examples these are")
        if batch.task >= self.grown:  # not learnt yet, and NaN is never right
            shape = (*batch.slots.shape, self.fleet.slots.count)
            return torch.full(shape, torch.nan, device=self.fleet.device)
        network = self.fleet.architecture.module
        assert isinstance(network, Progressive)
        network.shown = batch.task
        try:
            return self.fleet.forward(batch, variant=batch.task).logits
        finally:
            network.shown = self.grown - 1

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        if not 0 <= counters["grown"] <= len(self.fleet.slots.table):
            raise ValueError(f"{counters['grown']} columns are more than there are tasks")
        if counters["grown"]:
            self._grow(counters["grown"])  # the fleet's own state follows

    def capture(self) -> Capture | None:
        return Capture(gradients=self.grown, reads_task=False)

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        return Cost(
            examples=2 * work.tasks**2
        )  # as measured: what passing through all columns costs

    def peak_bytes(self, work: Workload) -> int:
        with torch.device("meta"):
            network = Progressive(self.fleet.build, work.tasks, *self._laterals)
        parameters = sum(parameter.nbytes for parameter in network.parameters())
        buffers = sum(buffer.nbytes for buffer in network.buffers())
        copies = 2 + 2  # before and after a column is added, a gradient, and a temporary one
        return copies * parameters + buffers
