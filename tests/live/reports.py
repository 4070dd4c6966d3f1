"""Reports of learners, and what they are compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from onepass import OnePass
from tests.toys import FEATURES

CLASSES = 4


KEYS = [
    *("step", "task", "loss", "accuracy", "forgetting", "forgetting_by_task"),
    *("violations", "cosine", "memory", "memory_bytes", "milliseconds"),
]


Report = dict[str, Any]


def stream(
    batches: int = 6, size: int = 8, classes: range = range(CLASSES), seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Batches whose classes can be learnt: one feature is large for each."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(batches):
        y = torch.randint(classes.start, classes.stop, (size,), generator=generator)
        x = torch.randn(size, FEATURES, generator=generator)
        data.append((x + 2 * nn.functional.one_hot(y, FEATURES), y))
    return data


def remembered(learner: OnePass, group: int) -> tuple[Tensor, Tensor]:
    assert learner.memory is not None
    batch = learner.memory.take(torch.tensor(learner.memory.groups()[group]))
    return batch.x[0], batch.slots[0]


def right(module: nn.Module, x: Tensor, y: Tensor) -> float:
    return (copy.deepcopy(module).eval()(x).argmax(1) == y).float().mean().item()
