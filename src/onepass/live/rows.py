"""What the memory of a stream notes of its rows, each of which holds one example."""

from __future__ import annotations

import copy
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SHIFT = 32  # bits for the number of a row
Group = tuple[int, int]  # a task and a class of it; the class is negative if it is held out


def is_held_out(group: Group) -> bool:
    """Whether the examples of a group are kept for measuring only."""
    return group[1] < 0


class Rows:
    """The group of each row, the step at which its example came, and whether it may be drawn.

    With tasks, a row may be drawn once its task has ended: until then it is `fresh`. Without tasks,
    it may be drawn once it is older than some batches: until then it is `coming`. Rows held out are
    never drawn.
    """

    def __init__(self, task_free: bool) -> None:
        self._task_free = task_free
        self.members: dict[Group, list[int]] = {}  # rows of each group
        self.seen: Counter[Group] = Counter()  # examples of each group that passed by
        self.group: list[Group] = []  # of each row
        self.arrived = array("q")  # the step at which the example of each row came
        self.visible: list[int] = []  # rows that may be drawn
        self.position = array("q")  # of each row, where it is in `visible`, or -1
        self.fresh: dict[int, None] = {}  # in the order in which they were filled
        self.coming: deque[int] = deque()  # step and row, in one number
        self.places: Tensor | None = None  # `visible` as a tensor
        self.in_order = False  # whether that is 0, 1, 2, …

    def __len__(self) -> int:
        return len(self.group)

    def __copy__(self) -> Rows:
        twin = object.__new__(Rows)
        lists = (dict, list, deque, array)
        for name, value in vars(self).items():
            setattr(twin, name, copy.copy(value) if isinstance(value, lists) else value)
        twin.members = {group: list(rows) for group, rows in self.members.items()}
        return twin

    # ---- rows and groups

    def add(self, group: Group, step: int) -> int:
        """A further row, for an example of this group that came at this step."""
        row = len(self.group)
        self.group.append(group)
        self.arrived.append(step)
        self.position.append(-1)
        self.enter(row, group, step)
        return row

    def enter(self, row: int, group: Group, step: int) -> None:
        """A row becomes a member of a group."""
        members = self.members[group]
        self.group[row] = self.group[members[0]] if members else group  # one object for all
        self.arrived[row] = step
        members.append(row)
        if not self._task_free:
            self.fresh[row] = None
        elif not is_held_out(group):
            self._will_come(row, step)

    def leave(self, group: Group, place: int) -> int:
        """The row of a member, which leaves its group."""
        row = self.members[group].pop(place)
        self._hide(row)
        self.fresh.pop(row, None)
        return row

    def renew(self, row: int, step: int) -> None:
        """A row has another example of its group."""
        if self._task_free and not is_held_out(self.group[row]):
            self._hide(row)
            self._will_come(row, step)
        self.arrived[row] = step

    def drop(self, row: int) -> int:
        """Remove a row that has left its group; the last row, which is returned, moves there."""
        last = len(self.group) - 1
        lists: list[Any] = [self.group, self.arrived, self.position]
        left = (one for one in self.coming if one % 2**SHIFT != row)
        self.coming = deque(one - last + row if one % 2**SHIFT == last else one for one in left)
        if row != last:
            members = self.members[self.group[last]]
            members[members.index(last)] = row
            for noted in lists:
                noted[row] = noted[last]
            if self.position[row] >= 0:
                self.visible[self.position[row]] = row
            if last in self.fresh:
                self.fresh = {row if other == last else other: None for other in self.fresh}
        for noted in lists:
            noted.pop()
        self.places = None
        return last

    def fullest(self, current: int) -> int:
        """The task that has most rows; the current one, if it has as many."""
        totals = Counter({current: 0})
        for (task, _), rows in self.members.items():
            totals[task] += len(rows)
        return max(totals, key=lambda task: (totals[task], task == current))

    def largest(self, task: int, among_held_out: bool = True) -> Group:
        """The group of a task that has most rows."""
        groups = (
            group
            for group in self.members
            if group[0] == task and (among_held_out or not is_held_out(group))
        )
        return max(groups, key=lambda group: (len(self.members[group]), is_held_out(group)))

    def forget_empty(self) -> None:
        """Forget groups without rows: what passed by of them counts as new when it comes again."""
        self.members = {group: rows for group, rows in self.members.items() if rows}
        self.seen = Counter({group: self.seen[group] for group in self.members})

    def held_out(self, before: int) -> list[int]:
        """Rows for measuring only: of past tasks, or else those whose examples came by a step."""
        rows = [row for group, rows in self.members.items() if is_held_out(group) for row in rows]
        if self._task_free:
            return [row for row in rows if self.arrived[row] <= before]
        return [row for row in rows if row not in self.fresh]

    # ---- what may be drawn

    def end_task(self) -> None:
        """The rows of the current task may be drawn from now on."""
        for row in self.fresh:
            if not is_held_out(self.group[row]):
                self._show(row)
        self.fresh = {}
        self.forget_empty()

    def show_older(self, step: int) -> None:
        """The rows whose examples came at this step or before may be drawn from now on."""
        while self.coming and self.coming[0] >> SHIFT <= step:
            came, row = divmod(self.coming.popleft(), 2**SHIFT)
            # Else another example lies there by now.
            same = self.arrived[row] == came and self.position[row] < 0
            if same and not is_held_out(self.group[row]):
                self._show(row)

    def forget_replaced(self) -> None:
        """Shorten a long `coming`: rows that have another example by now are in it twice."""
        if len(self.coming) > len(self) + len(self) // 2 + 64:
            same = (one for one in self.coming if self.arrived[one % 2**SHIFT] == one >> SHIFT)
            self.coming = deque(dict.fromkeys(same))

    def visible_places(self) -> Tensor:
        """The rows that may be drawn, as a tensor."""
        if self.places is None:
            self.places = torch.tensor(self.visible)
            self.in_order = torch.equal(self.places, torch.arange(len(self.visible)))
        return self.places

    def _will_come(self, row: int, step: int) -> None:
        self.coming.append(step << SHIFT | row)

    def _show(self, row: int) -> None:
        self.position[row] = len(self.visible)
        self.visible.append(row)
        self.places = None

    def _hide(self, row: int) -> None:
        place = self.position[row]
        if place < 0:
            return
        self.position[row] = -1
        last = self.visible.pop()
        if last != row:
            self.visible[place] = last
            self.position[last] = place
        self.places = None

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        """The lists as tensors; the rest is in `groups`."""
        coming = [divmod(one, 2**SHIFT) for one in self.coming]
        lists: dict[str, Iterable[int]] = {
            "members": [row for rows in self.members.values() for row in rows],
            "arrived": self.arrived,
            "visible": self.visible,
            "fresh": self.fresh,
        }
        tensors = {name: torch.tensor(list(one), dtype=torch.int64) for name, one in lists.items()}
        return {"coming": torch.tensor(coming, dtype=torch.int64).view(-1, 2)} | tensors

    def groups(self) -> list[list[int]]:
        """Of each group: its task, its class, its rows, and the examples that passed by."""
        return [[*group, len(rows), self.seen[group]] for group, rows in self.members.items()]

    def restore(self, state: Mapping[str, Tensor], groups: Iterable[Sequence[int]]) -> None:
        """Go on from a saved `state()` and `groups()`, with fresh lists."""
        members, self.arrived = state["members"].tolist(), array("q", state["arrived"].tolist())
        self.group = [(0, 0)] * len(members)
        self.position = array("q", [-1] * len(members))
        for task, label, count, seen in groups:
            group: Group = task, label  # one object for all of them
            self.members[group], members = members[:count], members[count:]
            self.seen[group] = seen
            for row in self.members[group]:
                self.group[row] = group
        self.fresh = dict.fromkeys(state["fresh"].tolist())
        for row in state["visible"].tolist():
            self._show(row)
        self.coming = deque(step << SHIFT | row for step, row in state["coming"].tolist())
