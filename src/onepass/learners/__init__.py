"""The methods. Adding one is one file and one line in `METHODS`."""

from __future__ import annotations

from dataclasses import dataclass

from onepass.errors import unknown
from onepass.learners.agem import AGem
from onepass.learners.base import Learner
from onepass.learners.ewc import Ewc
from onepass.learners.van import Van


@dataclass(frozen=True)
class Method:
    """A learner and the stream it sees: `joined` is one shuffled pass over the union of all tasks instead of one task after the other."""

    learner: type[Learner]
    summary: str
    joined: bool = False

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        return ("learning_rate", *self.learner.hyperparameters)


METHODS: dict[str, Method] = {
    "van": Method(Van, "plain SGD on the current task, nothing against forgetting"),
    "ewc": Method(Ewc, "elastic weight consolidation: a quadratic pull towards the past, weighted by the Fisher information"),
    "a-gem": Method(AGem, "averaged gradient episodic memory: never step against the average gradient of the past"),
    "multi-task": Method(Van, "plain SGD on one shuffled pass over all tasks at once: an upper bound, not lifelong learning", joined=True),
}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
