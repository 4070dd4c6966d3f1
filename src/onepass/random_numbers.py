"""Counter-based random numbers: functions of the run's seed, a purpose, a step and an index alone.

There is no generator object and no position to save. Resuming a run means knowing its step number,
no row of a fleet depends on its neighbours, evaluation consumes nothing, and CPU and GPU draw the
same numbers because everything is 64-bit integer arithmetic.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, OOPSLA 2014).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

# Torch locks a generator while it makes the Python object of its state. That may collect garbage,
# and so let another thread run; if that one reads the state too, both wait for ever.
_one_thread = threading.RLock()


class Purpose(IntEnum):
    """What a draw is for; two purposes never share a random number."""

    ORDER = 1  # the order in which a task's examples are shown
    RESERVOIR = 2  # which examples stay in the episodic memory
    REFERENCE = 3  # the reference batch
    PERMUTATION = 4  # pixel permutations of a stream
    CLASSES = 5  # assignment of classes to tasks
    SUBSET = 6  # which examples of a data set a task uses
    INITIAL = 7  # initial parameters
    LAYERS = 8  # random layers of the model itself, such as dropout
    SPLIT = 9  # training and test examples of a data set that comes without that division
    CONSTRAINT = 10  # the past task whose constraint a step respects
    LABELS = 11  # labels from the model's own prediction
    HELD_OUT = 12  # which examples are kept for measuring only
    ROOM = 13  # which examples go when what is noted of them needs their room


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    # Shifts of signed integers carry the sign along; the masks make them logical shifts.
    # Multiplication wraps around, as it must.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@cache
def _counter(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _GOLDEN


class RandomNumbers:
    """The random numbers of some runs, seeds `[R]`, for one purpose.

    >>> both = RandomNumbers([7, 8], Purpose.ORDER).bits(step=0, count=2)
    >>> both.shape
    torch.Size([2, 2])
    >>> torch.equal(both[1:], RandomNumbers([8], Purpose.ORDER).bits(step=0, count=2))
    True
    """

    def __init__(self, seeds: Tensor | Sequence[int], purpose: Purpose) -> None:
        self.base = _mix(torch.as_tensor(seeds, dtype=torch.int64) * _GOLDEN + int(purpose))

    def key(self, step: Tensor | int) -> Tensor:
        """What starts the sequence of a step, `[R]`, for steps `[R]` or one step for all."""
        if isinstance(step, Tensor):
            return _mix(self.base + step * _GOLDEN)
        return _mix(self.base + _signed(step * _GOLDEN % (1 << 64)))

    @staticmethod
    def _of(base: Tensor) -> RandomNumbers:
        source = object.__new__(RandomNumbers)
        source.base = base
        return source

    def spread(self, count: int) -> RandomNumbers:
        """Every run `count` times one after the other, for drawing at several steps at once."""
        return self._of(self.base.repeat_interleave(count))

    def bits(self, step: Tensor | int, count: int) -> Tensor:
        """`count` uniform 64-bit integers per row, `[R, count]`."""
        return _mix(self.key(step)[:, None] + _counter(count, self.base.device))

    def uniform(self, step: Tensor | int, count: int) -> Tensor:
        """`count` float64 numbers per row, uniform on [0, 1)."""
        return _unit(self.bits(step, count))

    def permutation(self, step: Tensor | int, sizes: list[int]) -> Tensor:
        """A uniform random permutation of `range(sizes[r])` in each row `r`, `[R, max(sizes)]`.

        Shorter rows are filled up behind their end.
        """
        count = max(sizes)
        keys = self.bits(step, count)
        if min(sizes) < count:
            ends = torch.tensor(sizes, device=keys.device)[:, None]
            behind = torch.arange(count, device=keys.device) >= ends
            keys = keys.masked_fill(behind, torch.iinfo(torch.int64).max)
        return keys.argsort(dim=1, stable=True)

    def ahead(self, step: Tensor, steps: int, population: list[int], count: int) -> Tensor:
        """`sample` for each of the next steps, `[R, steps, count]`."""
        each = [n for n in population for _ in range(steps)]
        following = (step[:, None] + torch.arange(steps, device=step.device)).flatten()
        chosen = self.spread(steps).sample(following, each, count)
        return chosen.view(len(step), steps, count)

    def sample(self, step: Tensor | int, population: list[int], count: int) -> Tensor:
        """A random subset of `range(population[r])` in random order in each row `r`, `[R, count]`.

        Costs O(count log count) whatever the population: a small population is permuted, a large
        one is drawn from with replacement until `count` different values have come up, which is the
        same distribution. Every population must hold at least `count`.
        """
        small = [n <= 4 * count for n in population]
        if all(small):
            return self.permutation(step, population)[:, :count]
        if not any(small):
            return self._distinct(step, population, count)
        # Each row in its own way, so that no row depends on its neighbours.
        drawn, order = [], []
        for way in (True, False):
            rows = [r for r, is_small in enumerate(small) if is_small == way]
            index = torch.tensor(rows, device=self.base.device)
            at = step[index] if isinstance(step, Tensor) else step
            some = self._of(self.base[index])
            drawn.append(some.sample(at, [population[r] for r in rows], count))
            order.append(index)
        return torch.cat(drawn)[torch.cat(order).argsort()]

    def _distinct(self, step: Tensor | int, population: list[int], count: int) -> Tensor:
        """The first `count` different values of draws with replacement."""
        smallest = min(population)
        # Distinct values among n draws from M > 4 count: n = −M ln(1 − count/M) draws give `count`
        # on average, with a variance below n²/2M. Ten standard deviations more make a shortage
        # impossible in practice (probability below 1e-20).
        expected = -smallest * math.log1p(-count / smallest)
        attempts = math.ceil(expected + 10 * math.sqrt(expected**2 / (2 * smallest) + 1))
        size: Tensor | int = smallest
        if max(population) > smallest:
            size = torch.tensor(population, device=self.base.device, dtype=torch.float64)[:, None]
        values = (self.uniform(step, attempts) * size).long()
        ordered, origin = values.sort(dim=1, stable=True)
        new = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[:, 1:], ordered[:, :-1], out=new[:, 1:])
        # In the order of drawing: whether this is the first time of the value.
        first = torch.empty_like(new).scatter_(1, origin, new)
        rank = first.cumsum(1) - 1
        # Repetitions and what is too much go to a place behind the end.
        place = torch.where(first, rank, count).clamp(max=count)
        return values.new_zeros(len(values), count + 1).scatter_(1, place, values)[:, :count]


class SampleCache:
    """Samples made for several steps at once: small operations cost more than the work in them.

    >>> random, steps = RandomNumbers([7], Purpose.REFERENCE), torch.tensor([5])
    >>> cache = SampleCache(random)
    >>> drawn = [cache.sample(steps + n, n, [100], 3) for n in range(2)]
    >>> all(torch.equal(drawn[n], random.sample(5 + n, [100], 3)) for n in range(2))
    True
    """

    STEPS = 32
    TIMES = 8  # as many as a caller needs at once

    def __init__(self, source: RandomNumbers) -> None:
        self._source = source
        self._first = 0  # the steps before the first sample
        self._chosen = torch.empty(0, 0)  # samples of the steps from there on, [R, steps, count]
        self.forget()

    def forget(self) -> None:
        """The next draws are at other steps than those that follow the last one."""
        self._wanted: tuple[list[int], int] | None = None  # the population and the count of these

    def sample(self, step: Tensor, steps_before: int, population: list[int], count: int) -> Tensor:
        """`RandomNumbers.sample(step, population, count)`.

        The steps `[R]` of all runs grow by one whenever `steps_before`, a count of the host, does.
        """
        return self._several(step, steps_before, population, count, 1, self.STEPS)[:, 0]

    def samples(
        self, step: Tensor, steps_before: int, population: list[int], count: int, steps: int
    ) -> Tensor:
        """The same for this and the next steps, `[R, steps, count]`."""
        ahead = self.TIMES * steps
        return self._several(step, steps_before, population, count, steps, ahead)

    def _several(
        self,
        step: Tensor,
        steps_before: int,
        population: list[int],
        count: int,
        steps: int,
        ahead: int,
    ) -> Tensor:
        wanted = population, count
        place = steps_before - self._first
        if wanted != self._wanted or not 0 <= place <= self._chosen.shape[1] - steps:
            self._chosen = self._source.ahead(step, ahead, population, count)
            self._first, self._wanted, place = steps_before, wanted, 0
        return self._chosen[:, place : place + steps]


def bits_at(seed: int, purpose: Purpose, step: int, index: int) -> int:
    """One of the 64-bit integers of a `RandomNumbers`, without a tensor.

    >>> bits_at(7, Purpose.LAYERS, 3, 1) == int(RandomNumbers([7], Purpose.LAYERS).bits(3, 2)[0, 1])
    True
    """
    whole, golden = (1 << 64) - 1, _GOLDEN % (1 << 64)

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * _MIX_1) & whole
        z = ((z ^ (z >> 27)) * _MIX_2) & whole
        return z ^ (z >> 31)

    base = mix((seed * golden + int(purpose)) & whole)
    return _signed(mix((mix((base + step * golden) & whole) + (index + 1) * golden) & whole))


@contextmanager
def torch_seeded(seed: int, device: torch.device) -> Iterator[list[torch.Generator]]:
    """Inside, torch's own generators start from `seed`, for layers that draw from them."""
    # torch.manual_seed and fork_rng treat every kind of device there is, at many times the cost of
    # a small step.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = states_of(generators)
    with _one_thread:
        for generator in generators:
            generator.manual_seed(seed)
    try:
        yield generators
    finally:
        with _one_thread:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """The states of torch's own generators."""
    with _one_thread:
        return [generator.get_state() for generator in generators]


def _in_child() -> None:
    """A child has only the thread that forked."""
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def uniform_at(key: Tensor, index: Tensor) -> Tensor:
    """The numbers on [0, 1) at places `index [R, n]` of the sequences that `key [R]` starts."""
    return _unit(_mix(key[:, None] + (index + 1) * _GOLDEN))


def _unit(bits: Tensor) -> Tensor:
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
