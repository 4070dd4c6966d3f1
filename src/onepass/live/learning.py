"""One batch of a stream: it begins a task or brings new classes, if so, and a step is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onepass.engine.batch import Batch
from onepass.engine.slots import Slots
from onepass.live.batches import check_possible, inputs_of, read_batch
from onepass.live.boundaries import end, task_of_next
from onepass.live.growth import enlarge
from onepass.live.inputs import X, count_outputs
from onepass.live.rollback import or_as_before
from onepass.live.settings import Name, refusing

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass


def learn(owner: OnePass, x: X, y: object, task: Name | None) -> list[int]:
    """Learn from a batch, and return its labels. After an error, all is as it was before."""
    batch, labels, kind = read_batch(owner, x, y)
    name, crossing = task_of_next(owner, task)
    check_possible(owner, labels, name)
    growing = owner.outputs is not None and owner.classifies and max(labels) >= owner.outputs
    if crossing or growing or owner.batches == 0:
        with or_as_before(owner):
            if crossing:
                end(owner, None)
            begin(owner, batch, labels, name)
            _step(owner, batch, labels)
    else:
        _step(owner, batch, labels)
    if owner.examples is None:
        owner.examples = kind
        owner._sample = [torch.cat([one, one])[:2].clone() for one in inputs_of(batch)]
    owner.batches += 1
    return labels


def begin(owner: OnePass, batch: Batch, labels: list[int], task: Name | None) -> None:
    """What comes before the first batch of all or of a task, or before one with new classes."""
    owner.task = task
    if owner.classifies and owner.outputs is None:
        with refusing("the module refused the batch", "nothing was learnt from it"):
            found = owner.fleet.evaluate(batch)
        owner.outputs = count_outputs(found, len(labels))
        if not owner._tasks:
            owner.fleet.compete(Slots((tuple(range(owner.outputs)),)))
            check_possible(owner, labels, task)
    if owner.classifies:
        needed = max(max(labels) + 1, owner.fleet.slots.count if owner._tasks else 0)
        if owner.outputs is not None and needed > owner.outputs:
            enlarge(owner, needed)
    if owner.batches == 0:
        owner.learner.begin_task(owner.segment)
    if owner.examples is None:
        owner.fleet.traced_sizes = _common_sizes(owner, len(labels))


def _common_sizes(owner: OnePass, batch: int) -> set[int]:
    """Sizes of batches that will come again and again, if the first one is like the others.

    None of them is worth a traced program where the head may grow, since that makes it void.
    """
    if owner.head is not None:
        return set()
    reference = getattr(owner._options, "reference_batch", 0)
    return {batch, reference, batch + reference, owner.plan.per_task}


def _step(owner: OnePass, batch: Batch, labels: list[int]) -> None:
    learner, memory = owner.learner, owner.memory
    counted = None if learner.violations is None else learner.violations.clone()
    if memory is not None:
        memory.prepare(batch)
    try:
        with refusing("the module or the loss refused the batch", "nothing was learnt from it"):
            owner._watch.before(batch)
            owner.fleet.learn(learner, batch)
    except BaseException:
        owner._watch.discard()
        raise
    else:
        if memory is not None:
            memory.commit(labels)
        counted = learner.violations
    finally:
        learner.violations = counted
        if memory is not None:
            memory.discard()
