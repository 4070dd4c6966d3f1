"""Counter-based randomness: a draw is a function of (seed of the run, purpose, step, index) and of nothing else.

There is no generator object and no position to save. Resuming a run means knowing its step number, no row of a fleet depends on its
neighbours, evaluation consumes nothing, and CPU and GPU draw the same numbers because everything is 64-bit integer arithmetic.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
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

# Torch locks a generator while it makes the Python object of its state. That may collect garbage, and
# so let another thread run; if that one asks for the state too, the process stands still for ever.
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
    # Shifts of signed integers carry the sign along; the masks make them logical shifts. Multiplication wraps around, as it must.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@cache
def _counter(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _GOLDEN


class RandomNumbers:
    """The random numbers of some runs, seeds `[R]`, for one purpose.

    >>> RandomNumbers([7, 8], Purpose.ORDER).bits(step=0, count=2).shape
    torch.Size([2, 2])
    >>> alone = RandomNumbers([8], Purpose.ORDER).bits(step=0, count=2)
    >>> bool((RandomNumbers([7, 8], Purpose.ORDER).bits(step=0, count=2)[1] == alone[0]).all())
    True
    """

    def __init__(self, seeds: Tensor | Sequence[int], purpose: Purpose) -> None:
        self.base = _mix(torch.as_tensor(seeds, dtype=torch.int64) * _GOLDEN + int(purpose))

    def key(self, step: Tensor | int) -> Tensor:
        """What starts the sequence of a step, `[R]`, for steps `[R]` or one step for all."""
        return _mix(
            self.base
            + (step * _GOLDEN if isinstance(step, Tensor) else _signed(step * _GOLDEN % (1 << 64)))
        )

    @staticmethod
    def _of(base: Tensor) -> RandomNumbers:
        source = object.__new__(RandomNumbers)
        source.base = base
        return source

    def spread(self, count: int) -> RandomNumbers:
        """Every run `count` times in a row, for drawing at several steps at once."""
        return self._of(self.base.repeat_interleave(count))

    def bits(self, step: Tensor | int, count: int) -> Tensor:
        """`count` uniform 64-bit integers a row, `[R, count]`."""
        return _mix(self.key(step)[:, None] + _counter(count, self.base.device))

    def uniform(self, step: Tensor | int, count: int) -> Tensor:
        """`count` float64 numbers a row, uniform on [0, 1)."""
        return _unit(self.bits(step, count))

    def permutation(self, step: Tensor | int, sizes: list[int]) -> Tensor:
        """A uniform random permutation of `range(sizes[r])` in each row `r`, `[R, max(sizes)]`; shorter rows are filled up behind their end."""
        count = max(sizes)
        keys = self.bits(step, count)
        if min(sizes) < count:
            behind = (
                torch.arange(count, device=keys.device)
                >= torch.tensor(sizes, device=keys.device)[:, None]
            )
            keys = keys.masked_fill(behind, torch.iinfo(torch.int64).max)
        return keys.argsort(dim=1, stable=True)

    def ahead(self, step: Tensor, steps: int, population: list[int], count: int) -> Tensor:
        """`sample` for each of the next steps, `[R, steps, count]`."""
        each = [n for n in population for _ in range(steps)]
        chosen = self.spread(steps).sample(
            (step[:, None] + torch.arange(steps, device=step.device)).flatten(), each, count
        )
        return chosen.view(len(step), steps, count)

    def sample(self, step: Tensor | int, population: list[int], count: int) -> Tensor:
        """A uniform random subset of `range(population[r])` of size `count`, in random order, in each row `r`: `[R, count]`.

        Costs O(count log count) whatever the population: a small population is permuted, a large one is drawn from with replacement until
        `count` different values have come up, which is the same distribution. Every population must hold at least `count`.
        """
        small = [n <= 4 * count for n in population]
        if all(small):
            return self.permutation(step, population)[:, :count]
        if any(small):  # each row by its own way, so that no row depends on its neighbours
            parts = [
                torch.tensor([r for r, s in enumerate(small) if s == way], device=self.base.device)
                for way in (True, False)
            ]
            drawn = [
                self._of(self.base[rows]).sample(
                    _only(step, rows), [population[r] for r in rows.tolist()], count
                )
                for rows in parts
            ]
            return torch.cat(drawn)[torch.cat(parts).argsort()]
        smallest = min(population)
        # Distinct values among n draws from M > 4 count: n = −M ln(1 − count/M) draws give `count` on average, with a variance below
        # n²/2M. Ten standard deviations more make a shortage impossible in practice (probability below 1e-20).
        expected = -smallest * math.log1p(-count / smallest)
        attempts = math.ceil(expected + 10 * math.sqrt(expected**2 / (2 * smallest) + 1))
        size: Tensor | int = smallest
        if max(population) > smallest:
            size = torch.tensor(population, device=self.base.device, dtype=torch.float64)[:, None]
        values = (self.uniform(step, attempts) * size).long()
        ordered, origin = values.sort(dim=1, stable=True)
        new = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[:, 1:], ordered[:, :-1], out=new[:, 1:])
        first = torch.empty_like(new).scatter_(
            1, origin, new
        )  # in the order of drawing: is this the value's first time?
        rank = first.cumsum(1) - 1
        place = torch.where(first, rank, count).clamp(
            max=count
        )  # repetitions and what is too much go to a place behind the end
        return values.new_zeros(len(values), count + 1).scatter_(1, place, values)[:, :count]


class SampleCache:
    """Samples for several steps made in one go: the small operations of a draw cost more than the work in them.

    >>> ahead, steps = SampleCache(RandomNumbers([7], Purpose.REFERENCE)), torch.tensor([5])
    >>> drawn = [ahead.sample(steps + n, n, [100], 3) for n in range(2)]
    >>> all(torch.equal(drawn[n], RandomNumbers([7], Purpose.REFERENCE).sample(5 + n, [100], 3)) for n in range(2))
    True
    """

    STEPS = 32
    TIMES = 8  # as many as somebody asks for at once

    def __init__(self, source: RandomNumbers) -> None:
        self._source = source
        self._made: tuple[int, list[int], int, Tensor] | None = (
            None  # from which tick on, of what, how many a draw, and the choices [R, steps, n]
        )

    def forget(self) -> None:
        """The next draws are at other steps than those that follow the last one."""
        self._made = None

    def sample(self, step: Tensor, tick: int, population: list[int], count: int) -> Tensor:
        """`RandomNumbers.sample(step, population, count)` for a caller whose steps `[R]` all go up by one whenever `tick` does."""
        return self._several(step, tick, population, count, 1, self.STEPS)[:, 0]

    def samples(
        self, step: Tensor, tick: int, population: list[int], count: int, steps: int
    ) -> Tensor:
        """The same for several steps, `[R, steps, count]`."""
        return self._several(step, tick, population, count, steps, self.TIMES * steps)

    def _several(
        self, step: Tensor, tick: int, population: list[int], count: int, steps: int, new: int
    ) -> Tensor:
        made = self._made
        if (
            made is None
            or not made[0] <= tick <= made[0] + made[3].shape[1] - steps
            or made[1] != population
            or made[2] != count
        ):
            self._made = made = (
                tick,
                population,
                count,
                self._source.ahead(step, new, population, count),
            )
        return made[3][:, tick - made[0] : tick - made[0] + steps]


def _only(step: Tensor | int, rows: Tensor) -> Tensor | int:
    return step[rows] if isinstance(step, Tensor) else step


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
    """Torch's own generators start from `seed` inside, and are as before outside: for layers that draw from them."""
    # Not by torch.manual_seed and fork_rng: they look after every kind of device there is, at many times the cost of a small step.
    generators = [
        torch.default_generator,
        *([torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []),
    ]
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
    """Where torch's own generators are."""
    with _one_thread:
        return [generator.get_state() for generator in generators]


def _in_child() -> None:
    """A child has only the thread that forked."""
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def uniform_at(key: Tensor, index: Tensor) -> Tensor:
    """The numbers at places `index [R, n]` of the sequences that `key [R]` starts, uniform on [0, 1)."""
    return _unit(_mix(key[:, None] + (index + 1) * _GOLDEN))


def _unit(bits: Tensor) -> Tensor:
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
