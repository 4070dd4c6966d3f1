"""The episodic memory: real examples of past tasks, a fixed budget a task.

The paper fills the memory of a task by sampling uniformly per class once the task is over. A reservoir a class that is filled while the
examples pass by has the same distribution and needs no second look at the data; its content becomes visible when the task ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError, unknown
from onepass.random_numbers import Purpose, RandomNumbers, SampleCache, uniform_at

Policy = Literal["class-reservoir", "ring", "reservoir"]
Chooser = Callable[[int], Tensor]  # what the next n steps choose, [R, n, …]
AHEAD = 32  # batches that are stored in one go: the small operations cost more than the work


class EpisodicMemory:
    """`budget` examples a task for every run of a fleet, stored as they came, with their slots.

    Policies: `class-reservoir` keeps a uniform sample of each class, `ring` the last examples of each class, `reservoir` a uniform sample of
    the task. A task's classes share its budget evenly. `include_current` makes the current task visible while it is learnt.

    What is kept depends on the order of the examples alone, not on how they are cut into batches, so batches are taken in several at a
    time (they are held until then and must not be written to). A draw is a function of the run's seed and step, so it is repeatable, costs
    no state, and can be made for several steps at once.
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
            raise InputError(
                f"an episodic memory needs room for at least one example a task and one task, got {budget} and {tasks}"
            )
        if policy not in get_args(Policy):
            raise unknown("memory policy", policy, get_args(Policy))
        most = max(len(row) for row in fleet.slots.table)
        if include_current and policy != "reservoir" and budget < most:
            raise InputError(
                f"a memory that shows the current task needs room for one example a class: at least {most} a task, got {budget}"
            )
        self.fleet = fleet
        self.tasks, self.budget = tasks, budget
        self.policy, self.include_current, self.with_replacement = (
            policy,
            include_current,
            with_replacement,
        )
        self.sizes = [0] * fleet.runs  # visible examples of each run, as the host knows them
        self._counts: list[list[int]] = []  # and of each past task and run
        self._x: Tensor | None = (
            None  # [R, T·budget + 1, …]: past tasks, then the current one; the last place takes what is thrown away
        )
        self._slots = torch.zeros(
            fleet.runs, tasks * budget + 1, dtype=torch.int64, device=fleet.device
        )
        self._task = torch.full_like(self._slots, -1)
        self._rows = torch.arange(fleet.runs, device=fleet.device)[:, None]
        self._start = torch.zeros(
            fleet.runs, 1, dtype=torch.int64, device=fleet.device
        )  # where the current task begins
        self._reference = RandomNumbers(fleet.seeds, Purpose.REFERENCE)
        self._waiting: list[tuple[Batch, Tensor]] = []
        self._ahead = SampleCache(self._reference)
        self._asked: Hashable = None  # in the last look-up
        self._chooser: Chooser | None = None  # that it had
        self._found: dict[
            torch.Size, tuple[Tensor, Tensor]
        ] = {}  # places for what steps to come look up, and the ones in use
        self._ready: tuple[Tensor, Tensor] | None = None
        self._turn: int | None = None  # the step of a stretch that is being captured
        self.begin_task(0)

    def begin_task(self, task: int) -> None:
        """Start the reservoirs of a task."""
        self._waiting = []
        self._ahead.forget()
        self.task = task
        classes = self.fleet.slots.table[task] if self.policy != "reservoir" else (0,)
        share, rest = divmod(self.budget, len(classes))
        device = self.fleet.device
        self._quota = torch.tensor([share + (c < rest) for c in range(len(classes))], device=device)
        self._group = torch.zeros(
            self.fleet.slots.count, dtype=torch.int64, device=device
        )  # which reservoir a slot belongs to
        if self.policy != "reservoir":
            self._group[list(classes)] = torch.arange(len(classes), device=device)
        self._random = RandomNumbers(self.fleet.seeds, Purpose.RESERVOIR).key(task)
        self._seen = torch.zeros(self.fleet.runs, len(classes), dtype=torch.int64, device=device)
        self._filled = torch.zeros_like(self._start)
        self._place = torch.zeros(
            self.fleet.runs, len(classes) * (share + 1) + 1, dtype=torch.int64, device=device
        )  # of a reservoir's entries

    def observe(self, batch: Batch) -> None:
        """Offer a batch of the current task, example by example in effect; no question is asked of the device."""
        if self._turn is not None:  # after a replay it is offered what was replayed
            return
        real = self.fleet.active.expand(-1, batch.slots.shape[1])
        if batch.sizes is None:
            real = real.clone()
        else:
            places = torch.arange(batch.slots.shape[1], device=real.device)
            real = real & (places < torch.tensor(batch.sizes, device=real.device)[:, None])
        self._waiting.append((batch, real))
        if self.include_current or len(self._waiting) == AHEAD:
            self._store()

    def _store(self) -> None:
        """Take in the batches that wait."""
        if not self._waiting:
            return
        batches, masks = zip(*self._waiting, strict=True)
        self._waiting = []
        x, slots, real = (
            torch.cat([b.x for b in batches], 1),
            torch.cat([b.slots for b in batches], 1),
            torch.cat(masks, 1),
        )
        trash, count = self.tasks * self.budget, x.shape[1]
        if self._x is None:
            self._x = x.new_zeros(self.fleet.runs, trash + 1, *x.shape[2:])
        group = self._group[slots]
        mine = (group[..., None] == torch.arange(len(self._quota), device=x.device)) & real[
            ..., None
        ]  # [R, B, reservoirs]
        order = (self._seen[:, None] + mine.cumsum(1)).gather(2, group[..., None])[
            ..., 0
        ] - 1  # the how-manieth of its reservoir, from 0
        quota = self._quota[group]
        fresh = real & (order < quota)
        if self.policy == "ring":
            entry = order % quota.clamp(min=1)
        else:
            # Algorithm R: example n (from 0) takes a uniform place among n + 1, and stays if that is one of the reservoir's. The draw
            # belongs to the example's number in the task, so it does not depend on batches.
            number = self._seen.sum(1, keepdim=True) + real.cumsum(1) - 1
            entry = (uniform_at(self._random, number) * (order + 1)).long()
        kept = real & (fresh | (entry < quota)) & (quota > 0)
        entry = torch.where(fresh, order, entry)
        address = group * ((self._place.shape[1] - 1) // len(self._quota)) + entry
        place = self._start + self._filled + fresh.cumsum(1) - 1
        nowhere = self._place.shape[1] - 1
        self._place.scatter_(1, torch.where(fresh, address, nowhere), place)
        target = torch.where(
            kept, self._place.gather(1, torch.where(kept, address, nowhere)), trash
        )
        # Of several examples for one place the last one stays.
        turn = torch.arange(count, device=x.device).expand_as(target)
        last = torch.full_like(self._slots, -1).scatter_reduce(1, target, turn, "amax")
        target = torch.where(last.gather(1, target) == turn, target, trash)
        self._x.flatten(0, 1).index_copy_(0, self._flat(target), x.flatten(0, 1))
        self._slots.scatter_(1, target, slots)
        self._task.scatter_(1, target, self.task)
        self._seen += mine.sum(1)
        self._filled += fresh.sum(1, keepdim=True)

    def end_task(self) -> None:
        """Make the task visible. Asks the device how much there is, so that reference batches have a known size."""
        self._store()
        self._ahead.forget()
        self._start += self._filled
        self._filled = torch.zeros_like(self._start)
        self._count()

    def _count(self) -> None:
        """Let the host know how much of each task is visible. Tasks lie one behind the other."""
        visible = torch.arange(self._task.shape[1], device=self.fleet.device) < self._start
        owner = torch.where(visible, self._task, -1)
        lost = self.fleet.diverged()
        self._counts = []
        for task in range(self.task + 1):
            counts = [int(n) for n in (owner == task).sum(1).tolist()]
            # A run that has diverged keeps nothing any more, and whatever it computes is thrown away: as if it had as much as the others, so
            # that batches stay of one size.
            self._counts.append([max(counts) if lost[r] else n for r, n in enumerate(counts)])
        self.sizes = [sum(row) for row in zip(*self._counts, strict=True)]

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that is kept of one past task a run: `tasks[r]` in row `r`."""
        assert self._x is not None
        counts = [self._counts[task][r] for r, task in enumerate(tasks)]
        starts = [
            sum(self._counts[earlier][r] for earlier in range(task)) for r, task in enumerate(tasks)
        ]
        width = max(counts)
        if len(set(starts)) == 1:
            piece = slice(starts[0], starts[0] + width)
            return Batch(self._x[:, piece], self._slots[:, piece], tuple(counts))
        index = (
            torch.tensor(starts)[:, None]
            + torch.arange(width) % torch.tensor(counts).clamp(min=1)[:, None]
        )
        return self._take(index.to(self.fleet.device, non_blocking=True), tuple(counts))

    def of_chosen(self, choose: Chooser) -> Batch:
        """`of` the tasks that `choose(1)` names, `[R, 1]`; `choose(n)` names those of the next n steps, this one included."""
        return self._look_up(
            "task",
            lambda: self.of(choose(1)[:, 0].tolist()),
            lambda steps: self._places(choose(steps)),
        )

    def _places(self, chosen: Tensor) -> Tensor:
        """Where that lies which is kept of the tasks chosen for each run and step, as much of every task: `[R, steps, n]`."""
        size = self._counts[0][0]
        index = size * chosen[..., None] + torch.arange(size)
        return (
            index.pin_memory().to(self.fleet.device, non_blocking=True)
            if self.fleet.device.type == "cuda"
            else index
        )

    def drawn(self, count: int) -> int:
        """How many examples `draw(count)` has at most."""
        repeats = self.with_replacement or self.include_current
        return count if repeats else min(count, self.tasks * self.budget)

    def draw(self, count: int) -> Batch | None:
        """A reference batch: `count` visible examples, uniform without replacement, or all of them while they are fewer; None of nothing."""
        if self._x is None:
            return None
        if self.include_current:
            return self._draw_with_current(count)
        if max(self.sizes) == 0:
            return None
        if self.with_replacement:
            return self._look_up(
                count,
                lambda: self._repeating(count),
                lambda steps: self._repeating_ahead(count, steps),
            )
        if max(self.sizes) <= count:
            return Batch(
                self._x[:, : max(self.sizes)], self._slots[:, : max(self.sizes)], tuple(self.sizes)
            )
        return self._look_up(
            count, lambda: self._drawn(count), lambda steps: self._choose_ahead(count, steps)
        )

    def _repeating(self, count: int) -> Batch:
        return self._take(
            self._repeating_ahead(count, 1)[:, 0], tuple(count if n else 0 for n in self.sizes)
        )

    def _repeating_ahead(self, count: int, steps: int) -> Tensor:
        at = (self.fleet.step[:, None] + torch.arange(steps, device=self.fleet.device)).flatten()
        uniform = (
            self._reference.spread(steps).uniform(at, count).view(self.fleet.runs, steps, count)
        )
        return (uniform * self._start[..., None]).long()

    def _drawn(self, count: int) -> Batch:
        population = [
            max(n, count) for n in self.sizes
        ]  # a row with fewer takes its first places below
        index = self._choose(population, count)
        if min(self.sizes) < count:
            few = torch.tensor([n < count for n in self.sizes], device=index.device)[:, None]
            index = torch.where(few, torch.arange(count, device=index.device), index)
        return self._take(index, tuple(min(n, count) for n in self.sizes))

    def _choose(self, population: list[int], count: int) -> Tensor:
        """This step's choice; inside a task the runs that are active all take the same steps, so it can be made ahead of time."""
        if not self.fleet.in_step:
            return self._reference.sample(self.fleet.step, population, count)
        return self._ahead.sample(self.fleet.step, self.fleet.steps, population, count)

    def _choose_ahead(self, count: int, steps: int) -> Tensor:
        """The choices of the next steps, `[R, steps, count]`."""
        return self._ahead.samples(self.fleet.step, self.fleet.steps, self.sizes, count, steps)

    # ---- steps that are captured and replayed

    def form(self, count: int | None = None) -> Hashable | None:
        """What `draw(count)` does differently from another one, or `of_chosen`; None if runs or steps differ from each other."""
        if self.include_current:
            return None
        if count is None:
            kept = {n for row in self._counts for n in row}
            return tuple(kept) if len(kept) <= 1 else None
        least, most = min(self.sizes), max(self.sizes)
        if least == most and (least == 0 or (least <= count and not self.with_replacement)):
            return (least,)  # nothing, or all there is
        return () if least >= (1 if self.with_replacement else count) else None

    def _look_up(self, asked: Hashable, now: Callable[[], Batch], ahead: Chooser) -> Batch:
        """A batch for this step: by `now`, or as `ahead` has chosen it for steps that are captured. `asked` tells what from what."""
        if self._turn is None:
            self._asked, self._chooser = asked, ahead
            return now()
        if self._ready is None or asked != self._asked:
            raise RuntimeError(
                "a step asks the episodic memory for something else than the one before"
            )
        x, slots = self._ready
        return Batch(x[:, self._turn], slots[:, self._turn])

    def look_ahead(self, steps: int) -> None:
        """Look up what the next steps will ask for, if they ask as the last one did, and put it where a captured step finds it."""
        if self._chooser is None:
            return
        index = self._chooser(steps)
        assert self._x is not None
        if index.shape not in self._found:
            self._found[index.shape] = (
                self._x.new_empty(*index.shape, *self._x.shape[2:]),
                self._slots.new_empty(index.shape),
            )
        self._ready = x, slots = self._found[index.shape]
        torch.index_select(
            self._x.flatten(0, 1), 0, self._flat(index.flatten(1)), out=x.flatten(0, 2)
        )
        torch.gather(self._slots, 1, index.flatten(1), out=slots.flatten(1))

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, look-ups give what `look_ahead` has put there for the step that `turn` names, and nothing is observed."""
        self._turn = 0
        try:
            yield
        finally:
            self._turn = None

    def turn(self, step: int) -> None:
        """The next step of a stretch that is captured is number `step`."""
        self._turn = step

    def _draw_with_current(self, count: int) -> Batch:
        # How many examples the current task has stored only the device knows, so the batch has a fixed size: while there are fewer, they
        # are repeated as evenly as can be; beyond that, independent draws.
        size = self._start + self._filled
        turn = torch.arange(count, device=size.device)
        return self._take(
            torch.where(size > count, self._independent(size, count), turn % size.clamp(min=1)),
            None,
        )

    def _independent(self, size: Tensor, count: int) -> Tensor:
        return (self._reference.uniform(self.fleet.step, count) * size).long()

    def _take(self, index: Tensor, sizes: tuple[int, ...] | None) -> Batch:
        assert self._x is not None
        x = self._x.flatten(0, 1).index_select(0, self._flat(index))
        return Batch(x.view(*index.shape, *x.shape[1:]), self._slots.gather(1, index), sizes)

    def _flat(self, place: Tensor) -> Tensor:
        """Places `[R, n]` as rows of the memory of all runs: whole examples are copied, which is far faster than element by element."""
        return (place + self._rows * self._slots.shape[1]).flatten()

    def contents(self, room: bool = False) -> tuple[Batch, Tensor] | None:
        """All visible examples and the task of each, `[R, n]` (−1 behind a row's end); with `room`, `n` is what there is room for."""
        if self._x is None or max(self.sizes) == 0:
            return None
        n = self.tasks * self.budget if room else max(self.sizes)
        behind = torch.arange(n, device=self.fleet.device) >= self._start
        return Batch(self._x[:, :n], self._slots[:, :n], tuple(self.sizes)), self._task[
            :, :n
        ].masked_fill(behind, -1)

    def state(self) -> dict[str, Tensor]:
        """The examples and everything that decides which ones come next."""
        self._store()
        tensors = {
            "slots": self._slots,
            "task": self._task,
            "start": self._start,
            "seen": self._seen,
            "filled": self._filled,
            "place": self._place,
        }
        return tensors if self._x is None else tensors | {"x": self._x}

    def restore(self, state: Mapping[str, Tensor], task: int) -> None:
        """Go on from a saved `state()`, in the middle of `task` or at its end."""
        self.begin_task(task)
        for name, fresh in self.state().items():
            if state[name].shape != fresh.shape or state[name].dtype != fresh.dtype:
                raise ValueError(
                    f"the memory's {name} has the shape {tuple(state[name].shape)}, not {tuple(fresh.shape)}"
                )
        if "x" in state and state["x"].shape[:2] != self._slots.shape:
            raise ValueError(f"the memory's examples have the shape {tuple(state['x'].shape)}")
        for name, tensor in state.items():
            setattr(self, f"_{name}", tensor.to(self.fleet.device))
        self._count()
