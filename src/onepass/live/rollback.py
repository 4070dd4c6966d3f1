"""All or nothing, for batches that change more than a step does.

They are the first one, those of a new task, and those with new classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass


@contextmanager
def or_as_before(owner: OnePass) -> Iterator[None]:
    """After an error, everything is as it was before.

    A step that is refused writes no parameter, so their values need no copy.
    """
    own = {name: getattr(owner, name) for name in ("segment", "batches", "task", "outputs")}
    fleet, learner = owner.fleet.marked(), owner.learner.saved()
    memory = None if owner.memory is None else owner.memory.marked()
    best = dict(owner._watch.best)
    try:
        yield
    except BaseException:
        if owner.undo is not None:
            owner.undo()
        vars(owner).update(own)
        owner.fleet.go_back(fleet)
        owner.learner.go_back(learner)
        if owner.memory is not None and memory is not None:
            vars(owner.memory).update(memory)
        owner._watch.best = best
        raise
    finally:
        owner.undo = None
