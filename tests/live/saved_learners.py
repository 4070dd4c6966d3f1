"""Learners and their streams to be saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from onepass import Memory, OnePass
from onepass.learners import METHODS
from onepass.live.saving import packed
from tests.toys import FEATURES, Normed

SUPPORTED = {
    name: found.learner
    for name, found in METHODS.items()
    if not (found.joined or found.learner.needs.own_network)
}
TASKS = [[0, 1], [2, 3], [4, 5]]
SMALL = Memory(per_task=7)

# What happens: (task, batch), or the end of a task.
EVENTS: list[tuple[int, int] | str] = [
    *((0, 0), (0, 1), (0, 2), "end"),
    *((1, 0), (1, 1), (1, 2), "end"),
    *((2, 0), (2, 1), (2, 2)),
]
MIDDLE, BETWEEN = 6, 4

Data = Callable[[int, int], tuple[Any, Tensor]]


def numbers(task: int, batch: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * task + batch)


def classes(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Two classes per task."""
    generator = numbers(task, batch)
    y = torch.randint(2 * task, 2 * task + 2, (6,), generator=generator)
    return torch.randn(6, FEATURES, generator=generator) + y[:, None] / 2, y


def values(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Something to predict that changes from task to task."""
    generator = numbers(task, batch)
    x = torch.randn(6, FEATURES, generator=generator)
    return x, (x[:, :2] * (1 - task)).repeat(1, 3)


class Own(nn.Sequential):
    """A class of the user's own, which is called as it is."""


def net(outputs: int = 6) -> Own:
    return Own(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs))


def square(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean()


@dataclass(frozen=True)
class Case:
    """A learner and its stream."""

    method: str = "a-gem"
    settings: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = net
    data: Data = classes
    optimizer: Callable[[Any], optim.Optimizer] | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    tasks: Any = None

    def start(self) -> OnePass:
        torch.manual_seed(1)
        module = self.build()
        own = {"strength": 0.5, "reference_batch": 4, "exemplars": 12, "fisher_every": 2}
        own |= {"margin": 0.1}
        learner = SUPPORTED[self.method]
        known = {*learner.hyperparameters, *learner.options.__dataclass_fields__}
        chosen: dict[str, Any] = {"seed": 3, "tasks": self.tasks}
        chosen |= {"memory": None if self.method == "icarl" else SMALL}
        chosen |= {name: value for name, value in own.items() if name in known}
        if self.optimizer is None:
            chosen |= {"learning_rate": 0.2}
        chosen |= self.settings
        return OnePass(module, self.method, **self.given(module), **chosen)

    def given(self, module: nn.Module) -> dict[str, Any]:
        """What a file cannot hold."""
        given: dict[str, Any] = {} if self.loss is None else {"loss": self.loss}
        if self.optimizer is not None:
            given["optimizer"] = self.optimizer(module.parameters())
        return given

    def load(self, path: Path) -> OnePass:
        torch.manual_seed(2)  # a module with other values
        module = self.build()
        plan = self.settings.get("memory", SMALL)
        place = {"where": plan.where, "folder": plan.folder} if plan.where == "disk" else {}
        return OnePass.load(path, module, **self.given(module), **place)

    def run(self, learner: OnePass, begin: int = 0, end: int = len(EVENTS)) -> list[float]:
        """The losses of these events."""
        losses = []
        for place in range(begin, end):
            event = EVENTS[place]
            if not isinstance(event, str):
                losses.append(learner.observe(*self.data(*event)))
            elif not learner.task_free:
                seen = [one for one in EVENTS[place - 3 : place] if not isinstance(one, str)]
                learner.end_task(again=[self.data(*one) for one in seen])
        return losses

    def outputs(self, learner: OnePass) -> Tensor:
        """Outputs for examples of the tasks that have ended."""
        return torch.cat([learner.scores(self.data(task, 9)[0]) for task in (0, 1)]).nan_to_num()


def torch_optimizer(
    kind: type[optim.Optimizer], **settings: Any
) -> Callable[[Any], optim.Optimizer]:
    return partial(kind, **settings)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": torch_optimizer(optim.SGD, lr=0.2),
    "momentum": torch_optimizer(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": torch_optimizer(optim.Adam, lr=0.02),
    "AdamW": torch_optimizer(optim.AdamW, lr=0.02, amsgrad=True),
    "RMSprop": torch_optimizer(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": torch_optimizer(optim.Adagrad, lr=0.05, lr_decay=0.1),
}


def appearing(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Classes that appear in the middle of tasks."""
    generator = numbers(task, batch)
    y = torch.randint(0, 2 + 2 * task + batch, (6,), generator=generator)
    return torch.randn(6, FEATURES, generator=generator) + y[:, None] / 2, y


def normed() -> nn.Module:
    module = Normed()
    module.fc = nn.Linear(3 * FEATURES, 6)
    return module


@cache
def content_of_a_file() -> bytes:
    case = Case(tasks=TASKS)
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    return packed(learner)
