"""Examples that are held out are a fair sample, and are never rehearsed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from onepass import InputError, Memory, OnePass
from onepass.engine.batch import Batch
from onepass.live.memory import StreamMemory
from onepass.live.plan import Policy
from onepass.live.saving import packed, settings
from tests.live.drifting import learnt, net, stream
from tests.live.memories import (
    CLASSES,
    Offered,
    assert_same_batch,
    assert_same_state,
    every_policy,
    memory_of,
    numbers_in,
    some_labels,
)


def held(memory: StreamMemory) -> dict[tuple[int, int], list[int]]:
    """Numbers of the examples held out, by group."""
    numbers = numbers_in(memory) if memory.storage is not None else []
    apart = {group: rows for group, rows in memory.rows.members.items() if group[1] < 0}
    return {group: [numbers[row] for row in rows] for group, rows in apart.items()}


def filled(memory: StreamMemory, seed: int = 0, tasks: int = 3, batches: int = 30) -> Offered:
    offered, random = Offered(), Random(seed)
    for task in range(1 if memory.task_free else tasks):
        memory.begin_task(task)
        for _ in range(batches):
            offered(memory, some_labels(random))
        if not memory.task_free:
            memory.end_task()
    return offered


# ---- which examples


@every_policy
@pytest.mark.parametrize("limit", [{}, {"examples": 60}], ids=["no limit", "examples"])
def test_what_is_held_out_is_never_rehearsed(
    policy: Policy, task_free: bool, limit: dict[str, int]
) -> None:
    memory = memory_of(Memory(per_task=20, held_out=6, recent=2, **limit), policy, task_free)
    offered, random = Offered(), Random(3)
    ever: set[int] = set()
    for step in range(150):
        if step % 30 == 29 and not task_free:
            memory.end_task()
            memory.begin_task(memory.task + 1)
        drawn = [memory.draw(9)]
        if not task_free:
            drawn += [memory.of([task]) for task in range(memory.task)]
        given = [batch.x[0, :, 0] for batch in drawn if batch is not None]
        rehearsed = {int(number) for numbers in given for number in numbers.tolist()}
        ever |= {number for numbers in held(memory).values() for number in numbers}
        assert rehearsed.isdisjoint(ever)
        offered(memory, some_labels(random))
        assert memory.size <= memory.plan.examples if memory.plan.examples else True
    groups = held(memory)
    assert groups
    assert all(0 < len(numbers) <= 6 for numbers in groups.values())
    for (task, label), numbers in groups.items():
        assert all(offered.task[number] == task for number in numbers)
        assert not task_free or all(offered.labels[number] == ~label for number in numbers)
    rows = numbers_in(memory)
    measured = {rows[row] for group in memory.groups().values() for row in group}
    assert measured <= {number for numbers in groups.values() for number in numbers}


@every_policy
def test_what_is_held_out_comes_on_top_of_the_share_of_a_task(
    policy: Policy, task_free: bool
) -> None:
    if task_free:
        return
    memory, offered = memory_of(Memory(per_task=20, held_out=6), policy), Offered()
    for task in range(3):
        memory.begin_task(task)
        for _ in range(60):
            offered(memory, range(CLASSES))
        memory.end_task()
    assert memory.counts() == dict.fromkeys(range(3), 26)
    assert memory.visible == 60
    sizes = {group: len(rows) for group, rows in memory.groups().items()}
    assert sizes == dict.fromkeys(range(3), 6)


def test_what_is_held_out_is_a_uniform_sample_and_leaves_the_rest_one() -> None:
    counts = {True: np.zeros(120), False: np.zeros(120)}
    for seed in range(400):
        memory = memory_of(Memory(per_task=20, held_out=6), "reservoir", seed=seed)
        memory.begin_task(0)
        offered = Offered()
        for _ in range(24):
            offered(memory, range(CLASSES))
        apart = {number for numbers in held(memory).values() for number in numbers}
        for number in numbers_in(memory):
            counts[number in apart][number] += 1
    # The first one is always offered to the rest.
    for kept, size in ((counts[True][1:], 6), (counts[False][1:], 20)):
        parts = kept.reshape(7, 17).sum(1)
        expected = parts.sum() / 7
        assert kept.sum() == pytest.approx(400 * size, rel=0.05)
        # Six degrees of freedom: chance alone is above 28 once in ten thousand times.
        assert float(((parts - expected) ** 2 / expected).sum()) < 28


def test_a_task_of_a_single_example_can_be_rehearsed() -> None:
    for seed in range(40):
        memory = memory_of(Memory(per_task=20, held_out=6), "class-balanced", seed=seed)
        Offered()(memory, [1])
        memory.end_task()
        assert memory.of([0]).slots.tolist() == [[1]]


LIMITS: dict[str, dict[str, int]] = {
    "no limit": {},
    "examples": {"examples": 40},
    "bytes": {"bytes": 20_000},
}


@every_policy
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_restored_memory_goes_on_identically(
    policy: Policy, task_free: bool, limit: dict[str, int]
) -> None:
    plan = Memory(per_task=15, recent=3, held_out=5, **limit)
    memory = memory_of(plan, policy, task_free)
    filled(memory)
    memory.begin_task(0 if task_free else 3)
    offered, random = Offered(), Random(1)
    for _ in range(10):
        offered(memory, some_labels(random))
    fresh = memory_of(plan, policy, task_free)
    fresh.fleet.steps = memory.fleet.steps
    state = {name: tensor.clone() for name, tensor in memory.state().items()}
    fresh.restore(state, memory.counters())
    both = [(memory, Offered(), Random(5)), (fresh, Offered(), Random(5))]
    for step in range(40):
        for one, offer, random in both:
            offer(one, some_labels(random))
            if step == 20 and not task_free:
                one.end_task()
                one.begin_task(4)
        assert_same_batch(memory.draw(7), fresh.draw(7))
    assert_same_state(memory, fresh)
    assert memory.groups() == fresh.groups()
    assert memory.groups()


# ---- learning


def test_without_it_nothing_is_learnt_differently_and_a_file_has_no_word_of_it() -> None:
    one, other = learnt(memory=Memory(per_task=9)), learnt(memory=Memory(per_task=9, held_out=0))
    assert packed(one) == packed(other)
    assert "held_out" not in settings(one)["memory"]
    assert settings(learnt(tasks=1, memory=Memory(held_out=3)))["memory"]["held_out"] == 3


@pytest.mark.parametrize("method", ["er", "a-gem", "gem", "s-gem", "mega-1"])
def test_a_method_is_given_nothing_of_what_is_held_out(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Batch] = []
    for name in ("draw", "of"):
        real = getattr(StreamMemory, name)

        def listen(memory: StreamMemory, what: Any, real: Any = real) -> Batch | None:
            found: Batch | None = real(memory, what)
            if found is not None:
                given.append(found)
            return found

        monkeypatch.setattr(StreamMemory, name, listen)
    learner = learnt(method, memory=Memory(per_task=20, held_out=10))
    memory = learner.memory
    assert memory is not None
    held_out = [memory.take(torch.tensor(rows)).x[0] for rows in memory.groups().values()]
    apart = {tuple(x.tolist()) for examples in held_out for x in examples}
    seen = {tuple(x.tolist()) for batch in given for x in batch.x[0]}
    assert len(apart) == 30
    assert len(seen) > 20
    assert apart.isdisjoint(seen)


@pytest.mark.parametrize("task_free", [False, True], ids=["tasks", "task-free"])
def test_it_goes_on_bit_identically_from_a_file(task_free: bool, tmp_path: Path) -> None:
    plan = Memory(per_task=12, examples=50, recent=2, held_out=5)

    def make() -> OnePass:
        return OnePass(net(), "er", learning_rate=0.05, task_free=task_free, memory=plan)

    whole, first = make(), make()
    for learner in (whole, first):
        for task in range(2):
            for x, y in stream(task, 15):
                learner.observe(x, y)
            if not task_free:
                learner.end_task()
    first.save(tmp_path / "saved")
    second = OnePass.load(tmp_path / "saved", net())
    for x, y in stream(2):
        whole.observe(x, y)
        second.observe(x, y)
    if not task_free:
        whole.end_task()
        second.end_task()
    assert packed(second) == packed(whole)
    keys = ("forgetting", "forgetting_by_task", "memory", "memory_bytes")
    assert [second.report()[key] for key in keys] == [whole.report()[key] for key in keys]


# ---- what the number is


@pytest.mark.parametrize("method", ["van", "pi", "icarl"])
def test_a_method_without_a_memory_has_nothing_to_hold_out(method: str) -> None:
    with pytest.raises(InputError, match=r"held_out|exemplars="):
        OnePass(net(), method, learning_rate=0.1, tasks=[[0, 1], [2, 3]], memory=Memory(held_out=5))
