"""The memory of a stream that keeps coming: never larger than it may be, level, and fair."""

from __future__ import annotations

import errno
import gc
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.live.memory import GROUP, INDEX, ROW, StreamMemory
from onepass.live.plan import Policy
from onepass.live.saving import packed
from tests.failing import failing
from tests.live.memories import (
    CLASSES,
    EACH,
    Offered,
    assert_same_batch,
    assert_same_state,
    check,
    every_policy,
    memory_of,
    place_of,
    some_labels,
    something,
)


def real_bytes(memory: StreamMemory) -> int:
    """What the tensors really take, whatever part of them is shown."""
    assert memory.storage is not None
    return sum(column.untyped_storage().nbytes() for column in memory.storage.columns.values())


# ---- how much is kept


@every_policy
@pytest.mark.parametrize("where", ["module", "cpu", "disk"])
def test_the_byte_budget_holds_after_every_batch_and_is_used(
    policy: Policy, task_free: bool, where: str, tmp_path: Path
) -> None:
    budget = 50 * EACH + 17
    plan = Memory(per_task=30, bytes=budget, recent=2, **place_of(where, tmp_path))
    memory = memory_of(plan, policy, task_free)
    offered, random = Offered(), Random(7)
    for _ in range(250):
        something(memory, offered, random)
        if memory.storage is not None:
            assert real_bytes(memory) + INDEX * memory.size <= memory.nbytes <= budget
        check(memory, offered)
    # Tasks are many small groups, which need room too.
    assert memory.size == (50 if task_free else memory._selection.limit)
    assert memory.nbytes > budget - EACH - ROW - GROUP
    assert len(offered.labels) > 500


@every_policy
def test_the_limit_of_examples_holds_after_every_batch(policy: Policy, task_free: bool) -> None:
    memory = memory_of(Memory(per_task=30, examples=23, recent=2), policy, task_free)
    offered, random = Offered(), Random(8)
    for _ in range(200):
        something(memory, offered, random)
        assert memory.size <= 23
        check(memory, offered)
    assert memory.size == 23


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
def test_without_a_limit_every_task_has_its_share_and_room_grows_with_the_tasks(
    policy: Policy,
) -> None:
    memory, offered, random = memory_of(Memory(per_task=20), policy), Offered(), Random(9)
    for task in range(6):
        memory.begin_task(task)
        for _ in range(15):
            offered(memory, [*range(CLASSES), *some_labels(random)])
            check(memory, offered)
        memory.end_task()
        assert memory.counts() == dict.fromkeys(range(task + 1), 20)
        assert memory.visible == memory.size
        assert real_bytes(memory) + INDEX * memory.size == memory.nbytes <= (task + 3) * 20 * EACH


def lists_of(memory: StreamMemory) -> tuple[object, ...]:
    rows = memory.rows
    of_groups = rows.members, rows.seen, rows.fresh, rows.coming
    return *of_groups, rows.group, rows.arrived, rows.visible, rows.position


def test_what_the_memory_holds_beside_its_examples_does_not_grow_with_the_number_of_tasks() -> None:
    memory, offered, held = memory_of(Memory(bytes=40 * EACH), "class-balanced"), Offered(), []
    for task in range(300):
        memory.begin_task(task)
        offered(memory, range(CLASSES))
        memory.end_task()
        lists = (*lists_of(memory), *memory.rows.members.values())
        held.append(sum(sys.getsizeof(one) for one in lists))
    assert 20 <= memory.size == memory.visible <= (memory._selection.limit or 0)
    assert held[299] < 1.5 * held[49]


def noted(memory: StreamMemory) -> int:
    """Bytes that the lists of a memory take, each object once."""
    seen = {id(number) for number in range(-5, 257)}  # which Python has anyway

    def size(one: object) -> int:
        if id(one) in seen:
            return 0
        seen.add(id(one))
        inside: Iterable[object] = one if isinstance(one, (list, tuple, deque)) else ()
        if isinstance(one, dict):
            inside = [*one.keys(), *one.values()]
        return sys.getsizeof(one) + sum(map(size, inside))

    rows = 0 if memory.rows.places is None else memory.rows.places.nbytes
    return sum(map(size, lists_of(memory))) + rows


CLASSES_OF = {"few classes": 40, "as many as rows": 300, "each example a class": None}


@pytest.mark.parametrize("task_free", [True, False], ids=["task-free", "tasks"])
@pytest.mark.parametrize("classes", CLASSES_OF.values(), ids=CLASSES_OF)
@pytest.mark.parametrize("recent", [3, 10**9])
def test_what_is_really_held_is_within_the_budget_however_many_classes_there_are(
    task_free: bool, classes: int | None, recent: int
) -> None:
    budget = 300 * EACH
    plan = Memory(bytes=budget, per_task=10**6, recent=recent)
    memory = memory_of(plan, "class-balanced", task_free)
    offered, random = Offered(), Random(5)
    for step in range(300):
        if classes is None:
            labels = list(range(300 + 5 * step, 305 + 5 * step))
        else:
            labels = [1000 + random.randrange(classes) for _ in range(5)]
        offered(memory, labels)
        if step % 50 == 49 and not task_free:
            memory.end_task()
            memory.begin_task(memory.task + 1)
        memory.draw(5)
        if step % 7 == 0 and step > 10:  # what is there from the start is a fixed kilobyte
            assert real_bytes(memory) + noted(memory) <= memory.nbytes <= budget
            check(memory, offered)
    assert memory.size >= 150


