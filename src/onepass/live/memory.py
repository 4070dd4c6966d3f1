"""The episodic memory of a stream whose tasks, classes and examples are not known beforehand."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.module_fleet import ModuleFleet
from onepass.errors import InputError
from onepass.live.plan import Memory, Policy
from onepass.live.repeats import Repeats
from onepass.live.rows import Rows, is_held_out
from onepass.live.selection import Selection
from onepass.live.storage import Storage, batch_of, columns_of
from onepass.memory.captured import NeverCaptured
from onepass.memory.protocol import Chooser
from onepass.memory.sampling import ReferencePlaces, share
from onepass.random_numbers import Purpose, bits_at

INDEX = 256  # bytes per example, at least, that are set aside for what is noted of it
ROW, GROUP = 136, 336  # bytes that this takes at most, per example and per group
TASK_FREE = 1000  # examples of a stream without tasks, unless something is said


class StreamMemory(NeverCaptured):
    """The memory of one run. `classes()` tells which classes the current task can have.

    A batch that a learner shows with `observe` is kept only once `commit` says that its step was
    taken. A `Selection` decides which examples stay in which `Rows`, a `Storage` holds them.
    """

    def __init__(
        self,
        fleet: ModuleFleet,
        plan: Memory,
        policy: Policy,
        task_free: bool,
        classes: Callable[[], Sequence[int]],
    ) -> None:
        self.fleet, self.plan, self.policy = fleet, plan, policy
        self.task_free, self._classes = task_free, classes
        self._selection = Selection(fleet.seed, plan, policy, task_free)
        self.storage: Storage | None = None
        self._pending: Batch | None = None  # what the learner showed in this step
        self._copy: dict[str, Tensor] = {}  # of the batch that is being learnt
        self._reference = ReferencePlaces([fleet.seed])
        self._most: int | None = None  # rows at most, if there is a limit,
        self._spare = 0  # and bytes for what is noted of them
        self._reserves = True  # whether all the room up to the limit is taken at once
        self._repeats = Repeats()
        self.begin_task(0)

    @property
    def rows(self) -> Rows:
        return self._selection.rows

    # ---- what learners call

    @property
    def task(self) -> int:
        return self._selection.task

    @property
    def sizes(self) -> list[int]:
        return [len(self.rows.visible)]

    @property
    def include_current(self) -> bool:
        return self.task_free

    def begin_task(self, task: int) -> None:
        self._selection.begin_task(task)
        if self.policy in ("class-reservoir", "ring"):
            self._selection.sharing = self._classes()

    def observe(self, batch: Batch) -> None:
        self._pending = batch

    def end_task(self) -> None:
        self.rows.end_task()
        self._fit()

    def draw(self, count: int) -> Batch | None:
        """A reference batch of `count` visible examples, uniform without replacement."""
        n = self.visible
        if n < self.fleet.least:
            return None
        rows = self.rows.visible_places()
        if n > count:
            step = torch.tensor([self.fleet.steps])
            rows = rows[self._reference.distinct(step, self.fleet.steps, [n], count)[0]]
        elif self.rows.in_order and self.fleet.is_traceable():
            # Nothing has to be gathered, and the module does not write into its inputs.
            assert self.storage is not None
            return batch_of(self.storage.first(n, self.fleet.device))
        return self.take(rows)

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that may be rehearsed of one past task."""
        rows = sorted(
            row
            for group, members in self.rows.members.items()
            if group[0] == tasks[0] and not is_held_out(group)
            for row in members
        )
        if not rows:
            why = "the memory has no room for an example of every task"
            raise InputError(f"{why}: give it more bytes or examples")
        return self.take(torch.tensor(rows))

    def of_chosen(self, choose: Chooser) -> Batch:
        return self.of(choose(1)[:, 0].tolist())

    def contents(self, room: bool = False) -> tuple[Batch, Tensor] | None:
        """All visible examples, and the task of each, `[1, n]`."""
        if not self.visible:
            return None
        tasks = [self.rows.group[row][0] for row in self.rows.visible]
        kept = self.take(self.rows.visible_places())
        return kept, torch.tensor([tasks], device=self.fleet.device)

    # ---- what the wrapper calls

    def prepare(self, batch: Batch) -> None:
        """Make room for a batch before its step is taken: if there is none, this is the time."""
        # A copy, since a module may write into its inputs.
        self._copy = {name: tensor.clone() for name, tensor in columns_of(batch).items()}
        if self.storage is None:
            self._open(self._copy)
            assert self.storage is not None
        self.storage.check_process()
        needed = min(self.size + batch.slots.shape[1], self._most or math.inf)
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
            row = self._selection.row_for_next(label, self.fleet.steps)
            if row is not None:
                written[row] = place  # of several examples for one row the last one stays
        if written:
            assert self.storage is not None
            self.storage.write(list(written), self._copy, list(written.values()))
            self._repeats.note(self._copy, list(written.values()))
        if self.task_free:
            self.rows.show_older(self.fleet.steps - self.plan.recent)
        self._fit()

    def tell(self) -> None:
        """Log what the user should know of the examples."""
        self._repeats.tell()

    def discard(self) -> None:
        """The step is over."""
        self._pending, self._copy = None, {}

    def take(self, rows: Tensor) -> Batch:
        """The examples of some rows."""
        assert self.storage is not None
        return batch_of(self.storage.take(rows, self.fleet.device))

    @property
    def size(self) -> int:
        """How many examples there are."""
        return len(self.rows)

    @property
    def visible(self) -> int:
        """How many examples may be drawn."""
        return len(self.rows.visible)

    @property
    def nbytes(self) -> int:
        """Bytes of everything it holds."""
        noted = max(INDEX * self.size, ROW * self.size + GROUP * len(self.rows.members))
        return (self.storage.nbytes if self.storage else 0) + noted

    def counts(self) -> dict[int, int]:
        """Examples of every task; of every class, where there are no tasks."""
        return dict(sorted(Counter(self._keys(list(range(self.size)))).items()))

    def groups(self) -> dict[int, list[int]]:
        """The rows on which every past task is measured, or every class, where there are no tasks.

        Those held out, if any are to be, else those that are rehearsed.
        """
        found: dict[int, list[int]] = {}
        before = self.fleet.steps - self.plan.recent
        rows = sorted(self.rows.held_out(before) if self.plan.held_out else self.rows.visible)
        for row, key in zip(rows, self._keys(rows), strict=True):
            found.setdefault(key, []).append(row)
        return found

    def _keys(self, rows: list[int]) -> list[int]:
        """The task of some rows, or their class, where there are no tasks."""
        if not self.task_free or self.storage is None:
            return [self.rows.group[row][0] for row in rows]
        slots = self.storage.columns["slots"]
        places = torch.tensor(rows, dtype=torch.int64, device=slots.device)
        labels: list[int] = slots[places].tolist()
        return labels

    def marked(self) -> dict[str, Any]:
        """All that it knows, to go back to before anything is committed."""
        return vars(self) | {
            name: copy.copy(vars(self)[name]) for name in ("_selection", "_repeats")
        }

    # ---- how much there is room for

    def _open(self, values: Mapping[str, Tensor]) -> None:
        """Make the storage for examples like these."""
        plan = self.plan
        example = sum(one.dtype.itemsize * one.shape[1:].numel() for one in values.values())
        each = INDEX + example
        limits = [plan.examples, plan.bytes // each if plan.bytes else None]
        known = [n for n in limits if n is not None] or ([TASK_FREE] if self.task_free else [])
        self._selection.limit = self._most = min(known, default=None)
        if self._most == 0:
            needs = f"one example needs {each}"
            raise InputError(f"{plan.bytes} bytes are too few for a memory: {needs}")
        if self._most is not None:
            noted = (ROW + 2 * GROUP) * self._most
            self._spare = plan.bytes - self._most * example if plan.bytes else noted
        device = self.fleet.device if plan.where == "module" else torch.device("cpu")
        folder = Path(plan.folder) if plan.folder is not None else None
        self.storage = Storage(values, device, folder, self._most if self._reserves else None)

    def _fit(self) -> None:
        """Where too many groups leave too little room for examples, members of the largest go.

        Before that, empty groups are forgotten: their classes count as new when they come again.
        """
        if self._most is None:
            return
        rows = self.rows
        while (allowed := self._allowed()) < max(self.size, min(self._most, len(rows.members))):
            if not all(rows.members.values()):
                rows.forget_empty()
                continue
            if self.size <= allowed:
                break
            bits = bits_at(self.fleet.seed, Purpose.ROOM, self.fleet.steps, self.size)
            row = self._selection.give_way((bits % 2**64 >> 11) * 2.0**-53)
            last = rows.drop(row)
            if last != row:
                assert self.storage is not None
                self.storage.move(last, row)
        self._selection.limit = allowed
        rows.forget_replaced()

    def _allowed(self) -> int:
        """How many rows there may be, beside as many groups as there are."""
        assert self._most is not None
        return max(1, min(self._most, (self._spare - GROUP * len(self.rows.members)) // ROW))

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        """The examples and everything that decides which ones come next."""
        if self.storage is None:
            return {}
        columns = self.storage.columns.items()
        examples = {f"examples.{name}": column[: self.size] for name, column in columns}
        return examples | self.rows.state()

    def counters(self) -> dict[str, Any]:
        chosen, groups = self._selection, self.rows.groups()
        shares = even_shares(chosen.sharing, self.plan.per_task)
        return {"task": self.task, "number": chosen.number, "groups": groups, "quota": shares}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Go on from a saved `state()` and `counters()`.

        Room comes with examples: a limit that a file names reserves nothing.
        """
        self._reserves = False
        self.begin_task(counters["task"])
        self._selection.number = counters["number"]
        sharing = tuple(int(label) for label, _ in counters["quota"])
        first = range(len(sharing))
        self._selection.sharing = first if sharing == tuple(first) else sharing
        if not state:
            return
        names = sorted(name for name in state if name.startswith("examples."))
        columns = {name.removeprefix("examples."): state[name] for name in names}
        self._open(columns)
        assert self.storage is not None
        self.rows.restore(state, counters["groups"])
        self.storage.reserve(self.size)
        if self.size:
            every = list(range(self.size))
            self.storage.write(every, columns, every)
            self._repeats.remember(columns, self.size)
        self._selection.limit = None if self._most is None else self._allowed()


def even_shares(classes: Sequence[int], room: int) -> list[list[int]]:
    """Each class with its part of the room.

    >>> even_shares((4, 7, 9), 11)
    [[4, 4], [7, 4], [9, 3]]
    """
    return [[label, share(place, len(classes), room)] for place, label in enumerate(classes)]
