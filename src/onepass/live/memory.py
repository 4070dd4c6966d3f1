"""The episodic memory of a stream that keeps coming: how many tasks, classes and examples there will be, nobody knows.

The host decides what is kept, example by example, with draws that are functions of the seed and of the example's number; where the examples
lie is the business of `storage`.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.module_fleet import ModuleFleet
from onepass.errors import InputError
from onepass.live.plan import Memory, Policy, Where
from onepass.live.repeats import Repeats
from onepass.live.storage import Storage, batch_of, columns_of
from onepass.random_numbers import Purpose, RandomNumbers, SampleCache, bits_at, uniform_at

__all__ = ["LiveMemory", "Memory", "Policy", "Where"]

INDEX = 256  # bytes per example, at least, that are set aside for the lists below
ROW, GROUP = 136, 336  # bytes that they take at most, per example and per group
TASK_FREE = 1000  # examples, unless something is said
SHIFT = 32  # bits for the number of a row
DRAWN = 512  # random numbers that are made in one go
ASIDE = 0.2  # of the examples may be held out for measuring
Group = tuple[int, int]  # a task and a class of it; held out, if that number is negative


class Numbers:
    """Uniform numbers of a task, functions of the seed, the purpose and the example's number."""

    def __init__(self, seed: int, purpose: Purpose, task: int) -> None:
        self._key, self._first, self._made = (
            RandomNumbers([seed], purpose).key(task),
            -1,
            array("d"),
        )

    def __getitem__(self, number: int) -> float:
        place = number % DRAWN
        if self._first != number - place:
            self._first = number - place
            self._made = array(
                "d",
                uniform_at(self._key, torch.arange(self._first, self._first + DRAWN)[None])[
                    0
                ].tolist(),
            )
        return self._made[place]


def even_shares(classes: Sequence[int], rows: int) -> list[list[int]]:
    """Each class with its share of the rows; the first ones have what is left over.

    >>> even_shares((4, 7, 9), 11)
    [[4, 4], [7, 4], [9, 3]]
    """
    share, rest = divmod(rows, max(len(classes), 1))
    return [[label, share + (place < rest)] for place, label in enumerate(classes)]


