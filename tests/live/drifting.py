"""A stream whose tasks contradict each other, and learners of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onepass import OnePass


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))


def stream(task: int, batches: int = 40, noise: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """Four classes whose features are exchanged from task to task."""
    generator = torch.Generator().manual_seed(task)
    found = []
    for _ in range(batches):
        y = torch.randint(0, 4, (10,), generator=generator)
        x = noise * torch.randn(10, 8, generator=generator)
        x[torch.arange(10), (y + task) % 4] += 3
        found.append((x, y))
    return found


def learnt(method: str = "er", tasks: int = 3, **more: Any) -> OnePass:
    learner = OnePass(net(), method, learning_rate=0.1, **more)
    for task in range(tasks):
        for x, y in stream(task):
            learner.observe(x, y)
        learner.end_task()
    return learner
