"""PROG-NN: progressive neural networks (Rusu et al., 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.learners.base import Learner
from onepass.memory import EpisodicMemory
from onepass.models.progressive import Progressive
from onepass.models.stages import stages
from onepass.settings import setting


@dataclass(frozen=True)
class Options:
    """`input_laterals` connects the raw inputs laterally too, as the A-GEM authors' code does in the first layer of an MLP: the same input
    reaches a new column once more for each column before it. `lateral_biases` gives every lateral connection a bias of its own, as that code
    does."""

    input_laterals: bool = False
    lateral_biases: bool = setting(False, later=True)


class ProgNN(Learner):
    """Plain SGD on a new column a task, with lateral connections from all earlier columns, which are frozen: nothing is ever forgotten.

    `h_s^k = relu(W_s^k h_{s−1}^k + Σ_{j<k} U_s^{kj} h_{s−1}^j)`. Each task is answered by its own column, so the task must be known;
    parameters grow with the square of the number of tasks.
    """

    options = Options
    keeps = ("grown",)
    own_network = True
    reads_task = False
    answers_by_task = True

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        stages(fleet.architecture.module)  # before anything is learnt: can it be taken apart?
        self.laterals = options.input_laterals, options.lateral_biases
        self.grown = 0  # columns

    def begin_task(self, task: int) -> None:
        self._grow(task + 1)

    def _grow(self, columns: int) -> None:
        self.grown = columns
        self.fleet.rebuild(lambda: Progressive(self.fleet.build, columns, *self.laterals))

    def passes(self) -> int:
        return self.grown

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        return g

    def scores(self, batch: Batch) -> Tensor:
        if batch.task is None:
            raise InputError("prog-nn has a column a task: say whose examples these are")
        if batch.task >= self.grown:  # not learnt yet: no answer is no right answer
            return torch.full(
                (*batch.slots.shape, self.fleet.slots.count), torch.nan, device=self.fleet.device
            )
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

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        return 2 * tasks**2  # as much as passing through all columns costs, measured on the digits

    def peak_bytes(self, tasks: int) -> int:
        with torch.device("meta"):
            network = Progressive(self.fleet.build, tasks, *self.laterals)
        parameters, buffers = (
            sum(t.nbytes for t in tensors) for tensors in (network.parameters(), network.buffers())
        )
        copies = 2 + 2  # before and after a column is added, a gradient, and a temporary one
        return copies * parameters + buffers
