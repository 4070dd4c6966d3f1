"""Which examples stay: levelled by class and task, and by chance alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from onepass import Memory
from onepass.live.memory import StreamMemory
from onepass.live.plan import Policy
from tests.live.memories import CLASSES, EACH, Offered, check, memory_of, numbers_in


def stream_of(counts: Sequence[int], seed: int = 0) -> list[int]:
    """So many labels of each class in random order."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    Random(seed).shuffle(labels)
    return labels


def fill(memory: StreamMemory, labels: Sequence[int], size: int = 25) -> Offered:
    offered = Offered()
    for start in range(0, len(labels), size):
        offered(memory, labels[start : start + size])
    return offered


@pytest.mark.parametrize(
    ("plan", "task_free"),
    [(Memory(per_task=60), False), (Memory(examples=60), True), (Memory(examples=60), False)],
    ids=["task", "free", "limit"],
)
def test_class_balanced_keeps_small_classes_whole_and_levels_the_others(
    plan: Memory, task_free: bool
) -> None:
    counts = (3, 300, 12, 100, 40)
    memory = memory_of(plan, "class-balanced", task_free)
    offered = fill(memory, stream_of(counts))
    check(memory, offered)
    kept = Counter(offered.labels[number] for number in numbers_in(memory))
    assert (kept[0], kept[2]) == (3, 12)
    assert sorted(kept[label] for label in (1, 3, 4)) == [15, 15, 15]


LIMITS = {"examples": {"examples": 61}, "bytes": {"bytes": 61 * EACH}}


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_tasks_and_their_classes_stay_level_when_the_budget_is_reached(
    policy: Policy, limit: dict[str, int]
) -> None:
    memory, offered, random = memory_of(Memory(per_task=40, **limit), policy), Offered(), Random(4)
    for task in range(5):
        memory.begin_task(task)
        for _ in range(20):
            offered(memory, random.sample(range(CLASSES), CLASSES))
        memory.end_task()
        tasks = memory.counts()
        assert sum(tasks.values()) == min(memory._selection.limit or 0, 40 * (task + 1))
        # Where groups are many, fewer examples fit.
        assert 50 <= (memory._selection.limit or 0) <= 61
        assert max(tasks.values()) - min(tasks.values()) <= 1
        for one in tasks:
            of_groups = memory.rows.members.items()
            groups = [len(members) for group, members in of_groups if group[0] == one]
            assert max(groups) - min(groups) <= 1


def test_a_ring_keeps_the_last_examples_of_each_class() -> None:
    memory = memory_of(Memory(per_task=17), "ring")
    offered = fill(memory, stream_of((30, 2, 80, 3, 5)))
    for label, share in enumerate((4, 4, 3, 3, 3)):
        own = [number for number, found in enumerate(offered.labels) if found == label]
        kept = [number for number in numbers_in(memory) if offered.labels[number] == label]
        assert sorted(kept) == own[-share:]


def test_a_ring_keeps_the_last_examples_of_each_class_also_in_less_room_than_its_share() -> None:
    memory = memory_of(Memory(per_task=100, examples=15), "ring")
    fill(memory, [number % CLASSES for number in range(140)])
    assert sorted(numbers_in(memory)) == list(range(125, 140))


def test_what_is_kept_does_not_depend_on_how_the_stream_is_cut_into_batches() -> None:
    labels = stream_of((30, 5, 60, 20, 9))
    kept = []
    for size in (1, 7, 124):
        memory = memory_of(Memory(per_task=20), "class-balanced")
        fill(memory, labels, size)
        kept.append(numbers_in(memory))
    assert kept[0] == kept[1] == kept[2]


def unevenness(
    policy: Policy, plan: Memory, task_free: bool, labels: Sequence[int], seeds: int = 150
) -> dict[int, float]:
    """The χ² of how often the parts of each class were kept, against equal chances.

    A class has five parts, in the order in which they came. A policy that knows no classes has
    the whole stream as class 0.
    """
    kept = np.zeros(len(labels))
    for seed in range(seeds):
        memory = memory_of(plan, policy, task_free, seed=seed)
        fill(memory, labels)
        kept[numbers_in(memory)] += 1
    found = {}
    for label in sorted(set(labels)) if policy != "reservoir" else [0]:
        own = kept if policy == "reservoir" else kept[np.array(labels) == label]
        chance = own.sum() / (seeds * len(own))
        if chance < 1:  # what is kept whole leaves nothing to chance
            parts = np.array([part.sum() for part in np.array_split(own, 5)])
            shown = seeds * np.array([len(part) for part in np.array_split(own, 5)])
            squares = (parts - shown * chance) ** 2 / (shown * chance * (1 - chance))
            found[label] = float(squares.sum())
    return found


PLANS = {
    "per task": Memory(per_task=30),
    "task-free": Memory(examples=30),
    "examples in all": Memory(per_task=250, examples=30),
    "bytes in all": Memory(per_task=250, bytes=30 * EACH),
}
UNIFORM: list[tuple[Policy, str]] = [
    *(("class-balanced", plan) for plan in PLANS),
    *(("class-reservoir", plan) for plan in ("per task", "examples in all")),
    *(("reservoir", plan) for plan in ("per task", "task-free", "examples in all")),
]


@pytest.mark.parametrize(("policy", "name"), UNIFORM)
def test_every_example_of_a_class_has_the_same_chance_to_stay(policy: Policy, name: str) -> None:
    plan, task_free = PLANS[name], name == "task-free"
    found = unevenness(policy, plan, task_free, stream_of((50, 4, 25, 80, 41)))
    assert len(found) == (1 if policy == "reservoir" else 4)
    # With four degrees of freedom, chance alone is above 28 once in a hundred thousand times.
    assert max(found.values()) < 28, found
