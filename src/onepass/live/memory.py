"""The episodic memory of a stream that keeps coming: how many tasks, classes and examples there will be, nobody knows.

The host decides what is kept, example by example, with draws that are functions of the seed and of the example's number; where the examples
lie is the business of `storage`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from onepass.draws import Ahead, Purpose, Source, uniform_at
from onepass.engine.bound import Bound
from onepass.errors import InputError, unknown
from onepass.live.storage import Storage, batch_of, columns_of
from onepass.streams.batch import Batch

Policy = Literal["class-balanced", "class-reservoir", "ring", "reservoir"]
Where = Literal["module", "cpu", "disk"]
INDEX = 256  # bytes an example, at most, that the lists below take beside the example itself
TASK_FREE = 1000  # examples, unless something is said
DRAWN = 512  # random numbers that are made in one go
Group = tuple[int, int]  # a task and a class of it


@dataclass(frozen=True)
class Memory:
    """How much of the past is kept, and where.

    `per_task` examples of each task, and at most `examples` and `bytes` in all: both are hard limits, and `bytes` counts everything that the
    memory holds. When they are reached, the largest group gives way, so tasks and classes stay level. Without task boundaries `per_task`
    means nothing, there are 1000 `examples` unless said otherwise, and the reference is drawn from those that are older than `recent`
    batches.

    `policy`: "class-balanced" shares the room evenly by the classes seen so far, with a uniform sample of each (class-balancing reservoir
    sampling: Chrysakis, Moens: Online continual learning from imbalanced data, ICML 2020). "reservoir" is a uniform sample of the task or
    stream. "class-reservoir" and "ring" give each of the classes that a task can have a fixed share from the start, filled by a uniform
    sample or by the last examples of the class: the policies of the benchmark. By default "class-balanced", and "reservoir" for a loss of
    one's own. `where`: on the device of the "module", on the "cpu", or on "disk" in `folder`.
    """

    per_task: int = 250
    examples: int | None = None
    bytes: int | None = None
    policy: Policy | None = None
    where: Where = "module"
    folder: str | Path | None = None
    recent: int = 50

    def __post_init__(self) -> None:
        for name in ("per_task", "examples", "bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"the memory's {name} must be a whole number above 0, got {value!r}")
        if not isinstance(self.recent, int) or self.recent < 0:
            raise InputError(f"the memory's recent must be a whole number of batches, got {self.recent!r}")
        if self.policy is not None and self.policy not in get_args(Policy):
            raise unknown("memory policy", str(self.policy), get_args(Policy))
        if self.where not in get_args(Where):
            raise unknown("place for the memory", str(self.where), get_args(Where))
        if (self.where == "disk") != (self.folder is not None):
            raise InputError("a memory on disk needs a folder, and only that one does: give where='disk' and folder='…' together")


class LiveMemory:
    """The memory of one run, with the interface of `EpisodicMemory`. `classes()` tells which classes the current task can have.

    A batch that a learner shows with `observe` is kept only once `commit` says that its step was taken.
    """

    def __init__(self, fleet: Bound, plan: Memory, policy: Policy, task_free: bool, classes: Callable[[], Sequence[int]]) -> None:
        self.fleet, self.plan, self.policy, self.task_free, self._classes = fleet, plan, policy, task_free, classes
        self.budget = self.tasks = 1  # what a benchmark would know; here nobody does
        self.storage: Storage | None = None
        self.task = 0
        self._used = 0  # rows that hold an example
        self._members: dict[Group, list[int]] = {}  # rows of each group
        self._group: list[Group] = []  # of each row
        self._arrived: list[int] = []  # the step at which the example of each row came
        self._seen: Counter[Group] = Counter()  # examples of each group that passed by
        self._visible: list[int] = []  # rows that may be drawn
        self._position: dict[int, int] = {}  # and where they are in that list
        self._fresh: dict[int, None] = {}  # rows of the current task, which may not, in the order in which they were filled
        self._coming: deque[tuple[int, int]] = deque()  # without tasks: (step, row) of what is too recent
        self._number = 0  # examples of the current task, or of the stream
        self._pending: Batch | None = None
        self._copy: dict[str, Tensor] = {}  # of the batch that is being learnt
        self._rows: Tensor | None = None  # `_visible` as a tensor
        self._in_order = False  # is it 0, 1, 2, …?
        self._ahead = Ahead(Source([fleet.seed], Purpose.REFERENCE))
        self._quota: dict[int, int] = {}
        self._lucks: list[float] = []
        self._limit: int | None = None
        self._reserves = True  # is room taken ahead, up to the limit? What a file says reserves nothing
        self.begin_task(0)

    # ---- what learners call

    def begin_task(self, task: int) -> None:
        self.task = task
        self._number = 0
        self._luck, self._lucks = Source([self.fleet.seed], Purpose.RESERVOIR).key(task), []
        if self.policy in ("class-reservoir", "ring"):
            classes = self._classes()
            share, rest = divmod(self.plan.per_task, len(classes))
            self._quota = {c: share + (i < rest) for i, c in enumerate(classes)}

    def observe(self, batch: Batch) -> None:
        self._pending = batch

    def end_task(self) -> None:
        """Make the task visible."""
        for row in self._fresh:
            self._show(row)
        self._fresh = {}
        self._members = {group: rows for group, rows in self._members.items() if rows}
        self._seen = Counter({group: self._seen[group] for group in self._members})

    def draw(self, count: int) -> Batch | None:
        """A reference batch: `count` visible examples, uniform without replacement, or all of them while they are fewer; None of nothing."""
        n = len(self._visible)
        if n < self.fleet.least:
            return None
        rows = self._visible_rows()
        if n > count:
            rows = rows[self._ahead.sample(torch.tensor([self.fleet.number]), self.fleet.number, [n], count)[0]]
        elif self._in_order and self.fleet.is_pure():  # nothing has to be gathered, and nobody writes into it
            assert self.storage is not None
            return batch_of(self.storage.first(n, self.fleet.device))
        return self.take(rows)

    def drawn(self, count: int) -> int:
        return count

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that is kept of one past task."""
        rows = sorted(row for group, members in self._members.items() if group[0] == tasks[0] for row in members)
        if not rows:
            raise InputError("the memory has no room for an example of every task: give it more bytes or examples")
        return self.take(torch.tensor(rows))

    def of_chosen(self, choose: Callable[[int], Tensor]) -> Batch:
        return self.of(choose(1)[:, 0].tolist())

    # ---- what the wrapper calls

    def prepare(self, batch: Batch) -> None:
        """Make room for a batch before its step is taken: if there is none, this is the time to say so."""
        self._copy = {name: tensor.clone() for name, tensor in columns_of(batch).items()}  # a module may write into its inputs
        if self.storage is None:
            self._open(self._copy)
            assert self.storage is not None
        needed = min(self._used + batch.slots.shape[1], self._limit or math.inf)
        if needed > self.storage.rows:
            ahead = self.plan.per_task if self._reserves else min(self.plan.per_task, needed)
            self.storage.reserve(int(min(needed + ahead, self._limit or math.inf)))

    def commit(self, labels: Sequence[int]) -> None:
        """The step was taken: offer the batch that the learner showed, example by example."""
        batch, self._pending = self._pending, None
        if batch is None:
            return
        written: dict[int, int] = {}
        for place, label in enumerate(labels):
            row = self._place((self.task, 0 if self.policy == "reservoir" else label), self._luck_of_next())
            if row is not None:
                written[row] = place  # of several examples for one row the last one stays
        if written:
            assert self.storage is not None
            self.storage.write(list(written), self._copy, list(written.values()))
        if self.task_free:
            self._let_ripen()

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
        return (self.storage.nbytes if self.storage else 0) + INDEX * self._used

    def counts(self) -> dict[int, int]:
        """Examples of every task; of every class, where there are no tasks."""
        found = Counter(self._keys(list(range(self._used))))
        return dict(sorted(found.items()))

    def groups(self) -> dict[int, list[int]]:
        """The visible rows of every past task; of every class, where there are no tasks."""
        found: dict[int, list[int]] = {}
        rows = sorted(self._visible)
        for row, key in zip(rows, self._keys(rows), strict=True):
            found.setdefault(key, []).append(row)
        return found

    def _keys(self, rows: list[int]) -> list[int]:
        """The task of some rows, or their class, where there are no tasks."""
        if not self.task_free or self.storage is None:
            return [self._group[row][0] for row in rows]
        slots = self.storage.columns["slots"]
        labels: list[int] = slots[torch.tensor(rows, dtype=torch.int64, device=slots.device)].tolist()
        return labels

    def marked(self) -> dict[str, Any]:
        """All that it knows, to go back to before anything is committed."""
        lists = {"_members": {group: list(rows) for group, rows in self._members.items()}}
        return {name: copy.copy(value) if name.startswith("_") else value for name, value in vars(self).items()} | lists

    # ---- which example stays

    def _open(self, values: Mapping[str, Tensor]) -> None:
        each = INDEX + sum(tensor.dtype.itemsize * tensor.shape[1:].numel() for tensor in values.values())
        limits = [n for n in (self.plan.examples, self.plan.bytes // each if self.plan.bytes else None) if n is not None]
        if not limits and self.task_free:
            limits = [TASK_FREE]
        self._limit = min(limits) if limits else None
        if self._limit == 0:
            raise InputError(f"{self.plan.bytes} bytes are too few for a memory: one example needs {each}")
        device = self.fleet.device if self.plan.where == "module" else torch.device("cpu")
        self.storage = Storage(
            values, device, Path(self.plan.folder) if self.plan.folder is not None else None, self._limit if self._reserves else None
        )

    def _luck_of_next(self) -> float:
        """A uniform number for the next example of the task: a function of the seed and of the example's number."""
        place = self._number % DRAWN
        if place == 0 or not self._lucks:
            first = self._number - place
            self._lucks = uniform_at(self._luck, torch.arange(first, first + DRAWN)[None])[0].tolist()
        self._number += 1
        return self._lucks[place]

    def _place(self, group: Group, luck: float) -> int | None:
        """The row that the next example of a group takes, if any; `luck` is uniform on [0, 1) and decides one thing."""
        self._seen[group] += 1
        members, seen = self._members.setdefault(group, []), self._seen[group]
        if self.policy == "class-balanced":
            room = self._limit if self.task_free else self.plan.per_task
            mine = self._used if self.task_free else len(self._fresh)
            if room is None or mine < room:
                return self._new(group, luck)
            if seen - 1 > len(members):
                return self._replace(members, int(luck * seen))
            return self._make_room(self._largest(group[0]), group, luck)
        quota = self._quota.get(group[1], 0) if self.policy != "reservoir" else (self._limit if self.task_free else None) or self.plan.per_task
        if seen <= quota:
            return self._new(group, luck)
        if quota == 0:
            return None
        return self._replace(members, int(luck * seen))

    def _new(self, group: Group, luck: float) -> int | None:
        """A row of its own: an empty one, or that of a member of the largest group of the task that has most."""
        if self._limit is None or self._used < self._limit:
            row, self._used = self._used, self._used + 1
            self._group.append(group)
            self._arrived.append(self.fleet.number)
            self._enter(row, group)
            return row
        totals = Counter({group[0]: 0})
        for (task, _), rows in self._members.items():
            totals[task] += len(rows)
        most = max(totals, key=lambda task: (totals[task], task == group[0]))
        return self._make_room(self._largest(most), group, luck)

    def _largest(self, task: int) -> Group:
        return max((group for group in self._members if group[0] == task), key=lambda group: len(self._members[group]))

    def _make_room(self, largest: Group, group: Group, luck: float) -> int | None:
        """A member of the largest group goes, unless the example's own group has had to give examples away, or would have to now."""
        members, seen = self._members[group], self._seen[group]
        if seen - 1 > len(members) or (largest[0] == group[0] and len(members) >= len(self._members[largest])):
            return self._replace(members, int(luck * seen))
        return self._instead_of(self._members[largest], group, luck)

    def _replace(self, members: list[int], entry: int) -> int | None:
        """Algorithm R: example n takes a uniform place among n, and stays if that is one of the members'. In a ring the oldest one goes."""
        if entry >= len(members) and not (members and self.policy == "ring"):
            return None
        row = members[entry] if self.policy != "ring" else members.pop(0)
        if self.policy == "ring":
            members.append(row)
        if self.task_free:
            self._hide(row)
            self._ripens(row)
        self._arrived[row] = self.fleet.number
        return row

    def _instead_of(self, victims: list[int], group: Group, luck: float) -> int:
        """A uniform one of them makes room; the oldest one of a ring."""
        row = victims.pop(int(luck * len(victims)) if self.policy != "ring" else 0)
        if not victims and self._group[row][0] != self.task:
            del self._members[self._group[row]], self._seen[self._group[row]]
        self._hide(row)
        self._fresh.pop(row, None)
        self._group[row] = group
        self._enter(row, group)
        return row

    def _enter(self, row: int, group: Group) -> None:
        self._arrived[row] = self.fleet.number
        self._members[group].append(row)
        if self.task_free:
            self._ripens(row)
        else:
            self._fresh[row] = None

    # ---- what may be drawn

    def _ripens(self, row: int) -> None:
        self._coming.append((self.fleet.number, row))

    def _let_ripen(self) -> None:
        while self._coming and self._coming[0][0] <= self.fleet.number - self.plan.recent:
            step, row = self._coming.popleft()
            if self._arrived[row] == step and row not in self._position:  # else another example lies there by now
                self._show(row)

    def _show(self, row: int) -> None:
        self._position[row] = len(self._visible)
        self._visible.append(row)
        self._rows = None

    def _hide(self, row: int) -> None:
        place = self._position.pop(row, None)
        if place is None:
            return
        last = self._visible.pop()
        if last != row:
            self._visible[place] = last
            self._position[last] = place
        self._rows = None

    def _visible_rows(self) -> Tensor:
        if self._rows is None:
            self._rows = torch.tensor(self._visible)
            self._in_order = self._visible == list(range(len(self._visible)))
        return self._rows

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        """The examples and everything that decides which ones come next."""
        if self.storage is None:
            return {}
        columns = {f"examples.{name}": column[: self._used] for name, column in self.storage.columns.items()}
        members = [row for rows in self._members.values() for row in rows]
        lists = {"members": members, "arrived": self._arrived, "visible": self._visible, "fresh": list(self._fresh)}
        pairs = {"coming": torch.tensor(list(self._coming), dtype=torch.int64).view(-1, 2)}
        return columns | pairs | {name: torch.tensor(values, dtype=torch.int64) for name, values in lists.items()}

    def counters(self) -> dict[str, Any]:
        groups = [[*group, len(rows), self._seen[group]] for group, rows in self._members.items()]
        return {"task": self.task, "number": self._number, "groups": groups, "quota": [list(pair) for pair in self._quota.items()]}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Go on from a saved `state()` and `counters()`. Room comes with examples: a limit that a file names reserves nothing."""
        self._reserves = False
        self.begin_task(counters["task"])
        self._number, self._quota = counters["number"], {int(label): int(share) for label, share in counters["quota"]}
        if not state:
            return
        columns = {name.removeprefix("examples."): state[name] for name in sorted(state) if name.startswith("examples.")}
        self._used = len(columns["slots"])
        self._open(columns)
        assert self.storage is not None
        self.storage.reserve(self._used)
        if self._used:
            self.storage.write(list(range(self._used)), columns, list(range(self._used)))
        members = state["members"].tolist()
        self._members, self._seen, self._group = {}, Counter(), [(0, 0)] * self._used
        for task, label, count, seen in counters["groups"]:
            self._members[task, label], members = members[:count], members[count:]
            self._seen[task, label] = seen
            for row in self._members[task, label]:
                self._group[row] = (task, label)
        self._arrived = state["arrived"].tolist()
        self._visible, self._position, self._fresh, self._rows = [], {}, dict.fromkeys(state["fresh"].tolist()), None
        for row in state["visible"].tolist():
            self._show(row)
        self._coming = deque((int(step), int(row)) for step, row in state["coming"].tolist())
