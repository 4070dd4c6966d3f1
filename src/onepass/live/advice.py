"""Warns once that nothing of the past is protected yet, while that can still be mended."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass

log = logging.getLogger(__name__)

PATIENCE = 300  # batches of a first task that does not end
NEW, EXAMPLES = 10, 20  # batches, and examples, with none but new classes
KNOWN = 4  # examples per class before them, on average: else new classes are to be expected
BEFORE, ABOVE = 50, 6  # batches that a loss is compared with, and batches that are above them all
HOW = "call end_task() where a task ends"


class Advice:
    """Watches the first task of a stream for a boundary that was not declared.

    A method that protects what `end_task()` ends protects nothing before the first one. It warns
    when the last batches have none but new classes, when their losses are all far above those
    before, or after `PATIENCE` batches. Where batches are drawn from one distribution, the first
    two hardly ever happen. Losses in a random order have their six highest in the last six of 56
    places once in 32 million orders. Examples of new classes only, after four per known class, are
    rarer still.
    """

    def __init__(self, owner: OnePass) -> None:
        self._owner = owner
        keeps = owner.learner.needs.memory or bool(owner.learner.state_names())
        self.wanted = keeps and not owner.task_free  # else nothing happens when a task ends
        other = "" if owner.learner.needs.boundaries else ", or wrap with task_free=True"
        self.how: str | None = HOW + other  # None: the end will be declared
        self._old: set[int] = set()  # classes, and the examples that had them
        self._examples = 0
        self._new: set[int] = set()  # classes of the last batches, if none of them came before
        self._fresh = self._batches = 0  # examples and batches of these
        self._before: deque[float] = deque(maxlen=BEFORE)  # losses
        self._highest = float("inf")  # of them, once there are enough
        self._above: list[float] = []  # those of the last batches, if they are all higher

    def after(self, labels: Sequence[int], loss: float) -> None:
        """A batch was learnt."""
        owner = self._owner
        if owner.segment > 0:
            self.wanted = False
        elif self.how is None:
            return
        elif owner.classifies and self._other_classes(labels):
            what = f"the last {self._batches} batches have none of the classes before them"
            self._warn(f"{what}, and no task has ended")
        elif self._higher(loss):
            what = f"the last {ABOVE} losses are far above the {BEFORE} before them"
            self._warn(f"{what}, and no task has ended")
        elif owner.batches >= PATIENCE:
            self._warn(f"no task has ended in {owner.batches} batches")

    def _warn(self, what: str) -> None:
        self.wanted = False
        log.warning("%s, so nothing of the past is protected: %s", what, self.how)

    def _other_classes(self, labels: Sequence[int]) -> bool:
        classes = set(labels)
        if not self._old.isdisjoint(classes) or KNOWN * len(self._old) >= self._examples:
            self._old |= self._new | classes
            self._examples += self._fresh + len(labels)
            self._new, self._fresh, self._batches = set(), 0, 0
            return False
        self._new |= classes
        self._fresh, self._batches = self._fresh + len(labels), self._batches + 1
        return self._batches >= NEW and self._fresh >= EXAMPLES

    def _higher(self, loss: float) -> bool:
        if loss > self._highest:
            self._above.append(loss)
            if len(self._above) < ABOVE:
                return False
            usual = sum(self._before) / BEFORE
            if sum(self._above) / ABOVE - usual > 2 * (self._highest - usual):
                return True
        else:
            self._above.append(loss)
        self._before.extend(self._above)
        self._above = []
        if len(self._before) == BEFORE:
            self._highest = max(self._before)
        return False
