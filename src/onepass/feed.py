"""A stream for all runs of a fleet: batches of every run's current task, gathered by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.random_numbers import Purpose, RandomNumbers
from onepass.streams.base import Part, Stream, Task

CHUNK = 120  # steps gathered at once: one gather per step would cost more than a small step


class Feed:
    """The tasks of all runs side by side.

    `joined` shows one shuffled pass over the union of all tasks as a single task. With
    `union_softmax` the slots of all tasks compete in the loss of a joined pass; at test time only
    the task's own ever do.
    """

    def __init__(
        self,
        stream: Stream,
        part: Part,
        seeds: Sequence[int],
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        joined: bool = False,
        union_softmax: bool = True,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"the batch size must be at least 1, got {batch_size}")
        self.device = torch.device(device)
        self.batch_size, self.joined = batch_size, joined
        self.slots = Slots(stream.heads(part), union=joined and union_softmax)
        self.seeds = torch.tensor(list(seeds), device=self.device)
        self._x, self._classes = stream.pool.x.to(self.device), stream.pool.classes.to(self.device)
        self._runs = [stream.tasks(part, seed) for seed in seeds]
        self.tasks = len(self._runs[0])
        self._rows = torch.arange(len(seeds), device=self.device)[:, None]
        slots = [torch.stack([t.slot_of_class for t in run]) for run in self._runs]
        self._slot_of_class = torch.stack(slots).to(self.device)
        self._permutation: Tensor | None = None
        orders = [[t.permutation for t in run if t.permutation is not None] for run in self._runs]
        if orders[0]:
            stacks = [torch.stack(run) for run in orders]
            self._permutation = torch.stack(stacks).to(self.device)

    @property
    def phases(self) -> int:
        """How many tasks training goes through: all of them, or one that joins them."""
        return 1 if self.joined else self.tasks

    def _members(self, run: list[Task], phase: int) -> list[tuple[int, Tensor]]:
        if self.joined:
            return [(k, t.train) for k, t in enumerate(run)]
        return [(phase, run[phase].train)]

    def lengths(self, phase: int) -> list[int]:
        """Training examples of each run in a phase."""
        return [sum(len(train) for _, train in self._members(run, phase)) for run in self._runs]

    def steps(self, phase: int | None = None, batches: int = 0) -> int:
        """Steps of all runs together: of the whole pass, or before batch `batches` of a phase."""
        earlier = range(self.phases if phase is None else phase)
        before = [-(-n // self.batch_size) for one in earlier for n in self.lengths(one)]
        if phase is None or not batches:
            return sum(before)
        return sum(before) + sum(
            min(batches, -(-n // self.batch_size)) for n in self.lengths(phase)
        )

    def batches(self, phase: int, skip: int = 0) -> Iterator[Batch]:
        """A single pass over a phase: every example of every run once, in an order by its seed.

        `skip` leaves out the first batches, which have been learnt already.
        """
        for batch, _ in self.stretches(phase, skip, lambda done, left: 1):
            yield batch

    def stretches(
        self, phase: int, skip: int, steps: Callable[[int, int], int]
    ) -> Iterator[tuple[Batch, int]]:
        """The same in stretches: several batches of full size as one, and how many they are.

        `steps(done, left)` says how many, where `done` have come and `left` more are full for every
        run.
        """
        lengths = self.lengths(phase)
        order = RandomNumbers(self.seeds, Purpose.ORDER).permutation(phase, lengths)
        members = [self._members(run, phase) for run in self._runs]
        examples = [_joined([train for _, train in row]) for row in members]
        index = self._stack(examples).gather(1, order)
        owner: Tensor | int = phase
        if self.joined:
            tasks = [torch.cat([torch.full_like(t, k) for k, t in row]) for row in members]
            owner = self._stack(tasks).gather(1, order)
        done, full, total = skip, min(lengths) // self.batch_size, max(lengths)
        start = end = 0  # of the batches that are gathered
        while done * self.batch_size < total:
            count = steps(done, full - done) if done < full else 1
            if done + count > end:
                start, end = done, done + max(count, CHUNK)
                piece = slice(start * self.batch_size, end * self.batch_size)
                owners = owner if isinstance(owner, int) else owner[:, piece]
                chunk = self._gather(index[:, piece], owners)
            first = (done - start) * self.batch_size
            end_of_stretch = first + count * self.batch_size
            x, slots = (t[:, first:end_of_stretch] for t in (chunk.x, chunk.slots))
            sizes = tuple(max(0, min(slots.shape[1], n - done * self.batch_size)) for n in lengths)
            yield Batch(x, slots, sizes, task=None if self.joined else phase), count
            done += count

    def test(self, task: int) -> Batch:
        """All test examples of a task."""
        tests = [run[task].test for run in self._runs]
        sizes = tuple(len(t) for t in tests)
        return replace(self._gather(self._stack(tests), task), sizes=sizes, task=task)

    def _gather(self, index: Tensor, owner: Tensor | int) -> Batch:
        slots = self._slot_of_class[self._rows, owner, self._classes[index]]
        x = self._x.index_select(0, index.flatten()).view(*index.shape, -1)
        if self._permutation is not None:
            if isinstance(owner, int):
                order = self._permutation[:, owner][:, None]
            else:
                order = self._permutation[self._rows, owner]
            x = x.gather(2, order.expand_as(x))
        return Batch(x, slots)

    def _stack(self, rows: list[Tensor]) -> Tensor:
        """Rows of unequal length as one tensor; padding repeats valid entries and never counts."""
        if all(row is rows[0] for row in rows):  # all examples in every task: one copy will do
            return rows[0].to(self.device).expand(len(rows), -1)
        place = torch.arange(max(len(row) for row in rows))
        return torch.stack([row[place % len(row)] for row in rows]).to(self.device)


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
