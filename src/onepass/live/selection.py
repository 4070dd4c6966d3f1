"""Which examples of a stream stay in its memory.

The host decides, example by example, with draws that are functions of the seed and of the example's
number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from onepass.live.plan import Memory, Policy
from onepass.live.rows import Group, Rows, is_held_out
from onepass.memory.sampling import ExampleNumbers, place_in_reservoir, share
from onepass.random_numbers import Purpose

HELD_OUT = 0.2  # of the examples may be held out for measuring


class Selection:
    """Gives each example a row or none. `limit` is how many rows there may be, if that is limited.

    Examples of one task and class are a group. Where there is no room for a new one, a group that
    has more than others gives way.
    """

    def __init__(self, seed: int, plan: Memory, policy: Policy, task_free: bool) -> None:
        self._seed, self._plan, self._policy, self._task_free = seed, plan, policy, task_free
        self.rows = Rows(task_free)
        self.limit: int | None = None
        self.sharing: Sequence[int] = ()  # the classes that share the room of a task

    def __copy__(self) -> Selection:
        twin = object.__new__(Selection)
        vars(twin).update(vars(self) | {"rows": copy.copy(self.rows)})
        return twin

    def begin_task(self, task: int) -> None:
        self.task = task
        self.number = 0  # examples of the current task so far, or of the stream
        self._numbers = ExampleNumbers([self._seed], Purpose.RESERVOIR, task)
        self._coin = ExampleNumbers([self._seed], Purpose.HELD_OUT, task)

    def row_for_next(self, label: int, step: int) -> int | None:
        """The row that the next example takes, if any."""
        group, uniform = self._group_of_next(label), self._numbers[self.number]
        self.number += 1
        self.rows.seen[group] += 1
        self.rows.members.setdefault(group, [])
        if is_held_out(group):
            quota = self._plan.held_out
        elif self._policy == "class-balanced":
            return self._balanced(group, uniform, step)
        elif self._policy == "reservoir":
            quota = (self.limit if self._task_free else None) or self._plan.per_task
        else:
            quota = self._quota(label)
        if self.rows.seen[group] <= quota:
            return self._new(group, uniform, step)
        return self._replace(group, uniform, step) if quota else None

    def give_way(self, uniform: float) -> int:
        """The row of a member of the largest group, which leaves it."""
        return self._leave(self._largest(), uniform)

    def _group_of_next(self, label: int) -> Group:
        """Where the next example belongs.

        A draw of its own decides whether it may be held out, so that these and the others are both
        uniform samples. The first one is not, so that each task has one to rehearse.
        """
        if self._plan.held_out and self.number and self._coin[self.number] < HELD_OUT:
            return self.task, ~label if self._task_free else -1
        return self.task, 0 if self._policy == "reservoir" else label

    def _quota(self, label: int) -> int:
        """The rows of a class, if classes share the room of a task.

        They are not noted: there may be many more classes than rows.
        """
        if label not in self.sharing:
            return 0
        return share(self.sharing.index(label), len(self.sharing), self._plan.per_task)

    def _balanced(self, group: Group, uniform: float, step: int) -> int | None:
        """A row of its own while there is room, then one of the class that has most."""
        rows = self.rows
        if self._task_free:
            room, taken = self.limit, len(rows)
        else:  # what is held out has no part in the share of a task
            held_out = rows.members.get((self.task, -1), ())
            room, taken = self._plan.per_task, len(rows.fresh) - len(held_out)
        if room is None or taken < room:
            return self._new(group, uniform, step)
        if self._has_given(group):
            return self._replace(group, uniform, step)
        return self._make_room(rows.largest(group[0], self._task_free), group, uniform, step)

    def _new(self, group: Group, uniform: float, step: int) -> int | None:
        """An empty row, or that of a member of the largest group."""
        if self.limit is None or len(self.rows) < self.limit:
            return self.rows.add(group, step)
        return self._make_room(self._largest(), group, uniform, step)

    def _largest(self) -> Group:
        """The largest group of the task that has most rows."""
        return self.rows.largest(self.rows.fullest(self.task))

    def _has_given(self, group: Group) -> bool:
        """Whether a group has less than what passed by before the example that it is offered."""
        return self.rows.seen[group] - 1 > len(self.rows.members[group])

    def _make_room(self, largest: Group, group: Group, uniform: float, step: int) -> int | None:
        """A member of the largest group goes, unless its own group has given, or would now."""
        members = self.rows.members
        as_large = largest[0] == group[0] and len(members[group]) >= len(members[largest])
        if as_large or self._has_given(group):
            return self._replace(group, uniform, step)
        row = self._leave(largest, uniform)
        self.rows.enter(row, group, step)
        return row

    def _replace(self, group: Group, uniform: float, step: int) -> int | None:
        """The row of a member that goes for the next example of its group, if that stays."""
        members = self.rows.members[group]
        if members and self._is_ring(group):  # a list by age, since it may become shorter
            members.append(members.pop(0))
            row = members[-1]
        else:
            place = place_in_reservoir(uniform, self.rows.seen[group] - 1)
            if place >= len(members):
                return None
            row = members[place]
        self.rows.renew(row, step)
        return row

    def _leave(self, group: Group, uniform: float) -> int:
        """The row of a uniform member that leaves its group; of the oldest one of a ring."""
        rows, members = self.rows, self.rows.members[group]
        place = 0 if self._is_ring(group) else place_in_reservoir(uniform, len(members) - 1)
        row = rows.leave(group, place)
        if not members and group[0] != self.task:
            del rows.members[group], rows.seen[group]
        return row

    def _is_ring(self, group: Group) -> bool:
        return self._policy == "ring" and not is_held_out(group)
