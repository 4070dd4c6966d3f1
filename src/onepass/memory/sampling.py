"""Which examples a memory keeps, and which ones a reference batch has: the core of every memory.

All randomness is counter-based: a decision is a function of the run's seed and of the number of the
example or step that it belongs to, not of how examples are cut into batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from onepass.random_numbers import Purpose, RandomNumbers, SampleCache, uniform_at

Policy = Literal["class-reservoir", "ring", "reservoir"]
MADE = 512  # numbers of a single run that are made in one go


def share(place: int, groups: int, room: int) -> int:
    """The part of one of several groups that share some room evenly: the first have the rest.

    >>> [share(place, 3, 11) for place in range(3)]
    [4, 4, 3]
    """
    return room // groups + (place < room % groups)


@overload
def place_in_reservoir(uniform: Tensor, number: Tensor) -> Tensor: ...
@overload
def place_in_reservoir(uniform: float, number: int) -> int: ...
def place_in_reservoir(uniform: Tensor | float, number: Tensor | int) -> Tensor | int:
    """The place of example `number`, counted from 0: it stays if the reservoir has this place.

    A uniform place among `number + 1`, so that the reservoir is a uniform sample at any time
    (Algorithm R; Vitter: Random sampling with a reservoir, ACM TOMS 1985).
    """
    place = uniform * (number + 1)
    return place.long() if isinstance(place, Tensor) else int(place)


def place_in_ring(number: Tensor, size: Tensor) -> Tensor:
    """The place of example `number`, counted from 0: that of the oldest one, if all are taken."""
    return number % size.clamp(min=1)


class ExampleNumbers:
    """One uniform number on [0, 1) for each example of a task, for every run."""

    def __init__(self, seeds: Tensor | Sequence[int], purpose: Purpose, task: int) -> None:
        self._key = RandomNumbers(seeds, purpose).key(task)
        self._first, self._made = -1, array("d")

    def at(self, number: Tensor) -> Tensor:
        """The numbers of some examples of each run, `[R, n]`."""
        return uniform_at(self._key, number)

    def __getitem__(self, number: int) -> float:
        """The number of one example of a single run."""
        place = number % MADE
        if self._first != number - place:
            self._first = number - place
            made = self.at(torch.arange(self._first, self._first + MADE)[None])
            self._made = array("d", made[0].tolist())
        return self._made[place]


class ReferencePlaces:
    """The places of reference batches: functions of the run's seed and step.

    `step [R]` are the steps of the runs, `steps_before` those so far, as the host counts them.
    """

    def __init__(self, seeds: Tensor | Sequence[int]) -> None:
        self._random = RandomNumbers(seeds, Purpose.REFERENCE)
        self._cache = SampleCache(self._random)

    def forget(self) -> None:
        """The next steps are others than those that follow the last one."""
        self._cache.forget()

    def distinct(
        self, step: Tensor, steps_before: int | None, sizes: list[int], count: int
    ) -> Tensor:
        """`count` different places below `sizes[r]` for each run, `[R, count]`.

        With `steps_before`, those of the steps that follow are made in one go: inside a task the
        active runs all take the same steps.
        """
        if steps_before is None:
            return self._random.sample(step, sizes, count)
        return self._cache.sample(step, steps_before, sizes, count)

    def distinct_ahead(
        self, step: Tensor, steps_before: int, sizes: list[int], count: int, steps: int
    ) -> Tensor:
        """The same for this and the next steps, `[R, steps, count]`."""
        return self._cache.samples(step, steps_before, sizes, count, steps)

    def independent(self, step: Tensor, size: Tensor, count: int, steps: int = 1) -> Tensor:
        """Places below `size [R, 1]` with replacement, `[R, steps, count]`, for the next steps."""
        at = (step[:, None] + torch.arange(steps, device=step.device)).flatten()
        uniform = self._random.spread(steps).uniform(at, count).view(len(step), steps, count)
        return (uniform * size[..., None]).long()
