"""A memory and the numbered examples that it is offered, for tests of the memory of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
import torch
from torch import nn

from onepass import Memory
from onepass.engine.batch import Batch
from onepass.engine.module_fleet import ModuleFleet
from onepass.engine.slots import Slots
from onepass.live.memory import INDEX, StreamMemory
from onepass.live.plan import Policy
from onepass.live.rows import SHIFT

CLASSES = 5
# Bytes of an example: x, a further input, and the label, beside the index.
EACH = INDEX + 8 + 3 * 2 + 8
POLICIES: list[tuple[Policy, bool]] = [
    *((policy, False) for policy in get_args(Policy)),
    *(("class-balanced", True), ("reservoir", True)),
]
every_policy = pytest.mark.parametrize(
    ("policy", "task_free"),
    POLICIES,
    ids=lambda value: {True: "task-free", False: "tasks"}.get(value, value),
)


def memory_of(plan: Memory, policy: Policy, task_free: bool = False, seed: int = 0) -> StreamMemory:
    fleet = ModuleFleet(nn.Linear(1, CLASSES), Slots((tuple(range(CLASSES)),)), 0.1, seed=seed)
    return StreamMemory(fleet, plan, policy, task_free, lambda: range(CLASSES))


class Offered:
    """Examples that are numbered, so that an input tells which label and task it must have."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        self.task: list[int] = []
        self.batch: list[int] = []

    def show(self, memory: StreamMemory, labels: Sequence[int]) -> list[int]:
        """A batch whose step is not taken yet."""
        first = len(self.labels)
        numbers = torch.arange(first, first + len(labels))
        further = (numbers[:, None] * torch.tensor([1, 2, 3])).to(torch.int16)
        x, slots = numbers.double()[None, :, None], torch.tensor(labels)[None]
        batch = Batch(x, slots, extra={"input 1": further[None]})
        memory.prepare(batch)
        memory.observe(batch)
        return list(labels)

    def __call__(self, memory: StreamMemory, labels: Sequence[int]) -> None:
        shown = self.show(memory, labels)
        self.labels += shown
        self.task += [memory.task] * len(shown)
        self.batch += [memory.fleet.steps] * len(shown)
        memory.fleet.steps += 1  # the step was taken
        memory.commit(shown)


def numbers_in(memory: StreamMemory) -> list[int]:
    assert memory.storage is not None
    return [int(n) for n in memory.storage.columns["x"][: memory.size, 0].tolist()]


def check(memory: StreamMemory, offered: Offered) -> None:
    """Everything that must hold at any time."""
    rows = range(memory.size)
    in_groups = sorted(itertools.chain.from_iterable(memory.rows.members.values()))
    assert in_groups == list(rows), "every row is in one group"
    for group, members in memory.rows.members.items():
        assert all(memory.rows.group[row] == group for row in members)
        assert len(members) <= memory.rows.seen[group]
    assert len(memory.rows.group) == len(memory.rows.arrived) == memory.size
    position = {row: place for row, place in enumerate(memory.rows.position) if place >= 0}
    assert {row: place for place, row in enumerate(memory.rows.visible)} == position
    hidden = set(memory.rows.fresh)
    if memory.task_free:
        hidden = {one % 2**SHIFT for one in memory.rows.coming} - position.keys()
    assert hidden.isdisjoint(position)
    assert hidden | position.keys() == set(rows)
    assert sum(memory.counts().values()) == memory.size
    assert sum(len(group) for group in memory.groups().values()) == memory.visible
    if memory.storage is None:
        return
    found = numbers_in(memory)
    assert len(set(found)) == memory.size, "no example twice"
    columns = memory.storage.columns
    for row, number in enumerate(found):
        task, label = memory.rows.group[row]
        assert task == offered.task[number]
        assert int(columns["slots"][row]) == offered.labels[number]
        assert memory.policy == "reservoir" or label == offered.labels[number]
        assert columns["input 1"][row].tolist() == [number, 2 * number, 3 * number]


def some_labels(random: Random, most: int = 12) -> list[int]:
    """Classes of which some are rare."""
    count = random.randrange(1, most)
    return [min(int(random.expovariate(1.0)), CLASSES - 1) for _ in range(count)]


def something(memory: StreamMemory, offered: Offered, random: Random) -> Batch | None:
    """A random thing that can happen to a memory."""
    chance = random.random()
    if chance < 0.1:
        offered.show(memory, some_labels(random))
        memory.discard()
    elif chance < 0.2 and not memory.task_free:
        memory.end_task()
        memory.begin_task(memory.task + 1)
    elif chance < 0.4:
        return memory.draw(random.randrange(1, 12))
    else:
        offered(memory, some_labels(random))
    return None


def place_of(where: str, folder: Path) -> dict[str, Any]:
    return {"where": where, "folder": folder if where == "disk" else None}


def assert_same_batch(one: Batch | None, other: Batch | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.slots, other.slots)
        assert list(one.extra) == list(other.extra)
        assert all(torch.equal(tensor, other.extra[name]) for name, tensor in one.extra.items())


def assert_same_state(one: StreamMemory, other: StreamMemory) -> None:
    found, expected = one.state(), other.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert one.counters() == other.counters()