class LiveMemory:
    """The memory of one run, with the interface of `EpisodicMemory`. `classes()` tells which classes the current task can have.

    A batch that a learner shows with `observe` is kept only once `commit` says that its step was taken.
    """

    def __init__(
        self,
        fleet: ModuleFleet,
        plan: Memory,
        policy: Policy,
        task_free: bool,
        classes: Callable[[], Sequence[int]],
    ) -> None:
        self.fleet, self.plan, self.policy, self.task_free, self._classes = (
            fleet,
            plan,
            policy,
            task_free,
            classes,
        )
        self.budget = self.tasks = 1  # what a benchmark would know; here nobody does
        self.storage: Storage | None = None
        self.task = 0
        self._used = 0  # rows that hold an example
        self._members: dict[Group, list[int]] = {}  # rows of each group
        self._group: list[Group] = []  # of each row
        self._arrived = array("q")  # the step at which the example of each row came
        self._seen: Counter[Group] = Counter()  # examples of each group that passed by
        self._visible: list[int] = []  # rows that may be drawn
        self._position = array("q")  # of each row, where it is in that list, or -1
        self._fresh: dict[
            int, None
        ] = {}  # rows of the current task, which may not, in the order in which they were filled
        self._coming: deque[int] = deque()  # step and row, in one number, of what is too recent
        self._number = 0  # examples of the current task, or of the stream
        self._pending: Batch | None = None
        self._copy: dict[str, Tensor] = {}  # of the batch that is being learnt
        self._rows: Tensor | None = None  # `_visible` as a tensor
        self._in_order = False  # is it 0, 1, 2, …?
        self._ahead = SampleCache(RandomNumbers([fleet.seed], Purpose.REFERENCE))
        self._sharing: Sequence[int] = ()  # the classes that the room of a task is shared by
        self._most: int | None = None  # rows at most, if there is a limit,
        self._spare = 0  # and bytes for what is noted of them
        self._limit: int | None = None  # rows at most while there are as many groups as now
        self._repeats = Repeats()
        self._reserves = True  # is all the room up to the limit taken at once?
        self.begin_task(0)

    # ---- what learners call

    def begin_task(self, task: int) -> None:
        self.task = task
        self._number = 0
        self._random = Numbers(self.fleet.seed, Purpose.RESERVOIR, task)
        self._coin = Numbers(self.fleet.seed, Purpose.HELD_OUT, task)
        if self.policy in ("class-reservoir", "ring"):
            self._sharing = self._classes()

    def observe(self, batch: Batch) -> None:
        self._pending = batch

    def end_task(self) -> None:
        """Make the task visible."""
        for row in self._fresh:
            if self._group[row][1] >= 0:
                self._show(row)
        self._fresh = {}
        self._forget_empty()
        self._fit()

    def draw(self, count: int) -> Batch | None:
        """A reference batch: `count` visible examples, uniform without replacement, or all of them while they are fewer; None of nothing."""
        n = len(self._visible)
        if n < self.fleet.least:
            return None
        rows = self._visible_rows()
        if n > count:
            rows = rows[
                self._ahead.sample(torch.tensor([self.fleet.steps]), self.fleet.steps, [n], count)[
                    0
                ]
            ]
        elif (
            self._in_order and self.fleet.is_traceable()
        ):  # nothing has to be gathered, and nobody writes into it
            assert self.storage is not None
            return batch_of(self.storage.first(n, self.fleet.device))
        return self.take(rows)

    def drawn(self, count: int) -> int:
        return count

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that may be rehearsed of one past task."""
        rows = sorted(
            row
            for group, members in self._members.items()
            if group[0] == tasks[0] and group[1] >= 0
            for row in members
        )
        if not rows:
            raise InputError(
                "the memory has no room for an example of every task: give it more bytes or examples"
            )
        return self.take(torch.tensor(rows))

    def of_chosen(self, choose: Callable[[int], Tensor]) -> Batch:
        return self.of(choose(1)[:, 0].tolist())

    # ---- what the wrapper calls

    def prepare(self, batch: Batch) -> None:
        """Make room for a batch before its step is taken: if there is none, this is the time to say so."""
        self._copy = {
            name: tensor.clone() for name, tensor in columns_of(batch).items()
        }  # a module may write into its inputs
        if self.storage is None:
            self._open(self._copy)
            assert self.storage is not None
        self.storage.check_process()
        needed = min(self._used + batch.slots.shape[1], self._most or math.inf)
        if needed > self.storage.rows:
            ahead = self.plan.per_task if self._reserves else min(self.plan.per_task, needed)
            self.storage.reserve(int(min(needed + ahead, self._most or math.inf)))

    def commit(self, labels: Sequence[int]) -> None:
        """The step was taken: offer the batch that the learner showed, example by example."""
        batch, self._pending = self._pending, None
        if batch is None:
            return
        written: dict[int, int] = {}
        for place, label in enumerate(labels):
            row = self._place(self._group_of_next(label), self._random[self._number])
            self._number += 1
            if row is not None:
                written[row] = place  # of several examples for one row the last one stays
        if written:
            assert self.storage is not None
            self.storage.write(list(written), self._copy, list(written.values()))
            self._repeats.note(self._copy, list(written.values()))
        if self.task_free:
            self._let_ripen()
        self._fit()

    def tell(self) -> None:
        """Log what the user should know of the examples."""
        self._repeats.tell()

    def discard(self) -> None:
        """The step is over."""
        self._pending, self._copy = None, {}

    def take(self, rows: Tensor) -> Batch:
        assert self.storage is not None
        return batch_of(self.storage.take(rows, self.fleet.device))

    @property
    def size(self) -> int:
        return self._used

    @property
    def visible(self) -> int:
        """How many examples may be drawn."""
        return len(self._visible)

    @property
    def nbytes(self) -> int:
        """Everything it holds."""
        noted = max(INDEX * self._used, ROW * self._used + GROUP * len(self._members))
        return (self.storage.nbytes if self.storage else 0) + noted

    def counts(self) -> dict[int, int]:
        """Examples of every task; of every class, where there are no tasks."""
        found = Counter(self._keys(list(range(self._used))))
        return dict(sorted(found.items()))

    def groups(self) -> dict[int, list[int]]:
        """The rows on which every past task is measured, or every class, where there are no tasks.

        Those held out, if any are to be, else those that are rehearsed.
        """
        found: dict[int, list[int]] = {}
        rows = sorted(self._held_out() if self.plan.held_out else self._visible)
        for row, key in zip(rows, self._keys(rows), strict=True):
            found.setdefault(key, []).append(row)
        return found

    def _held_out(self) -> list[int]:
        """Rows for measuring only, of past tasks or older than `recent` batches."""
        rows = [row for group, members in self._members.items() if group[1] < 0 for row in members]
        if self.task_free:
            return [
                row for row in rows if self._arrived[row] <= self.fleet.steps - self.plan.recent
            ]
        return [row for row in rows if row not in self._fresh]

    def _keys(self, rows: list[int]) -> list[int]:
        """The task of some rows, or their class, where there are no tasks."""
        if not self.task_free or self.storage is None:
            return [self._group[row][0] for row in rows]
        slots = self.storage.columns["slots"]
        labels: list[int] = slots[
            torch.tensor(rows, dtype=torch.int64, device=slots.device)
        ].tolist()
        return labels

    def marked(self) -> dict[str, Any]:
        """All that it knows, to go back to before anything is committed."""
        lists = {"_members": {group: list(rows) for group, rows in self._members.items()}}
        return {
            name: copy.copy(value) if name.startswith("_") else value
            for name, value in vars(self).items()
        } | lists

    # ---- which example stays

    def _open(self, values: Mapping[str, Tensor]) -> None:
        example = sum(
            tensor.dtype.itemsize * tensor.shape[1:].numel() for tensor in values.values()
        )
        each = INDEX + example
        limits = [
            n
            for n in (self.plan.examples, self.plan.bytes // each if self.plan.bytes else None)
            if n is not None
        ]
        if not limits and self.task_free:
            limits = [TASK_FREE]
        self._limit = self._most = min(limits) if limits else None
        if self._most is not None:
            self._spare = (
                self.plan.bytes - self._most * example
                if self.plan.bytes
                else (ROW + 2 * GROUP) * self._most
            )
        if self._limit == 0:
            raise InputError(
                f"{self.plan.bytes} bytes are too few for a memory: one example needs {each}"
            )
        device = self.fleet.device if self.plan.where == "module" else torch.device("cpu")
        self.storage = Storage(
            values,
            device,
            Path(self.plan.folder) if self.plan.folder is not None else None,
            self._limit if self._reserves else None,
        )

    def _group_of_next(self, label: int) -> Group:
        """Where the next example belongs.

        A coin of its own decides whether it may be held out, so that these and the others are uniform
        samples both. The first one is not, so that each task has one to rehearse.
        """
        if self.plan.held_out and self._number and self._coin[self._number] < ASIDE:
            return self.task, ~label if self.task_free else -1
        return self.task, 0 if self.policy == "reservoir" else label

    def _place(self, group: Group, uniform: float) -> int | None:
        """The row that the next example of a group takes, if any; `uniform` is uniform on [0, 1) and decides one thing."""
        self._seen[group] += 1
        members, seen = self._members.setdefault(group, []), self._seen[group]
        if group[1] < 0:
            return (
                self._new(group, uniform)
                if seen <= self.plan.held_out
                else self._replace(group, int(uniform * seen))
            )
        if self.policy == "class-balanced":
            room = self._limit if self.task_free else self.plan.per_task
            mine = (
                self._used
                if self.task_free
                else len(self._fresh) - len(self._members.get((self.task, -1), ()))
            )
            if room is None or mine < room:
                return self._new(group, uniform)
            if seen - 1 > len(members):
                return self._replace(group, int(uniform * seen))
            # What is held out has no part in the share of a task.
            return self._make_room(
                self._largest(group[0], among_held_out=self.task_free), group, uniform
            )
        quota = (
            self._share(group[1])
            if self.policy != "reservoir"
            else (self._limit if self.task_free else None) or self.plan.per_task
        )
        if seen <= quota:
            return self._new(group, uniform)
        if quota == 0:
            return None
        return self._replace(group, int(uniform * seen))

    def _share(self, label: int) -> int:
        """The rows of one of the classes that share the room of a task. They are not noted: there may be many more classes than rows."""
        if label not in self._sharing:
            return 0
        share, rest = divmod(self.plan.per_task, len(self._sharing))
        return share + (self._sharing.index(label) < rest)

    def _new(self, group: Group, uniform: float) -> int | None:
        """A row of its own: an empty one, or that of a member of the largest group of the task that has most."""
        if self._limit is None or self._used < self._limit:
            row, self._used = self._used, self._used + 1
            self._group.append(group)
            self._arrived.append(self.fleet.steps)
            self._position.append(-1)
            self._enter(row, group)
            return row
        return self._make_room(self._largest(self._fullest()), group, uniform)

    def _fullest(self) -> int:
        """The task that has most."""
        totals = Counter({self.task: 0})
        for (task, _), rows in self._members.items():
            totals[task] += len(rows)
        return max(totals, key=lambda task: (totals[task], task == self.task))

    def _largest(self, task: int, among_held_out: bool = True) -> Group:
        groups = (
            group
            for group in self._members
            if group[0] == task and (among_held_out or group[1] >= 0)
        )
        return max(groups, key=lambda group: (len(self._members[group]), group[1] < 0))

    def _make_room(self, largest: Group, group: Group, uniform: float) -> int | None:
        """A member of the largest group goes, unless the example's own group has had to give examples away, or would have to now."""
        members, seen = self._members[group], self._seen[group]
        if seen - 1 > len(members) or (
            largest[0] == group[0] and len(members) >= len(self._members[largest])
        ):
            return self._replace(group, int(uniform * seen))
        row = self._give_way(largest, uniform)
        self._group[row] = group
        self._enter(row, group)
        return row

    def _replace(self, group: Group, entry: int) -> int | None:
        """Algorithm R: example n takes a uniform place among n, and stays if that is one of the members'. In a ring the oldest one goes."""
        members, ring = self._members[group], self._is_ring(group)
        if entry >= len(members) and not (members and ring):
            return None
        row = members[entry] if not ring else members.pop(0)
        if ring:
            members.append(row)
        if self.task_free and group[1] >= 0:
            self._hide(row)
            self._ripens(row)
        self._arrived[row] = self.fleet.steps
        return row

    def _is_ring(self, group: Group) -> bool:
        return self.policy == "ring" and group[1] >= 0

    def _give_way(self, group: Group, uniform: float) -> int:
        """The row of a uniform member that leaves its group; of the oldest one of a ring."""
        members = self._members[group]
        row = members.pop(int(uniform * len(members)) if not self._is_ring(group) else 0)
        if not members and group[0] != self.task:
            del self._members[group], self._seen[group]
        self._hide(row)
        self._fresh.pop(row, None)
        return row

    def _enter(self, row: int, group: Group) -> None:
        self._arrived[row] = self.fleet.steps
        members = self._members[group]
        if members:
            self._group[row] = self._group[members[0]]  # one object for all of them
        members.append(row)
        if not self.task_free:
            self._fresh[row] = None
        elif group[1] >= 0:
            self._ripens(row)

    # ---- how many groups there may be

    def _fit(self) -> None:
        """Where too many groups leave too little room for examples, members of the largest go.

        Before that, empty groups are forgotten: their classes count as new when they come again.
        """
        if self._most is None:
            return
        while (allowed := self._allowed()) < max(self._used, min(self._most, len(self._members))):
            if not all(self._members.values()):
                self._forget_empty()
                continue
            if self._used <= allowed:
                break
            bits = bits_at(self.fleet.seed, Purpose.ROOM, self.fleet.steps, self._used)
            self._drop(
                self._give_way(self._largest(self._fullest()), (bits % 2**64 >> 11) * 2.0**-53)
            )
        self._limit = allowed
        if (
            len(self._coming) > self._used + self._used // 2 + 64
        ):  # some have another example by now
            self._coming = deque(
                dict.fromkeys(
                    one for one in self._coming if self._arrived[one % 2**SHIFT] == one >> SHIFT
                )
            )

    def _forget_empty(self) -> None:
        self._members = {group: rows for group, rows in self._members.items() if rows}
        self._seen = Counter({group: self._seen[group] for group in self._members})

    def _allowed(self) -> int:
        """How many rows there may be, beside as many groups as there are."""
        assert self._most is not None
        return max(1, min(self._most, (self._spare - GROUP * len(self._members)) // ROW))

    def _drop(self, row: int) -> None:
        """A row that has left its group goes: the last one takes its place."""
        last = self._used = self._used - 1
        left = (one for one in self._coming if one % 2**SHIFT != row)
        self._coming = deque(one - last + row if one % 2**SHIFT == last else one for one in left)
        if row != last:
            assert self.storage is not None
            self.storage.move(last, row)
            members = self._members[self._group[last]]
            members[members.index(last)] = row
            self._group[row], self._arrived[row], self._position[row] = (
                self._group[last],
                self._arrived[last],
                self._position[last],
            )
            if self._position[row] >= 0:
                self._visible[self._position[row]] = row
            if last in self._fresh:
                self._fresh = {row if other == last else other: None for other in self._fresh}
        self._group.pop()
        self._arrived.pop()
        self._position.pop()
        self._rows = None

    # ---- what may be drawn

    def _ripens(self, row: int) -> None:
        self._coming.append(self.fleet.steps << SHIFT | row)

    def _let_ripen(self) -> None:
        while self._coming and self._coming[0] >> SHIFT <= self.fleet.steps - self.plan.recent:
            step, row = divmod(self._coming.popleft(), 2**SHIFT)
            if (
                self._arrived[row] == step and self._position[row] < 0 and self._group[row][1] >= 0
            ):  # else another example lies there by now
                self._show(row)

    def _show(self, row: int) -> None:
        self._position[row] = len(self._visible)
        self._visible.append(row)
        self._rows = None

    def _hide(self, row: int) -> None:
        place = self._position[row]
        if place < 0:
            return
        self._position[row] = -1
        last = self._visible.pop()
        if last != row:
            self._visible[place] = last
            self._position[last] = place
        self._rows = None

    def _visible_rows(self) -> Tensor:
        if self._rows is None:
            self._rows = torch.tensor(self._visible)
            self._in_order = torch.equal(self._rows, torch.arange(len(self._visible)))
        return self._rows

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        """The examples and everything that decides which ones come next."""
        if self.storage is None:
            return {}
        columns = {
            f"examples.{name}": column[: self._used]
            for name, column in self.storage.columns.items()
        }
        members = [row for rows in self._members.values() for row in rows]
        lists = {
            "members": members,
            "arrived": list(self._arrived),
            "visible": self._visible,
            "fresh": list(self._fresh),
        }
        pairs = {
            "coming": torch.tensor(
                [divmod(one, 2**SHIFT) for one in self._coming], dtype=torch.int64
            ).view(-1, 2)
        }
        return (
            columns
            | pairs
            | {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()}
        )

    def counters(self) -> dict[str, Any]:
        groups = [[*group, len(rows), self._seen[group]] for group, rows in self._members.items()]
        shares = even_shares(self._sharing, self.plan.per_task)
        return {"task": self.task, "number": self._number, "groups": groups, "quota": shares}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Go on from a saved `state()` and `counters()`. Room comes with examples: a limit that a file names reserves nothing."""
        self._reserves = False
        self.begin_task(counters["task"])
        sharing = tuple(int(label) for label, _ in counters["quota"])
        self._number, self._sharing = (
            counters["number"],
            range(len(sharing)) if sharing == tuple(range(len(sharing))) else sharing,
        )
        if not state:
            return
        columns = {
            name.removeprefix("examples."): state[name]
            for name in sorted(state)
            if name.startswith("examples.")
        }
        self._used = len(columns["slots"])
        self._open(columns)
        assert self.storage is not None
        self.storage.reserve(self._used)
        if self._used:
            self.storage.write(list(range(self._used)), columns, list(range(self._used)))
        members = state["members"].tolist()
        self._members, self._seen, self._group = {}, Counter(), [(0, 0)] * self._used
        for task, label, count, seen in counters["groups"]:
            group: Group = task, label  # one object for all of them
            self._members[group], members = members[:count], members[count:]
            self._seen[group] = seen
            for row in self._members[group]:
                self._group[row] = group
        self._arrived, self._position = (
            array("q", state["arrived"].tolist()),
            array("q", [-1] * self._used),
        )
        self._visible, self._fresh, self._rows = [], dict.fromkeys(state["fresh"].tolist()), None
        for row in state["visible"].tolist():
            self._show(row)
        self._coming = deque(
            int(step) << SHIFT | int(row) for step, row in state["coming"].tolist()
        )
        self._limit = None if self._most is None else self._allowed()
        if self._used:
            self._repeats.remember(columns, self._used)
