"""Where tasks come from: a pool of examples that lies on the device once, as bytes, and tasks that point into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from onepass.errors import InputError
from onepass.random_numbers import Purpose, RandomNumbers

Part = Literal["cv", "ev"]  # D^CV, for choosing hyper-parameters, and D^EV, seen once
Heads = tuple[tuple[int, ...], ...]  # for each task, the outputs of a network that are its classes
TASKS: dict[Part, int] = {"cv": 3, "ev": 17}


@dataclass(frozen=True)
class Pool:
    """All examples of a data set: `x [N, D]` as bytes, `classes [N]`, and how many of them, from the front, are training examples.

    Images lie row by row, the channels of a pixel side by side: as convolutions on a GPU want them.
    """

    x: Tensor
    classes: Tensor
    training: int
    scale: float  # bytes times this, plus the offset, are the inputs of the network
    offset: Tensor | None = None  # [D], minus the mean
    shape: tuple[int, int, int] | None = None  # height, width and channels of an image

    def prepare(self, x: Tensor) -> Tensor:
        """Inputs `[…, D]` from stored bytes."""
        if self.offset is not None:
            return torch.add(self.offset, x, alpha=self.scale)
        return x * self.scale if x.is_cuda else x.to(torch.float32, copy=True).mul_(self.scale)

    def prepare_images(self, x: Tensor) -> Tensor:
        """Inputs `[…, channels, height, width]` from stored bytes, channels last in memory."""
        assert self.shape is not None
        return self.prepare(x).view(*x.shape[:-1], *self.shape).movedim(-1, -3)

    def on(self, device: torch.device | str) -> Pool:
        """The same examples, ready for a device."""
        return self if self.offset is None else replace(self, offset=self.offset.to(device))


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
    def heads(self, part: Part) -> Heads:
        """The outputs of a network that each task of this part has."""

    @abstractmethod
    def tasks(self, part: Part, seed: int) -> list[Task]:
        """The tasks of one run."""

    def check(self, part: Part, seeds: Sequence[int]) -> None:
        """Raise if the options do not fit the tasks of one of these runs."""
        for seed in seeds:
            self.tasks(part, seed)


def shared_heads(tasks: int, classes: int) -> Heads:
    """One head of `classes` outputs for all tasks."""
    return (tuple(range(classes)),) * tasks


def separate_heads(tasks: int, classes: int) -> Heads:
    """A head of `classes` outputs for each task."""
    return tuple(tuple(range(k * classes, (k + 1) * classes)) for k in range(tasks))


def subset(index: Tensor, count: int | None, seed: int, step: int, what: str) -> Tensor:
    """`count` of the indices at random, in ascending order; all of them when `count` is None."""
    if count is None:
        return index
    if not 0 < count <= len(index):
        raise InputError(
            f"{what}={count} is not possible: a task of this stream has between 1 and {len(index)} of them"
        )
    return index[
        RandomNumbers([seed], Purpose.SUBSET).sample(step, [len(index)], count)[0].sort().values
    ]


class PermutedStream(Stream):
    """All examples in every task, the pixels of each task reordered by a permutation of its own (the first task's too); one shared head.

    Permutations of `D^CV` are even and those of `D^EV` odd, so that the two parts are disjoint by construction. With `leaking` they are not:
    the tasks of `D^CV` are the first ones of `D^EV`, as in the A-GEM authors' code.
    """

    def __init__(
        self,
        pool: Pool,
        train_examples: int | None,
        test_examples: int | None,
        leaking: bool = False,
    ) -> None:
        super().__init__(pool)
        self.train_examples, self.test_examples, self.leaking = (
            train_examples,
            test_examples,
            leaking,
        )
        self.classes = int(pool.classes.max()) + 1
        self._train, self._test = torch.arange(len(pool.x)).tensor_split([pool.training])

    def heads(self, part: Part) -> Heads:
        return shared_heads(TASKS[part], self.classes)

    def check(self, part: Part, seeds: Sequence[int]) -> None:
        super().check(part, seeds[:1])  # the tasks of all runs are of the same size

    def tasks(self, part: Part, seed: int) -> list[Task]:
        made = []
        for k in range(TASKS[part]):
            number = k if part == "cv" and not self.leaking else TASKS["cv"] + k
            order = RandomNumbers([seed], Purpose.PERMUTATION).permutation(
                number, [self.pool.x.shape[1]]
            )[0]
            if is_odd(order) != (number >= TASKS["cv"]):
                order[:2] = order[:2].flip(0)
            made.append(
                Task(
                    train=subset(
                        self._train, self.train_examples, seed, 2 * number, "train_examples"
                    ),
                    test=subset(
                        self._test, self.test_examples, seed, 2 * number + 1, "test_examples"
                    ),
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

    def __init__(
        self,
        pool: Pool,
        classes_per_task: int,
        train_examples: int | None,
        test_examples: int | None,
    ) -> None:
        super().__init__(pool)
        self.classes_per_task = classes_per_task
        self.train_examples, self.test_examples = train_examples, test_examples
        self.classes = int(pool.classes.max()) + 1

    def heads(self, part: Part) -> Heads:
        return separate_heads(TASKS[part], self.classes_per_task)

    def classes_of(self, part: Part) -> tuple[int, int]:
        """The first class of a part, and the one behind its last."""
        reserved = TASKS["cv"] * self.classes_per_task
        return (
            (0, reserved)
            if part == "cv"
            else (reserved, reserved + TASKS["ev"] * self.classes_per_task)
        )

    def order(self, part: Part, seed: int) -> Tensor:
        """The classes of a part as the tasks of a run take them."""
        first, end = self.classes_of(part)
        return (
            first
            + RandomNumbers([seed], Purpose.CLASSES).permutation(int(part == "ev"), [end - first])[
                0
            ]
        )

    def check(self, part: Part, seeds: Sequence[int]) -> None:
        super().check(part, seeds[:1])
        first, end = self.classes_of(part)
        training, tests = self.pool.classes.tensor_split([self.pool.training])
        for what, count, classes in (
            ("train_examples", self.train_examples, training),
            ("test_examples", self.test_examples, tests),
        ):
            if count is None:
                continue
            sizes = torch.bincount(classes, minlength=self.classes)
            # However a seed orders the classes, a task has at least the smallest ones.
            always = int(sizes[first:end].sort().values[: self.classes_per_task].sum())
            for seed in seeds if count > always else ():
                fewest = int(
                    sizes[self.order(part, seed)].view(-1, self.classes_per_task).sum(1).min()
                )
                if count > fewest:
                    raise InputError(
                        f"{what}={count} is not possible: a task of seed {seed} has only {fewest} of them; {always} fit every seed"
                    )

    def tasks(self, part: Part, seed: int) -> list[Task]:
        width, made = self.classes_per_task, []
        for k, chosen in enumerate(self.order(part, seed).view(-1, width)):
            slot_of_class = torch.full((self.classes,), -1)
            slot_of_class[chosen] = torch.arange(k * width, (k + 1) * width)
            members = torch.isin(self.pool.classes, chosen).nonzero()[:, 0]
            train, test = (
                members[members < self.pool.training],
                members[members >= self.pool.training],
            )
            step = 4 * k + 2 * (part == "ev")
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
