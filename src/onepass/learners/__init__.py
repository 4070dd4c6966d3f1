"""The methods. Adding one is one file and one line in `METHODS`."""

from __future__ import annotations

from dataclasses import dataclass

from onepass.errors import unknown
from onepass.learners.agem import AGem
from onepass.learners.base import Learner
from onepass.learners.er import Er
from onepass.learners.ewc import Ewc
from onepass.learners.gem import Gem
from onepass.learners.icarl import ICarl
from onepass.learners.mas import Mas
from onepass.learners.mega1 import Mega1
from onepass.learners.mega2 import Mega2
from onepass.learners.pi import Pi
from onepass.learners.prognn import ProgNN
from onepass.learners.rwalk import RWalk
from onepass.learners.sgem import SGem
from onepass.learners.van import Van

LEARNING_RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)


@dataclass(frozen=True)
class Method:
    """A learner, and the stream it sees.

    `joined` is one shuffled pass over the union of all tasks instead of one task after the other.
    Reports put methods of one `family` into one table, and compare methods that have a memory with
    the `baseline`.
    """

    learner: type[Learner]
    summary: str
    joined: bool = False
    family: str | None = None
    baseline: bool = False

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        return tuple(self.grid)

    @property
    def grid(self) -> dict[str, list[float]]:
        """The values that are tried unless a recipe has others: the paper's, where it has some."""
        grid = {"learning_rate": list(LEARNING_RATES)}
        for name, values in self.learner.hyperparameters.items():
            grid[name] = [float(value) for value in values]
        return grid


METHODS: dict[str, Method] = {
    "van": Method(Van, "plain SGD on the current task, nothing against forgetting"),
    "icarl": Method(ICarl, "nearest mean of exemplars, on features learnt with distillation"),
    "ewc": Method(Ewc, "elastic weight consolidation: a pull weighted by the Fisher information"),
    "pi": Method(Pi, "path integral: a pull weighted by how much each path lowered the loss"),
    "mas": Method(Mas, "memory aware synapses: a pull weighted by how outputs depend on weights"),
    "rwalk": Method(RWalk, "Riemannian walk: a pull weighted by Fisher information and path"),
    "prog-nn": Method(ProgNN, "progressive networks: one new column per task, others frozen"),
    "gem": Method(
        Gem, "gradient episodic memory: never step against any past task's gradient", family="gem"
    ),
    "s-gem": Method(
        SGem, "stochastic GEM: never step against the gradient of one past task", family="gem"
    ),
    "a-gem": Method(
        AGem,
        "averaged GEM: never step against the average gradient of the past",
        family="gem",
        baseline=True,
    ),
    "er": Method(Er, "experience replay: every batch is joined with one from the memory"),
    "mega-1": Method(Mega1, "MEGA-I: gradient and reference gradient, weighted by their losses"),
    "mega-2": Method(Mega2, "MEGA-II: the gradient rotated towards the reference gradient"),
    "multi-task": Method(Van, "plain SGD on all tasks at once: an upper bound", joined=True),
}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
