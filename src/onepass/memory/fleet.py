"""The episodic memory of a fleet: a fixed budget per task, for each of R runs.

The paper fills the memory of a task by sampling uniformly per class once the task is over. A
reservoir per class, filled while the examples pass by, has the same distribution and needs no
second pass over the data. Its content becomes visible when the task ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError, unknown
from onepass.memory.captured import CapturedDraws, Found
from onepass.memory.protocol import Chooser
from onepass.memory.sampling import (
    ExampleNumbers,
    Policy,
    ReferencePlaces,
    place_in_reservoir,
    place_in_ring,
    share,
)
from onepass.random_numbers import Purpose

AT_ONCE = 32  # batches that are stored in one go: the small operations cost more than the work
SAVED = ("slots", "task", "start", "seen", "filled", "place")  # and the examples, if there are some


class FleetMemory(CapturedDraws):
    """`budget` examples per task for every run of a fleet, stored as they came, with their slots.

    Policies: `class-reservoir` keeps a uniform sample of each class, `ring` the last examples of
    each class, `reservoir` a uniform sample of the task. A task's classes share its budget evenly.
    `include_current` makes the current task visible while it is learnt.

    What is kept depends on the order of the examples alone, not on how they are cut into batches.
    So batches are stored several at a time; until then they are held and must not be written to. A
    draw is a function of the run's seed and step: it is repeatable, and needs no state. What the
    methods promise is said in `EpisodicMemory`.
    """

    def __init__(
        self,
        fleet: Fleet,
        tasks: int,
        budget: int,
        *,
        policy: Policy = "class-reservoir",
        include_current: bool = False,
        with_replacement: bool = False,
    ) -> None:
        if budget < 1 or tasks < 1:
            needed = "room for at least one example a task and one task"
            raise InputError(f"an episodic memory needs {needed}, got {budget} and {tasks}")
        if policy not in get_args(Policy):
            raise unknown("memory policy", policy, get_args(Policy))
        most = max(len(row) for row in fleet.slots.table)
        if include_current and policy != "reservoir" and budget < most:
            needed = f"room for one example a class: at least {most} a task"
            raise InputError(f"a memory that shows the current task needs {needed}, got {budget}")
        super().__init__()
        self.fleet = fleet
        self.tasks, self.budget, self.policy = tasks, budget, policy
        self.include_current = include_current
        self.with_replacement = with_replacement
        self.sizes = [0] * fleet.runs  # visible examples of each run, as the host knows them
        self._counts: list[list[int]] = []  # and of each past task and run
        # Examples [R, T·budget + 1, …]: past tasks, then the current one. The last place takes what
        # is thrown away.
        self._x: Tensor | None = None
        self._slots = torch.zeros(
            fleet.runs, tasks * budget + 1, dtype=torch.int64, device=fleet.device
        )
        self._task = torch.full_like(self._slots, -1)
        self._rows = torch.arange(fleet.runs, device=fleet.device)[:, None]
        # Where the current task begins.
        self._start = torch.zeros(fleet.runs, 1, dtype=torch.int64, device=fleet.device)
        self._reference = ReferencePlaces(fleet.seeds)
        self._waiting: list[tuple[Batch, Tensor]] = []
        self.begin_task(0)

    # ---- what is kept

    def begin_task(self, task: int) -> None:
        self._waiting = []
        self._reference.forget()
        self.task = task
        classes = self.fleet.slots.table[task] if self.policy != "reservoir" else (0,)
        count, runs, device = len(classes), self.fleet.runs, self.fleet.device
        shares = [share(place, count, self.budget) for place in range(count)]
        self._quota = torch.tensor(shares, device=device)
        # Which reservoir a slot belongs to.
        self._group = torch.zeros(self.fleet.slots.count, dtype=torch.int64, device=device)
        if self.policy != "reservoir":
            self._group[list(classes)] = torch.arange(count, device=device)
        self._numbers = ExampleNumbers(self.fleet.seeds, Purpose.RESERVOIR, task)
        self._seen = torch.zeros(runs, count, dtype=torch.int64, device=device)
        self._filled = torch.zeros_like(self._start)
        # The place of each reservoir's entries, and one that is never read.
        entries = count * (self.budget // count + 1)
        self._place = torch.zeros(runs, entries + 1, dtype=torch.int64, device=device)

    def observe(self, batch: Batch) -> None:
        """Offer a batch of the current task, example by example in effect."""
        if self._turn is not None:  # captured steps are offered after they have run
            return
        real = self.fleet.active.expand(-1, batch.slots.shape[1])
        if batch.sizes is None:
            real = real.clone()
        else:
            places = torch.arange(batch.slots.shape[1], device=real.device)
            real = real & (places < torch.tensor(batch.sizes, device=real.device)[:, None])
        self._waiting.append((batch, real))
        if self.include_current or len(self._waiting) == AT_ONCE:
            self._store()

    def _store(self) -> None:
        """Take in the batches that wait."""
        if not self._waiting:
            return
        batches, masks = zip(*self._waiting, strict=True)
        self._waiting = []
        x = torch.cat([b.x for b in batches], 1)
        slots = torch.cat([b.slots for b in batches], 1)
        real = torch.cat(masks, 1)
        discarded = self.tasks * self.budget  # the place of what is thrown away
        if self._x is None:
            self._x = x.new_zeros(self.fleet.runs, discarded + 1, *x.shape[2:])
        group = self._group[slots]
        groups = torch.arange(len(self._quota), device=x.device)
        mine = (group[..., None] == groups) & real[..., None]  # [R, B, reservoirs]
        so_far = self._seen[:, None] + mine.cumsum(1)
        order = so_far.gather(2, group[..., None])[..., 0] - 1  # index in its reservoir, from 0
        quota = self._quota[group]
        fresh = real & (order < quota)
        if self.policy == "ring":
            entry = place_in_ring(order, quota)
        else:
            number = self._seen.sum(1, keepdim=True) + real.cumsum(1) - 1  # in the task
            entry = place_in_reservoir(self._numbers.at(number), order)
        kept = real & (fresh | (entry < quota)) & (quota > 0)
        entry = torch.where(fresh, order, entry)
        unread = self._place.shape[1] - 1
        address = group * (unread // len(self._quota)) + entry
        place = self._start + self._filled + fresh.cumsum(1) - 1
        self._place.scatter_(1, torch.where(fresh, address, unread), place)
        place = self._place.gather(1, torch.where(kept, address, unread))
        target = torch.where(kept, place, discarded)
        # Of several examples for one place the last one stays.
        turn = torch.arange(x.shape[1], device=x.device).expand_as(target)
        last = torch.full_like(self._slots, -1).scatter_reduce(1, target, turn, "amax")
        target = torch.where(last.gather(1, target) == turn, target, discarded)
        self._x.flatten(0, 1).index_copy_(0, self._flat(target), x.flatten(0, 1))
        self._slots.scatter_(1, target, slots)
        self._task.scatter_(1, target, self.task)
        self._seen += mine.sum(1)
        self._filled += fresh.sum(1, keepdim=True)

    def end_task(self) -> None:
        """Make the task visible. Synchronises, so that the sizes of reference batches are known."""
        self._store()
        self._reference.forget()
        self._start += self._filled
        self._filled = torch.zeros_like(self._start)
        self._count()

    def _count(self) -> None:
        """Read how much of each task is visible. Tasks lie one behind the other."""
        visible = torch.arange(self._task.shape[1], device=self.fleet.device) < self._start
        owner = torch.where(visible, self._task, -1)
        lost = self.fleet.diverged()
        self._counts = []
        for task in range(self.task + 1):
            counts = [int(n) for n in (owner == task).sum(1).tolist()]
            # A run that has diverged keeps nothing any more, and what it computes is thrown away.
            # It counts as having as much as the others, so that batches stay of one size.
            self._counts.append([max(counts) if lost[r] else n for r, n in enumerate(counts)])
        self.sizes = [sum(row) for row in zip(*self._counts, strict=True)]

    # ---- what is drawn

    def of(self, tasks: Sequence[int]) -> Batch:
        assert self._x is not None
        counts = [self._counts[task][r] for r, task in enumerate(tasks)]
        starts = [
            sum(self._counts[earlier][r] for earlier in range(task)) for r, task in enumerate(tasks)
        ]
        width = max(counts)
        if len(set(starts)) == 1:
            piece = slice(starts[0], starts[0] + width)
            return Batch(self._x[:, piece], self._slots[:, piece], tuple(counts))
        within = torch.arange(width) % torch.tensor(counts).clamp(min=1)[:, None]
        places = torch.tensor(starts)[:, None] + within
        return self._take(places.to(self.fleet.device, non_blocking=True), tuple(counts))

    def of_chosen(self, choose: Chooser) -> Batch:
        return self._draw(
            "task",
            lambda: self.of(choose(1)[:, 0].tolist()),
            lambda steps: self._places(choose(steps)),
        )

    def _places(self, chosen: Tensor) -> Tensor:
        """The places `[R, steps, n]` of all that is kept of the chosen tasks `[R, steps]`.

        As much must be kept of every task.
        """
        size = self._counts[0][0]
        places = size * chosen[..., None] + torch.arange(size)
        if self.fleet.device.type != "cuda":
            return places
        return places.pin_memory().to(self.fleet.device, non_blocking=True)

    def draw(self, count: int) -> Batch | None:
        """A reference batch of `count` visible examples, uniform without replacement."""
        if self._x is None:
            return None
        if self.include_current:
            return self._draw_with_current(count)
        visible = max(self.sizes)
        if visible == 0:
            return None
        if self.with_replacement:
            sizes = tuple(count if n else 0 for n in self.sizes)

            def repeating(steps: int) -> Tensor:
                return self._reference.independent(self.fleet.step, self._start, count, steps)

            return self._draw(count, lambda: self._take(repeating(1)[:, 0], sizes), repeating)
        if visible <= count:
            return Batch(self._x[:, :visible], self._slots[:, :visible], tuple(self.sizes))
        return self._draw(
            count,
            lambda: self._draw_distinct(count),
            lambda steps: self._reference.distinct_ahead(
                self.fleet.step, self.fleet.steps, self.sizes, count, steps
            ),
        )

    def _draw_distinct(self, count: int) -> Batch:
        sizes = [max(n, count) for n in self.sizes]  # a row with fewer takes its first places below
        counted = self.fleet.steps if self.fleet.in_step else None
        places = self._reference.distinct(self.fleet.step, counted, sizes, count)
        if min(self.sizes) < count:
            few = torch.tensor([n < count for n in self.sizes], device=places.device)[:, None]
            places = torch.where(few, torch.arange(count, device=places.device), places)
        return self._take(places, tuple(min(n, count) for n in self.sizes))

    def _draw_with_current(self, count: int) -> Batch:
        # How much the current task has stored only the device knows, so the batch has a fixed size:
        # fewer examples are repeated as evenly as can be, of more there are independent draws.
        size = self._start + self._filled
        repeated = torch.arange(count, device=size.device) % size.clamp(min=1)
        drawn = self._reference.independent(self.fleet.step, size, count)[:, 0]
        return self._take(torch.where(size > count, drawn, repeated), None)

    def _take(self, places: Tensor, sizes: tuple[int, ...] | None) -> Batch:
        assert self._x is not None
        x = self._x.flatten(0, 1).index_select(0, self._flat(places))
        return Batch(x.view(*places.shape, *x.shape[1:]), self._slots.gather(1, places), sizes)

    def _flat(self, places: Tensor) -> Tensor:
        """Places `[R, n]` as rows of the memory of all runs: whole examples are copied faster."""
        return (places + self._rows * self._slots.shape[1]).flatten()

    def contents(self, room: bool = False) -> tuple[Batch, Tensor] | None:
        if self._x is None or max(self.sizes) == 0:
            return None
        n = self.tasks * self.budget if room else max(self.sizes)
        behind = torch.arange(n, device=self.fleet.device) >= self._start
        kept = Batch(self._x[:, :n], self._slots[:, :n], tuple(self.sizes))
        return kept, self._task[:, :n].masked_fill(behind, -1)

    # ---- steps that are captured

    def form(self, count: int | None = None) -> Hashable | None:
        if self.include_current:
            return None
        if count is None:
            kept = {n for row in self._counts for n in row}
            return tuple(kept) if len(kept) <= 1 else None
        least, most = min(self.sizes), max(self.sizes)
        if least == most and (least == 0 or (least <= count and not self.with_replacement)):
            return (least,)  # nothing, or all there is
        return () if least >= (1 if self.with_replacement else count) else None

    def _gather(self, places: Tensor, into: Found | None) -> Found:
        assert self._x is not None
        if into is None:
            x = self._x.new_empty(*places.shape, *self._x.shape[2:])
            into = x, self._slots.new_empty(places.shape)
        x, slots = into
        flat = self._flat(places.flatten(1))
        torch.index_select(self._x.flatten(0, 1), 0, flat, out=x.flatten(0, 2))
        torch.gather(self._slots, 1, places.flatten(1), out=slots.flatten(1))
        return into

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        self._store()
        names = SAVED if self._x is None else (*SAVED, "x")
        return {name: getattr(self, f"_{name}") for name in names}

    def counters(self) -> dict[str, int]:
        return {"task": self.task}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        self.begin_task(counters["task"])
        for name, fresh in self.state().items():
            if state[name].shape != fresh.shape or state[name].dtype != fresh.dtype:
                found, expected = tuple(state[name].shape), tuple(fresh.shape)
                raise ValueError(f"the memory's {name} has the shape {found}, not {expected}")
        if "x" in state and state["x"].shape[:2] != self._slots.shape:
            raise ValueError(f"the memory's examples have the shape {tuple(state['x'].shape)}")
        for name, tensor in state.items():
            setattr(self, f"_{name}", tensor.to(self.fleet.device))
        self._count()
