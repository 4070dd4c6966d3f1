"""Where tasks come from: a pool of examples, as bytes, and tasks that point into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from onepass.errors import InputError
from onepass.random_numbers import Purpose, RandomNumbers

Part = Literal["cv", "ev"]  # D^CV, for choosing hyper-parameters, and D^EV, seen once
Heads = tuple[tuple[int, ...], ...]  # for each task, the outputs of a network that are its classes
TASKS: dict[Part, int] = {"cv": 3, "ev": 17}


@dataclass(frozen=True)
class Options:
    """How many examples of each task are used; all by default."""

    train_examples: int | None = None
    test_examples: int | None = None


@dataclass(frozen=True)
class Pool:
    """All examples of a data set: `x [N, D]` as bytes and `classes [N]`.

    The first `training` ones are training examples, the others are test examples. Images lie row
    by row, the channels of a pixel side by side, as convolutions on a GPU want them.
    """

    x: Tensor
    classes: Tensor
    training: int
    scale: float  # bytes times this, plus the offset, are the inputs of the network
    offset: Tensor | None = None  # [D], minus the mean
    shape: tuple[int, ...] = ()  # of an example: height, width and channels of an image, else (D,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.shape or tuple(self.x.shape[1:]))

    @cached_property
    def class_count(self) -> int:
        return int(self.classes.max()) + 1

    def prepare(self, x: Tensor) -> Tensor:
        """Inputs `[…, D]` from stored bytes."""
        if self.offset is not None:
            return torch.add(self.offset, x, alpha=self.scale)
        return x * self.scale if x.is_cuda else x.to(torch.float32, copy=True).mul_(self.scale)

    def prepare_images(self, x: Tensor) -> Tensor:
        """Inputs `[…, channels, height, width]` from stored bytes, channels last in memory."""
        return self.prepare(x).view(*x.shape[:-1], *self.shape).movedim(-1, -3)

    def on(self, device: torch.device | str) -> Pool:
        """The same examples, ready for a device."""
        return self if self.offset is None else replace(self, offset=self.offset.to(device))


@dataclass(frozen=True)
class Task:
    """One task: its examples as indices into the pool, and the slot of each class.

    The slot of a class of other tasks is −1. `permutation` reorders the pixels of every example.
    """

    train: Tensor
    test: Tensor
    slot_of_class: Tensor
    permutation: Tensor | None


class Stream(ABC):
    """A stream of tasks for every seed: 3 for cross-validation, 17 for evaluation.

    Whatever the seed, no task of one part occurs in the other: hyper-parameters chosen on `D^CV`
    have seen nothing of `D^EV`. The classes of the registry's streams declare their sizes, so that
    a study can be inspected without its data set.
    """

    shape: ClassVar[tuple[int, ...]]  # of an example, as in `Pool`
    own_classes: ClassVar[bool]  # whether every class belongs to one task only
    classes_per_task: int

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @classmethod
    def layout(cls, part: Part, classes_per_task: int) -> Heads:
        """The heads of a part: one per task where tasks have classes of their own, else shared."""
        make = separate_heads if cls.own_classes else shared_heads
        return make(TASKS[part], classes_per_task)

    def heads(self, part: Part) -> Heads:
        """For each task of this part, the outputs of a network that are its classes."""
        return self.layout(part, self.classes_per_task)

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
            f"{what}={count} is not possible:"
            f" a task of this stream has between 1 and {len(index)} of them"
        )
    chosen = RandomNumbers([seed], Purpose.SUBSET).sample(step, [len(index)], count)[0]
    return index[chosen.sort().values]


class PermutedStream(Stream):
    """All examples in every task, each task with a permutation of the pixels; one shared head.

    The first task has a permutation too. Permutations of `D^CV` are even and those of `D^EV` odd,
    so that the two parts are disjoint by construction. With `leaking` they are not: the tasks of
    `D^CV` are the first ones of `D^EV`, as in the A-GEM authors' code.
    """

    own_classes = False
    classes_per_task = 0  # those of the pool, unless a subclass says how many

    def __init__(
        self,
        pool: Pool,
        train_examples: int | None,
        test_examples: int | None,
        leaking: bool = False,
    ) -> None:
        super().__init__(pool)
        self.classes_per_task = self.classes_per_task or pool.class_count
        self.train_examples = train_examples
        self.test_examples = test_examples
        self.leaking = leaking
        self._train, self._test = torch.arange(len(pool.x)).tensor_split([pool.training])

    def check(self, part: Part, seeds: Sequence[int]) -> None:
        super().check(part, seeds[:1])  # the tasks of all runs are of the same size

    def tasks(self, part: Part, seed: int) -> list[Task]:
        permutations = RandomNumbers([seed], Purpose.PERMUTATION)
        made = []
        for k in range(TASKS[part]):
            number = k if part == "cv" and not self.leaking else TASKS["cv"] + k
            order = permutations.permutation(number, [self.pool.x.shape[1]])[0]
            if is_odd(order) != (number >= TASKS["cv"]):
                order[:2] = order[:2].flip(0)
            step = 2 * number
            task = Task(
                train=subset(self._train, self.train_examples, seed, step, "train_examples"),
                test=subset(self._test, self.test_examples, seed, step + 1, "test_examples"),
                slot_of_class=torch.arange(self.classes_per_task),
                permutation=order,
            )
            made.append(task)
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
    """Disjoint sets of classes, one head per task.

    The first classes are those of `D^CV`, the same for all seeds; seeds shuffle within a part.
    """

    own_classes = True

    def __init__(
        self,
        pool: Pool,
        classes_per_task: int,
        train_examples: int | None,
        test_examples: int | None,
    ) -> None:
        super().__init__(pool)
        self.classes_per_task = classes_per_task
        self.train_examples = train_examples
        self.test_examples = test_examples

    def classes_of(self, part: Part) -> tuple[int, int]:
        """The first class of a part, and the one behind its last."""
        reserved = TASKS["cv"] * self.classes_per_task
        if part == "cv":
            return 0, reserved
        return reserved, reserved + TASKS["ev"] * self.classes_per_task

    def order(self, part: Part, seed: int) -> Tensor:
        """The classes of a part in the order in which the tasks of a run take them."""
        first, end = self.classes_of(part)
        shuffling = RandomNumbers([seed], Purpose.CLASSES)
        return first + shuffling.permutation(int(part == "ev"), [end - first])[0]

    def check(self, part: Part, seeds: Sequence[int]) -> None:
        super().check(part, seeds[:1])
        first, end = self.classes_of(part)
        width = self.classes_per_task
        training, tests = self.pool.classes.tensor_split([self.pool.training])
        for what, count, classes in (
            ("train_examples", self.train_examples, training),
            ("test_examples", self.test_examples, tests),
        ):
            if count is None:
                continue
            sizes = torch.bincount(classes, minlength=self.pool.class_count)
            # However a seed orders the classes, a task has at least the smallest ones.
            always = int(sizes[first:end].sort().values[:width].sum())
            for seed in seeds if count > always else ():
                fewest = int(sizes[self.order(part, seed)].view(-1, width).sum(1).min())
                if count > fewest:
                    raise InputError(
                        f"{what}={count} is not possible: a task of seed {seed} has only {fewest}"
                        f" of them; {always} fit every seed"
                    )

    def tasks(self, part: Part, seed: int) -> list[Task]:
        width, made = self.classes_per_task, []
        for k, chosen in enumerate(self.order(part, seed).view(-1, width)):
            slot_of_class = torch.full((self.pool.class_count,), -1)
            slot_of_class[chosen] = torch.arange(k * width, (k + 1) * width)
            members = torch.isin(self.pool.classes, chosen).nonzero()[:, 0]
            train = members[members < self.pool.training]
            test = members[members >= self.pool.training]
            step = 4 * k + 2 * (part == "ev")
            task = Task(
                train=subset(train, self.train_examples, seed, step, "train_examples"),
                test=subset(test, self.test_examples, seed, step + 1, "test_examples"),
                slot_of_class=slot_of_class,
                permutation=None,
            )
            made.append(task)
        return made
