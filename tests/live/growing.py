"""Learners whose head grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from tests.live.saved_learners import SUPPORTED, net
from tests.toys import FEATURES

GROWING = [name for name, learner in SUPPORTED.items() if not learner.needs.own_classes]
SETTINGS: dict[str, dict[str, Any]] = {name: {} for name in GROWING} | {
    "ewc, online": {"fisher": "moving-average", "fisher_every": 2}
}


def batch(seed: int, classes: int = 2, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (size,), generator=generator)
    y[0] = classes - 1
    return torch.randn(size, FEATURES, generator=generator) + y[:, None], y


def learner_of(name: str = "a-gem", module: nn.Module | None = None, **more: Any) -> OnePass:
    method = name.partition(",")[0]
    rate = {} if "optimizer" in more else {"learning_rate": 0.1}
    strength = {"strength": 0.5} if "strength" in SUPPORTED[method].hyperparameters else {}
    memory = None if method == "icarl" else Memory(per_task=10)
    settings = {"grow": True, "memory": memory} | rate | strength | SETTINGS.get(name, {}) | more
    return OnePass(net(2) if module is None else module, method, **settings)


def learn(learner: OnePass, tasks: int = 2, first: int = 0, classes: int = 2) -> None:
    """Some tasks, and the beginning of another one."""
    for task in range(first, first + tasks):
        seen = [batch(10 * task + number, classes) for number in range(3)]
        for x, y in seen:
            learner.observe(x, y)
        learner.end_task(again=seen)
    learner.observe(*batch(10 * (first + tasks), classes))
