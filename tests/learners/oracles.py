"""Tasks with heads of their own, and gradients by plain autograd on a plain module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from onepass.engine.batch import Batch
from onepass.engine.fleet import Build, Fleet
from onepass.engine.slots import Slots
from onepass.learners.base import Learner
from onepass.streams.base import separate_heads
from tests.toys import batch_of, small_net


def task_batch(
    task: int = 0,
    seed: int = 0,
    size: int = 7,
    runs: int = 3,
    sizes: tuple[int, ...] | None = None,
    double: bool = False,
) -> Batch:
    """Examples with the two slots of one task."""
    batch = batch_of(runs, size, 1000 * task + seed)
    return Batch(
        batch.x.double() if double else batch.x, batch.slots % 2 + 2 * task, sizes, task=task
    )


def task(number: int, steps: int, **more: object) -> list[Batch]:
    return [task_batch(number, step, **more) for step in range(steps)]  # type: ignore[arg-type]


def uneven(number: int = 0) -> list[Batch]:
    """A task of 11, 9 and 8 examples, in batches of four."""
    return [*task(number, 2, size=4), task_batch(number, 2, size=3, sizes=(3, 1, 0))]


def examples_of(batches: Sequence[Batch], run: int) -> list[tuple[Tensor, int]]:
    """The examples of one run, one by one."""
    shown = [(batch.x[run], batch.slots[run], batch.lengths()[run]) for batch in batches]
    return [(x[b], int(slots[b])) for x, slots, count in shown for b in range(count)]


def learn(learner: Learner, number: int, batches: Iterable[Batch]) -> None:
    learner.begin_task(number)
    for batch in batches:
        learner.fleet.learn(learner, batch)


def module_of(fleet: Fleet, run: int) -> nn.Module:
    """A run as a plain module in evaluation mode."""
    module = deepcopy(fleet.architecture.module)
    vector_to_parameters(fleet.theta[run].clone(), module.parameters())
    for name, buffer in module.named_buffers():
        buffer.copy_(fleet.buffers[name][run])
    return module.eval()


def slope(module: nn.Module, value: Tensor) -> Tensor:
    """Derivative of a value by all parameters, `[P]`."""
    unused = {"allow_unused": True, "materialize_grads": True}
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, **unused)
    return torch.cat([g.reshape(-1) for g in gradients])


def chances(module: nn.Module, x: Tensor, slot: int) -> Tensor:
    """Logarithms of the probabilities of the two slots of a slot's own task."""
    first = slot // 2 * 2
    logs: Tensor = module(x[None])[0, first : first + 2].log_softmax(0)
    return logs


class Plain:
    """One run in float64 by a hand-written loop: `theta [P]`, its loss and its gradient."""

    def __init__(self, fleet: Fleet, rate: float) -> None:
        self.module, self.rate = module_of(fleet, 0).train(), rate
        self.theta = fleet.theta[0].clone()

    def loss_and_gradient(self, batch: Batch) -> tuple[float, Tensor]:
        vector_to_parameters(self.theta.clone(), self.module.parameters())
        logits, slots = self.module(batch.x[0]), batch.slots[0]
        own = [row[s // 2 * 2 :][:2] for row, s in zip(logits, slots.tolist(), strict=True)]
        loss = nn.functional.cross_entropy(torch.stack(own), slots % 2)
        return loss.item(), slope(self.module, loss)


def double_net() -> nn.Module:
    return small_net().double()


def lone(build: Build = double_net, rate: float = 0.125) -> Fleet:
    """A fleet of one run in float64."""
    fleet = Fleet(build, [10], Slots(separate_heads(4, 2)), [rate])
    assert torch.equal(fleet.theta[0], parameters_to_vector(module_of(fleet, 0).parameters()))
    return fleet
