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
    """A learner and the stream it sees: `joined` is one shuffled pass over the union of all tasks instead of one task after the other.

    Reports compare methods of one `family` in a table, and methods with a memory with the `baseline`.
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
        """The values that are tried unless a recipe says otherwise: the paper's, where it has some."""
        return {
            "learning_rate": list(LEARNING_RATES),
            **{
                name: [float(v) for v in values]
                for name, values in self.learner.hyperparameters.items()
            },
        }


METHODS: dict[str, Method] = {
    "van": Method(Van, "plain SGD on the current task, nothing against forgetting"),
    "icarl": Method(
        ICarl,
        "nearest mean of exemplars, on features learnt with distillation from the network before the task",
    ),
    "ewc": Method(
        Ewc,
        "elastic weight consolidation: a quadratic pull towards the past, weighted by the Fisher information",
    ),
    "pi": Method(
        Pi,
        "path integral (synaptic intelligence): the pull is weighted by how much a parameter's path lowered the loss",
    ),
    "mas": Method(
        Mas, "memory aware synapses: the pull is weighted by how much a parameter moves the outputs"
    ),
    "rwalk": Method(
        RWalk, "Riemannian walk: the pull is weighted by Fisher information and path together"
    ),
    "prog-nn": Method(ProgNN, "progressive networks: a new column a task, all earlier ones frozen"),
    "gem": Method(
        Gem,
        "gradient episodic memory: never step against the gradient of any past task",
        family="gem",
    ),
    "s-gem": Method(
        SGem,
        "stochastic GEM: never step against the gradient of one past task, drawn anew for every step",
        family="gem",
    ),
    "a-gem": Method(
        AGem,
        "averaged gradient episodic memory: never step against the average gradient of the past",
        family="gem",
        baseline=True,
    ),
    "er": Method(Er, "experience replay: every batch is joined with one of the memory"),
    "mega-1": Method(Mega1, "MEGA-I: gradient and reference gradient, weighted by their losses"),
    "mega-2": Method(
        Mega2,
        "MEGA-II: the gradient rotated towards the reference gradient by an angle that their losses decide",
    ),
    "multi-task": Method(
        Van,
        "plain SGD on one shuffled pass over all tasks at once: an upper bound, not lifelong learning",
        joined=True,
    ),
}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
