"""Task boundaries: which task a batch belongs to, and the end of a task."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from onepass.engine.batch import Batch
from onepass.errors import InputError, unknown
from onepass.interrupts import Opened
from onepass.live.batches import check_possible, read_batch
from onepass.live.inputs import X
from onepass.live.settings import Name, check_named, refusing

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass


def task_of_next(owner: OnePass, task: Name | None) -> tuple[Name | None, bool]:
    """The name of the task of the next batch, and whether the one before must end first."""
    declared = list(owner._tasks)
    if task is None:
        if declared and owner.batches == 0:
            if owner.segment >= len(declared):
                done = f"all {len(declared)} declared tasks have been learnt"
                raise InputError(f"{done}: say which one this batch belongs to")
            return declared[owner.segment], False
        return owner.task, False
    if owner.task_free:
        raise InputError("this stream was declared task-free: leave the task of a batch out")
    check_name(task, declared)
    crossing = owner.batches > 0 and task != owner.task
    if crossing and owner.learner.needs.second_pass:
        raise _needs_review(owner)
    if owner.learner.needs.own_classes and declared[owner.segment : owner.segment + 1] != [task]:
        order = ", ".join(f"'{name}'" for name in declared)
        raise InputError(f"{owner.method} learns the declared tasks once, in their order: {order}")
    return task, crossing


def check_name(task: object, declared: Collection[Name]) -> None:
    """Raise unless it names a task, one of those that were declared, if any were."""
    check_named(task)
    if declared and task not in declared:
        raise unknown("task", str(task), map(str, declared))


def end(owner: OnePass, again: Iterable[tuple[X, object]] | None) -> None:
    """End the current task; `again` are its batches for methods with a second pass."""
    if owner.learner.needs.second_pass:
        if again is None:
            instead = owner.learner.needs.single_pass_by
            raise _needs_review(owner, f" or choose {instead}" if instead else "")
        _review(owner, again)
    owner.learner.end_task()
    # Importances are squares and quotients of gradients: in half precision they soon overflow.
    if not all(bool(kept.isfinite().all()) for kept in owner.learner.state().values()):
        what = f"what {owner.method} keeps of this task is not finite"
        how = "scale the data, take smaller steps, or use a module in float32"
        raise InputError(f"{what}: {how}; the task has not ended")
    owner._watch.ended()
    owner.segment += 1
    owner.batches, owner.task = 0, None


def _needs_review(owner: OnePass, other: str = "") -> InputError:
    what = f"{owner.method} looks at a task's data a second time"
    return InputError(f"{what}: call end_task(again=batches) before the next task{other}")


def _review(owner: OnePass, again: Iterable[tuple[X, object]]) -> None:
    """The second pass over a task's data."""
    batches: list[Batch] = []
    unread = refusing("the data to look at again cannot be read", "the task has not ended")
    with Opened(), unread:
        given = list(again) if isinstance(again, Iterable) else [again]
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            what = "the data to look at again must be batches (x, y)"
            raise InputError(f"{what}: end_task(again=batches)")
        batch, labels, _ = read_batch(owner, *pair)
        check_possible(owner, labels, owner.task)
        batches.append(batch)
    if not batches:
        what = f"{owner.method} was given no data to look at again"
        raise InputError(f"{what}: end_task(again=batches) needs the task's batches")
    refused = "the module or the loss refused the data given again"
    with refusing(refused, "the task has not ended"):
        owner.learner.review(batches)
