"""Where tasks come from: a pool of examples that lies on the device once, as bytes, and tasks that point into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onepass.draws import Purpose, Source
from onepass.errors import InputError
from onepass.streams.slots import Slots

Part = Literal["cv", "ev"]  # D^CV, for choosing hyper-parameters, and D^EV, seen once
TASKS: dict[Part, int] = {"cv": 3, "ev": 17}


@dataclass(frozen=True)
class Pool:
    """All examples of a data set: `x [N, D]` as bytes, `classes [N]`, and how many of them, from the front, are training examples."""

    x: Tensor
    classes: Tensor
    training: int
    scale: float  # bytes times this are the inputs of the network

    def prepare(self, x: Tensor) -> Tensor:
        return x * self.scale if x.is_cuda else x.to(torch.float32, copy=True).mul_(self.scale)


@dataclass(frozen=True)
class Task:
    """One task: training and test examples as indices into the pool, the slot of each class (−1: not in this task), and its descriptor.

    `permutation` reorders the pixels of every example. The descriptor is what the learner is told about the task: here its number.
    """

    train: Tensor
    test: Tensor
    slot_of_class: Tensor
    permutation: Tensor | None
    descriptor: Tensor


class Stream(ABC):
    """A stream of tasks for every seed: 3 for cross-validation, 17 for evaluation, made by disjoint generators.

    Whatever the seed, no task of one part occurs in the other: hyper-parameters chosen on `D^CV` have seen nothing of `D^EV`.
    """

    name: str
    summary: str

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @abstractmethod
    def slots(self, part: Part) -> Slots:
        """The outputs of a network for this part, and which of them compete."""

    @abstractmethod
    def tasks(self, part: Part, seed: int) -> list[Task]:
        """The tasks of one run."""


def subset(index: Tensor, count: int | None, seed: int, step: int, what: str) -> Tensor:
    """`count` of the indices at random, in ascending order; all of them when `count` is None."""
    if count is None:
        return index
    if not 0 < count <= len(index):
        raise InputError(f"{what}={count} is not possible: a task of this stream has between 1 and {len(index)} of them")
    return index[Source([seed], Purpose.SUBSET).sample(step, [len(index)], count)[0].sort().values]


class PermutedStream(Stream):
    """All examples in every task, the pixels of each task reordered by a permutation of its own (the first task's too); one shared head.

    Permutations of `D^CV` are even and those of `D^EV` odd, so that the two parts are disjoint by construction. With `leaking` they are not:
    the tasks of `D^CV` are the first ones of `D^EV`, as in the A-GEM authors' code.
    """

    def __init__(self, pool: Pool, train_examples: int | None, test_examples: int | None, leaking: bool = False) -> None:
        super().__init__(pool)
        self.train_examples, self.test_examples, self.leaking = train_examples, test_examples, leaking
        self.classes = int(pool.classes.max()) + 1
        self._train, self._test = torch.arange(len(pool.x)).tensor_split([pool.training])

    def slots(self, part: Part) -> Slots:
        return Slots.shared(TASKS[part], self.classes)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        made = []
        for k in range(TASKS[part]):
            number = k if part == "cv" and not self.leaking else TASKS["cv"] + k
            order = Source([seed], Purpose.PERMUTATION).permutation(number, [self.pool.x.shape[1]])[0]
            if is_odd(order) != (number >= TASKS["cv"]):
                order[:2] = order[:2].flip(0)
            made.append(
                Task(
                    train=subset(self._train, self.train_examples, seed, 2 * number, "train_examples"),
                    test=subset(self._test, self.test_examples, seed, 2 * number + 1, "test_examples"),
                    slot_of_class=torch.arange(self.classes),
                    permutation=order,
                    descriptor=torch.tensor(k),
                )
            )
        return made


def is_odd(permutation: Tensor) -> bool:
    """Whether a permutation is a product of an odd number of swaps.

    >>> is_odd(torch.tensor([1, 0, 2])), is_odd(torch.tensor([1, 2, 0]))
    (True, False)
    """
    order, odd = permutation.tolist(), False
    seen = [False] * len(order)
    for start in range(len(order)):
        at, length = start, 0
        while not seen[at]:
            seen[at] = True
            at, length = order[at], length + 1
        odd ^= length > 0 and length % 2 == 0
    return odd


class SplitStream(Stream):
    """Disjoint sets of classes, a head a task. The first classes are those of `D^CV`, the same for all seeds; seeds shuffle within a part."""

    def __init__(self, pool: Pool, classes_per_task: int, train_examples: int | None, test_examples: int | None) -> None:
        super().__init__(pool)
        self.classes_per_task = classes_per_task
        self.train_examples, self.test_examples = train_examples, test_examples
        self.classes = int(pool.classes.max()) + 1

    def slots(self, part: Part) -> Slots:
        return Slots.separate(TASKS[part], self.classes_per_task)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        width, reserved = self.classes_per_task, TASKS["cv"] * self.classes_per_task
        first, number = (0, 0) if part == "cv" else (reserved, 1)
        order = first + Source([seed], Purpose.CLASSES).permutation(number, [TASKS[part] * width])[0]
        made = []
        for k, chosen in enumerate(order.view(-1, width)):
            slot_of_class = torch.full((self.classes,), -1)
            slot_of_class[chosen] = torch.arange(k * width, (k + 1) * width)
            members = torch.isin(self.pool.classes, chosen).nonzero()[:, 0]
            train, test = members[members < self.pool.training], members[members >= self.pool.training]
            step = 4 * k + 2 * number
            made.append(
                Task(
                    train=subset(train, self.train_examples, seed, step, "train_examples"),
                    test=subset(test, self.test_examples, seed, step + 1, "test_examples"),
                    slot_of_class=slot_of_class,
                    permutation=None,
                    descriptor=torch.tensor(k),
                )
            )
        return made
