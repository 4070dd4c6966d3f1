"""A learner in the middle of its second task, and whether what is refused leaves a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from tests.live.comparing import same
from tests.toys import FEATURES

CLASSES = 4


ERRORS: dict[str | None, type[Exception]] = {
    "runtime": RuntimeError,
    "value": ValueError,
    "type": TypeError,
    "index": IndexError,
    "attribute": AttributeError,
    "key": KeyError,
    "assertion": AssertionError,
}


class Rich(nn.Module):
    """Buffers, random numbers, a frozen part, one that is always in evaluation, and trouble.

    Trouble comes in the pass of that number (in training) since `trouble` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.body = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.3)
        self.aside = nn.Dropout(0.9)
        self.head = nn.Linear(7, CLASSES)
        self.make(None)

    def make(self, trouble: str | None, at: int = 1) -> None:
        self.trouble, self.left = trouble, at

    def forward(self, x: Tensor) -> Any:
        out = self.head(self.aside(self.drop(self.norm(torch.tanh(self.body(self.still(x)))))))
        self.left -= self.training
        if self.left != 0 or not self.training:
            return out
        match self.trouble:
            case "nan" | "inf":
                return out * float(self.trouble)
            case "gradient":  # adds nothing, with a slope that is not a number
                return out + (out - out.detach()).sum().abs().sqrt()
            case "shape":
                return out[:, :1, None]
            case "tuple":
                return out, out
            case None:
                return out
        raise ERRORS[self.trouble](f"no {self.trouble}\nand a second line")


def batch(size: int = 8, seed: int = 0, classes: range = range(CLASSES)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(classes.start, classes.stop, (size,), generator=generator)


def in_a_second_task(
    method: str = "a-gem", module: nn.Module | None = None, adam: bool = True, **settings: Any
) -> OnePass:
    """A learner with a past, in the middle of a task."""
    module = Rich() if module is None else module
    if adam:
        trained = [p for p in module.parameters() if p.requires_grad]
        settings["optimizer"] = torch.optim.Adam(trained, lr=0.01)
    else:
        settings["learning_rate"] = 0.05
    if method == "icarl":
        settings["tasks"] = [[0, 1], [2, 3]]
    learner = OnePass(module, method, **settings)
    first, second = (range(2), range(2, 4)) if method == "icarl" else (range(CLASSES),) * 2
    one = [batch(seed=s, classes=first) for s in range(3)]
    two = [batch(seed=s, classes=second) for s in range(3, 5)]
    if not learner.classifies:
        one, two = [(x, x[:, :CLASSES]) for x, _ in one], [(x, -x[:, :CLASSES]) for x, _ in two]
    for x, y in one:
        learner.observe(x, y)
    if not learner.task_free:
        learner.end_task(again=one if learner.learner.needs.second_pass else None)
    for x, y in two:
        learner.observe(x, y)
    if isinstance(module, Rich):
        module.aside.eval()
    return learner


def snapshot(learner: OnePass) -> dict[str, Any]:
    """All that a refused call must not change."""
    module, optimizer, memory = learner.module, learner.fleet.optimizer, learner.memory
    values = [*module.state_dict().items(), *module.named_buffers()]
    found = {
        "values": {name: t.detach().clone() for name, t in values},
        "which": [
            (name, id(p), p.data_ptr(), p.requires_grad, p.grad is None)
            for name, p in module.named_parameters()
        ],
        "layers": [str(part) for part in module.modules()],
        "modes": [part.training for part in module.modules()],
        "optimizer": optimizer and optimizer.state_dict(),
        "learner": (learner.learner.state(), learner.learner.counters()),
        "memory": memory and (memory.state(), memory.counters(), memory.nbytes),
        "steps": (learner.steps, int(learner.fleet.step), learner.violations),
        "place": (learner.segment, learner.batches, learner.task),
        "kind": (learner.outputs, learner.examples, learner.fleet.slots),
        "rng_state": torch.get_rng_state(),
    }
    return copy.deepcopy(found)


def check_sentence(error: BaseException, words: tuple[str, ...]) -> None:
    message = str(error)
    assert type(error) is InputError
    assert isinstance(error, ValueError)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@contextmanager
def refused(learner: OnePass, *words: str) -> Iterator[None]:
    """What happens inside raises an error of one sentence with these words, and changes nothing."""
    before = snapshot(learner)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is looked at below
        yield
    check_sentence(caught.value, words)
    after = snapshot(learner)
    changed = [key for key in before if not same(before[key], after[key])]
    assert not changed, "a refused call changed something"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.left(left) + self.right(right)
        return out
