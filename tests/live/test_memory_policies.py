"""Which examples stay: levelled by class and task, and by chance alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from onepass import Memory
from onepass.live.memory import LiveMemory, Policy
from tests.live.memories import CLASSES, EACH, Offered, check, memory_of, numbers_in


def stream_of(counts: Sequence[int], seed: int = 0) -> list[int]:
    """So many labels of each class in random order."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    Random(seed).shuffle(labels)
    return labels


def fill(memory: LiveMemory, labels: Sequence[int], size: int = 25) -> Offered:
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


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
@pytest.mark.parametrize(
    "limit", [{"examples": 61}, {"bytes": 61 * EACH}], ids=["examples", "bytes"]
)
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
        assert sum(tasks.values()) == min(memory._limit or 0, 40 * (task + 1))
        assert 50 <= (memory._limit or 0) <= 61  # where groups are many, fewer examples fit
        assert max(tasks.values()) - min(tasks.values()) <= 1
        for one in tasks:
            groups = [len(members) for group, members in memory._members.items() if group[0] == one]
            assert max(groups) - min(groups) <= 1


def test_a_ring_keeps_the_last_examples_of_each_class() -> None:
    memory = memory_of(Memory(per_task=17), "ring")
    offered = fill(memory, stream_of((30, 2, 80, 3, 5)))
    for label, share in enumerate((4, 4, 3, 3, 3)):
        own = [number for number, found in enumerate(offered.labels) if found == label]
        assert (
            sorted(number for number in numbers_in(memory) if offered.labels[number] == label)
            == own[-share:]
        )


def test_a_ring_keeps_the_last_examples_of_each_class_when_the_budget_leaves_it_less_than_its_share() -> (
    None
):
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
    """For each class (the whole stream as class 0, if the policy knows none) the χ² of how often its parts were kept, five parts in the order in
    which they came, against every example having had the same chance."""
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
            sizes = np.array([len(part) for part in np.array_split(own, 5)])
            found[label] = float(
                (
                    (parts - seeds * sizes * chance) ** 2 / (seeds * sizes * chance * (1 - chance))
                ).sum()
            )
    return found


UNIFORM: list[tuple[str, Policy, Memory, bool]] = [
    ("class-balanced, a task", "class-balanced", Memory(per_task=30), False),
    ("class-balanced, task-free", "class-balanced", Memory(examples=30), True),
    ("class-balanced, examples in all", "class-balanced", Memory(per_task=250, examples=30), False),
    (
        "class-balanced, bytes in all",
        "class-balanced",
        Memory(per_task=250, bytes=30 * EACH),
        False,
    ),
    ("class-reservoir, a task", "class-reservoir", Memory(per_task=30), False),
    (
        "class-reservoir, examples in all",
        "class-reservoir",
        Memory(per_task=250, examples=30),
        False,
    ),
    ("reservoir, a task", "reservoir", Memory(per_task=30), False),
    ("reservoir, task-free", "reservoir", Memory(examples=30), True),
    ("reservoir, examples in all", "reservoir", Memory(per_task=250, examples=30), False),
]


@pytest.mark.parametrize(
    ("policy", "plan", "task_free"),
    [case[1:] for case in UNIFORM],
    ids=[case[0] for case in UNIFORM],
)
def test_every_example_of_a_class_has_the_same_chance_to_stay(
    policy: Policy, plan: Memory, task_free: bool
) -> None:
    found = unevenness(policy, plan, task_free, stream_of((50, 4, 25, 80, 41)))
    assert len(found) == (1 if policy == "reservoir" else 4)
    # With four degrees of freedom, chance alone is above 28 once in a hundred thousand times.
    assert max(found.values()) < 28, found
