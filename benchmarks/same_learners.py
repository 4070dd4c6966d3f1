"""Learners that one revision saves in the middle of a task and another one goes on with.

    python benchmarks/same_learners.py save FOLDER
    python benchmarks/same_learners.py load FOLDER OUT

The first writes `FOLDER/NAME.saved` and goes on to the end of the stream, `FOLDER/NAME.end`. The
second goes on with the saved learner to `OUT/NAME.end`. `same_results.py` runs both, so this
program uses nothing but the public interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from onepass import Memory, OnePass

FEATURES, BATCH, TASKS = 16, 6, [[0, 1], [2, 3], [4, 5]]
EVENTS: list[tuple[int, int] | str] = []  # (task, batch), or the end of a task
for task in range(3):
    EVENTS += [*((task, batch) for batch in range(4)), "end"]
MIDDLE = 7  # two batches into the second task
SMALL = Memory(per_task=7)


def examples(task: int, batch: int, classes: int = 2) -> tuple[Tensor, Tensor]:
    """A batch of the two classes of a task; with more `classes`, some appear in its middle."""
    generator = torch.Generator().manual_seed(100 * task + batch)
    y = torch.randint(2 * task, 2 * task + classes, (BATCH,), generator=generator)
    return torch.randn(BATCH, FEATURES, generator=generator) + y[:, None] / 2, y


def dense(outputs: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6),
    )


@dataclass(frozen=True)
class Case:
    """How a learner is made."""

    method: str = "a-gem"
    settings: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = dense
    adam: bool = False
    disk: bool = False
    classes: int = 2

    def start(self, folder: Path) -> OnePass:
        torch.manual_seed(1)
        module = self.build()
        settings: dict[str, Any] = {"seed": 3, "memory": SMALL, **self.settings}
        if self.disk:
            settings["memory"] = Memory(per_task=7, bytes=6000, where="disk", folder=folder)
        if not self.adam:
            settings["learning_rate"] = 0.2
        return OnePass(module, self.method, **self.optimizer(module), **settings)

    def load(self, path: Path, folder: Path) -> OnePass:
        torch.manual_seed(2)  # a module with other values
        module = self.build()
        place: dict[str, Any] = {"where": "disk", "folder": folder} if self.disk else {}
        return OnePass.load(path, module, **self.optimizer(module), **place)

    def optimizer(self, module: nn.Module) -> dict[str, Any]:
        return {"optimizer": torch.optim.Adam(module.parameters(), lr=0.02)} if self.adam else {}

    def learn(self, learner: OnePass, begin: int, end: int) -> list[float]:
        """The losses of these events."""
        losses = []
        for place in range(begin, end):
            event = EVENTS[place]
            if not isinstance(event, str):
                losses.append(learner.observe(*examples(*event, self.classes)))
            elif not learner.task_free:
                task = [one for one in EVENTS[place - 4 : place] if not isinstance(one, str)]
                learner.end_task(again=[examples(*one, self.classes) for one in task])
        return losses

    def end(self, learner: OnePass) -> dict[str, Tensor]:
        """Go on to the end of the stream; return all that can be seen of the learner then."""
        found = {"losses": torch.tensor(self.learn(learner, MIDDLE, len(EVENTS)))}
        x = torch.cat([examples(task, 9)[0] for task in range(3)])
        found["predictions"] = torch.as_tensor(learner.predict(x))
        found["scores"] = learner.scores(x)
        state = {f"module.{name}": value for name, value in learner.module.state_dict().items()}
        return {name: value.detach().clone() for name, value in (found | state).items()}


ANCHORED = {"strength": 0.5}
REFERENCE = {"reference_batch": 4}
CASES = {
    "van": Case("van"),
    "a-gem": Case("a-gem", REFERENCE),
    "a-gem with tasks": Case("a-gem", REFERENCE | {"tasks": TASKS}),
    "a-gem, batch-norm and dropout": Case("a-gem", REFERENCE, normed),
    "a-gem, convolutions": Case("a-gem", REFERENCE, convolutional),
    "a-gem, memory on disk": Case("a-gem", REFERENCE, disk=True),
    "a-gem, Adam": Case("a-gem", REFERENCE, adam=True),
    "a-gem, grown head": Case("a-gem", {"grow": True}, partial(dense, 2), classes=4),
    "ewc, Fisher per task": Case("ewc", ANCHORED),
    "ewc, moving average": Case(
        "ewc", ANCHORED | {"fisher": "moving-average", "fisher_every": 2}, normed
    ),
    "mas": Case("mas", ANCHORED),
    "pi": Case("pi", ANCHORED),
    "pi, Adam": Case("pi", ANCHORED, adam=True),
    "rwalk": Case("rwalk", ANCHORED | {"fisher_every": 2}),
    "gem": Case("gem", {"margin": 0.1}),
    "s-gem": Case("s-gem"),
    "er": Case("er", REFERENCE),
    "er, task-free": Case("er", REFERENCE | {"task_free": True}),
    "mega-1": Case("mega-1", REFERENCE),
    "mega-2": Case("mega-2", REFERENCE),
    "icarl": Case("icarl", {"exemplars": 12, "tasks": TASKS, "memory": None}),
}


def name_of(case: str) -> str:
    return case.replace(",", "").replace(" ", "-")


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def main() -> None:
    mode, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[-1])
    torch.set_num_threads(1)
    for label, case in CASES.items():
        name = name_of(label)
        disk = out / f"{name}.disk"
        if mode == "save":
            learner = case.start(disk)
            case.learn(learner, 0, MIDDLE)
            learner.save(folder / f"{name}.saved")
        else:
            learner = case.load(folder / f"{name}.saved", disk)
        write(out / f"{name}.end", case.end(learner))


if __name__ == "__main__":
    main()
