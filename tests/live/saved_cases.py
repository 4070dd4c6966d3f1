"""Learners of all kinds whose files are altered, and their files."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

from onepass import Memory
from onepass.live.saving import packed
from tests.live.saved_learners import (
    OPTIMIZERS,
    TASKS,
    Case,
    appearing,
    classes,
    net,
    normed,
    numbers,
    square,
    values,
)
from tests.toys import FEATURES


def several(task: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Two inputs by name."""
    x, y = classes(task, batch)
    return {"word": torch.randint(0, 9, (6,), generator=numbers(task, batch)), "x": x}, y


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(FEATURES + 4, 6)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([x, self.words(word)], 1))
        return out


ADAM, MOMENTUM = OPTIMIZERS["Adam"], OPTIMIZERS["momentum"]


CASES: dict[str, Case] = {
    "a-gem": Case(),
    "a-gem, tasks": Case(tasks=TASKS),
    "a-gem, ring": Case(
        settings={"memory": Memory(per_task=7, policy="ring", examples=15)}, tasks=TASKS
    ),
    "a-gem, task-free": Case(settings={"task_free": True, "memory": Memory(examples=9, recent=1)}),
    "a-gem, own loss": Case(data=values, loss=square, optimizer=ADAM),
    "er, Adam": Case("er", optimizer=ADAM),
    "er, grown, Adam": Case("er", {"grow": True}, partial(net, 2), appearing, ADAM),
    "er, task-free, bytes": Case(
        "er", {"task_free": True, "memory": Memory(bytes=4000, recent=1, policy="reservoir")}
    ),
    "ewc": Case("ewc", tasks=TASKS),
    "ewc, online, Adam": Case("ewc", {"fisher": "moving-average"}, optimizer=ADAM),
    "pi, momentum": Case("pi", optimizer=MOMENTUM),
    "pi, grown": Case("pi", {"grow": True}, partial(net, 2), appearing),
    "mas": Case("mas"),
    "gem": Case("gem"),
    "s-gem, momentum": Case("s-gem", optimizer=MOMENTUM),
    "icarl": Case("icarl", tasks=TASKS),
    "icarl, norm": Case("icarl", tasks=TASKS, build=normed),
    "mega-1, two inputs": Case("mega-1", build=Two, data=several),
    "mega-2": Case("mega-2", build=normed),
    "rwalk": Case("rwalk"),
    "van": Case("van", optimizer=MOMENTUM),
}


STOPS = (0, 2, 4, 6)  # before anything, in the first task, between two, in the second


@cache
def content_of(name: str, stop: int) -> bytes:
    case = CASES[name]
    learner = case.start()
    case.run(learner, 0, stop)
    return packed(learner)
