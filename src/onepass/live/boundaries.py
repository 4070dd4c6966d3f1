"""Which task a batch belongs to."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from onepass.errors import InputError, unknown
from onepass.live.settings import Name, check_named

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass


def which(owner: OnePass, task: Name | None) -> tuple[Name | None, bool]:
    """The name of the task of a batch, and whether the one before must end first."""
    declared = list(owner._tasks)
    if task is None:
        if declared and owner.batches == 0:
            if owner.segment >= len(declared):
                raise InputError(
                    f"all {len(declared)} declared tasks have been learnt: say which one this batch belongs to"
                )
            return declared[owner.segment], False
        return owner.task, False
    if owner.task_free:
        raise InputError("this stream was declared task-free: leave the task of a batch out")
    check_name(task, declared)
    crossing = owner.batches > 0 and task != owner.task
    if crossing and owner.learner.needs.second_pass:
        raise InputError(
            f"{owner.method} looks at a task's data a second time: call end_task(again=batches) before the next task"
        )
    if owner.learner.needs.own_classes and declared[owner.segment : owner.segment + 1] != [task]:
        order = ", ".join(f"'{name}'" for name in declared)
        raise InputError(f"{owner.method} learns the declared tasks once, in their order: {order}")
    return task, crossing


def check_name(task: object, declared: Collection[Name]) -> None:
    """Raise unless it names a task, one of those that were declared, if any were."""
    check_named(task)
    if declared and task not in declared:
        raise unknown("task", str(task), map(str, declared))