def test_the_memory_of_an_endless_stream_of_new_classes_does_not_grow() -> None:
    plan = Memory(examples=30, recent=10**9)
    memory, offered = memory_of(plan, "class-balanced", task_free=True), Offered()
    fill = iter(range(10**6))
    held = []
    for _ in range(100):
        for _ in range(10):
            offered(memory, [next(fill) for _ in range(10)])
        held.append(noted(memory))
        check(memory, offered)
    assert memory.size == 30
    assert max(held[50:]) <= 1.5 * max(held[:10])
    offered(memory, [5, 5, 5])  # one that was forgotten comes again
    assert 5 in memory.counts()


def test_what_python_allocates_is_within_the_budget_with_one_example_of_each_class() -> None:
    budget = 150_000
    memory, offered = memory_of(Memory(bytes=budget), "class-balanced", task_free=True), Offered()
    gc.collect()
    tracemalloc.start()
    try:
        for step in range(100):
            offered(memory, range(10 * step, 10 * step + 10))
        gc.collect()
        of_memory = tracemalloc.Filter(True, "*/onepass/live/*.py")
        lists = tracemalloc.take_snapshot().filter_traces([of_memory]).traces
    finally:
        tracemalloc.stop()
    assert memory.size > 250
    assert real_bytes(memory) + sum(trace.size for trace in lists) <= budget


@pytest.mark.parametrize("policy", ["ring", "class-reservoir", "class-balanced"])
def test_classes_that_may_come_take_no_room_before_they_do(policy: Policy) -> None:
    plan = Memory(bytes=50_000, policy=policy, per_task=10**6)
    learner = OnePass(nn.Linear(2, 20_000), "er", learning_rate=1e-4, memory=plan)
    learner.observe(torch.randn(5, 2), torch.arange(5))
    assert learner.memory is not None
    gc.collect()
    tracemalloc.start()
    try:
        learner.memory.begin_task(0)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 20_000


def test_a_memory_that_held_more_than_it_may_goes_on_from_its_file_and_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Memory(bytes=100 * EACH, recent=2)
    memory, offered = memory_of(plan, "class-balanced", task_free=True), Offered()
    with monkeypatch.context() as patch:
        patch.setattr("onepass.live.memory.GROUP", 0)  # as it was counted before
        for step in range(30):
            offered(memory, range(5 * step, 5 * step + 5))
    fresh = memory_of(plan, "class-balanced", task_free=True)
    fresh.fleet.steps = memory.fleet.steps
    fresh.restore(memory.state(), memory.counters())
    assert fresh.size == memory.size == 100
    fresh.draw(5)
    offered(fresh, [7, 900])
    assert fresh.size < 60
    assert fresh.nbytes <= 100 * EACH
    check(fresh, offered)


def test_a_budget_below_one_example_is_refused_before_anything_is_learnt() -> None:
    module = nn.Linear(3, 2)
    learner = OnePass(module, learning_rate=0.1, memory=Memory(bytes=100))
    before = module.weight.detach().clone()
    with pytest.raises(InputError, match="100 bytes are too few"):
        learner.observe(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert torch.equal(module.weight, before)
    assert learner.steps == 0


@pytest.mark.parametrize("batches", [0, 2], ids=["the first example", "later"])
def test_a_disk_that_is_full_refuses_the_batch_and_leaves_everything_as_it_was(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(20, 3, generator=generator)
        return x, torch.randint(0, 2, (20,), generator=generator)

    plan = Memory(per_task=20, where="disk", folder=tmp_path)
    learner = OnePass(nn.Linear(3, 2), learning_rate=0.1, memory=plan)
    for number in range(batches):
        learner.observe(*batch(number), task=number)
    with monkeypatch.context() as patch:
        patch.setattr("onepass.live.storage.os.posix_fallocate", failing(errno.ENOSPC))
        refused = list[str]()
        while not refused and learner.steps < 20:  # at some time room has to be made
            before = packed(learner)
            try:
                learner.observe(*batch(7))
            except InputError as reason:
                refused.append(str(reason))
    assert "No space left on device" in refused[0]
    assert packed(learner) == before
    for number in range(5):
        learner.observe(*batch(number), task="next")
    learner.end_task()
    assert learner.memory is not None
    assert learner.memory.visible == 20 * (batches + 1)


# ---- where it lies


@every_policy
def test_a_memory_on_disk_has_the_content_of_one_in_main_memory(
    policy: Policy, task_free: bool, tmp_path: Path
) -> None:
    limit = {"examples": 30} if task_free else {}
    places = [place_of(where, tmp_path / "new") for where in ("cpu", "disk")]
    plans = [Memory(per_task=11, recent=2, **limit, **place) for place in places]
    kept = [memory_of(plan, policy, task_free) for plan in plans]
    both = [(memory, Offered(), Random(3)) for memory in kept]
    for _ in range(120):
        drawn = [something(*one) for one in both]
        assert_same_batch(*drawn)
    assert_same_state(*kept)
    assert all(isinstance(memory.storage.columns["x"], Tensor) for memory in kept if memory.storage)
    assert not list((tmp_path / "new").iterdir()), "the files have no names"


# ---- which examples stay
