"""From what the user gives to the batches of a fleet of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.gradients import Loss
from onepass.engine.module_passes import INPUT
from onepass.errors import InputError
from onepass.interrupts import Opened
from onepass.live.inputs import Examples, X, kind_of, read_inputs, read_labels, read_target
from onepass.live.settings import Name, OwnLoss

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass

THOUSANDS = 10_000  # outputs more at once are a label that was not meant as one
TARGET = "target"  # what a loss of the user's own is given, among the extra tensors of a batch


def read_batch(owner: OnePass, x: X, y: object) -> tuple[Batch, list[int], Examples]:
    """The batch, its labels (0 with a loss of the user's own), and what its examples look like."""
    tensors, keywords = read_inputs(x, owner.examples)
    if owner.learner.needs.own_examples and len(tensors) > 1:
        what = f"{owner.method} keeps examples of one input, and x has {len(tensors)}"
        raise InputError(f"{what}: join them into one tensor")
    count, target = len(tensors[0]), None
    if owner.classifies:
        labels, slots = read_labels(y, count)
    else:
        labels, slots = [0] * count, torch.zeros(count, dtype=torch.int64)
        target = read_target(y, count, owner.examples)
    owner.fleet.keywords = keywords
    kinds = tuple(kind_of(tensor) for tensor in tensors)
    kind = Examples(kinds, keywords, kind_of(slots if target is None else target))
    return _batch(owner, tensors, slots, target), labels, kind


def read_examples(owner: OnePass, x: X, task: Name | None) -> Batch:
    """A batch without labels, of a task with outputs of its own if one is given."""
    tensors, owner.fleet.keywords = read_inputs(x, owner.examples)
    slot = owner._tasks[task][0] if task is not None and owner._tasks else 0
    return _batch(owner, tensors, torch.full((len(tensors[0]),), slot), None)


def _batch(owner: OnePass, tensors: list[Tensor], slots: Tensor, target: Tensor | None) -> Batch:
    """A batch on the module's device."""
    device = owner.fleet.device
    extra = {f"{INPUT}{i:03d}": one.to(device)[None] for i, one in enumerate(tensors[1:], start=1)}
    if target is not None:
        extra[TARGET] = target.to(device)[None]
    x, slots = tensors[0].to(device)[None], slots.to(device)[None]
    return Batch(x, slots, extra=extra, task=owner.segment)


def inputs_of(batch: Batch) -> list[Tensor]:
    """What the module is given."""
    further = (tensor[0] for name, tensor in batch.extra.items() if name.startswith(INPUT))
    return [batch.x[0], *further]


def possible_classes(owner: OnePass) -> Sequence[int]:
    """The classes that the current task can have."""
    if owner._tasks and owner.task is not None:
        return owner._tasks[owner.task]
    return range(owner.fleet.slots.count)


def check_possible(owner: OnePass, labels: list[int], task: Name | None) -> None:
    """Raise unless a task, and the module, can have these labels."""
    if not owner.classifies:
        return
    if owner._tasks:
        classes = owner._tasks[cast(Name, task)]
        for label in sorted(set(labels) - set(classes)):
            own = f"the classes of task '{task}' are {', '.join(map(str, classes))}"
            raise InputError(f"label {label} is out of range: {own}")
    highest, outputs = max(labels), owner.outputs
    if outputs is None or highest < outputs:
        return
    what = f"label {highest} is out of range: the module has {outputs} outputs"
    if owner.head is None:
        raise InputError(f"{what}; wrap it with grow=True if classes may appear")
    if highest >= outputs + THOUSANDS:
        raise InputError(f"{what} and would need thousands more; number classes densely")


def on_target(loss: OwnLoss) -> Loss:
    """A loss of the user's own, as the engine calls it."""

    def value(outputs: Any, _: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        with Opened():
            return loss(outputs, extra[TARGET])

    return value
