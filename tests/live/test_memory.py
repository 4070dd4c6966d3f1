"""The memory of a stream that keeps coming: never larger than it may be, level, fair, and gone on with as if nothing had happened."""

from __future__ import annotations

import errno
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.engine.bound import Bound
from onepass.live.memory import INDEX, LiveMemory, Policy
from onepass.live.saving import packed
from onepass.streams.batch import Batch
from onepass.streams.slots import Slots

CLASSES = 5
EACH = INDEX + 8 + 3 * 2 + 8  # bytes of an example: x, a further input, and the label, beside the index
POLICIES: list[tuple[Policy, bool]] = [
    ("class-balanced", False),
    ("class-reservoir", False),
    ("ring", False),
    ("reservoir", False),
    ("class-balanced", True),
    ("reservoir", True),
]
every_policy = pytest.mark.parametrize(("policy", "task_free"), POLICIES, ids=lambda value: {True: "task-free", False: "tasks"}.get(value, value))


def memory_of(plan: Memory, policy: Policy, task_free: bool = False, seed: int = 0) -> LiveMemory:
    fleet = Bound(nn.Linear(1, CLASSES), Slots((tuple(range(CLASSES)),)), 0.1, seed=seed)
    return LiveMemory(fleet, plan, policy, task_free, lambda: range(CLASSES))


class Offered:
    """Examples that are numbered through, so that an input tells which label and task it must have."""

    def __init__(self) -> None:
        self.labels: list[int] = []
        self.task: list[int] = []
        self.batch: list[int] = []

    def show(self, memory: LiveMemory, labels: Sequence[int]) -> list[int]:
        """A batch whose step is not taken yet."""
        first = len(self.labels)
        numbers = torch.arange(first, first + len(labels))
        further = (numbers[:, None] * torch.tensor([1, 2, 3])).to(torch.int16)
        batch = Batch(numbers.double()[None, :, None], torch.tensor(labels)[None], extra={"input 1": further[None]})
        memory.prepare(batch)
        memory.observe(batch)
        return list(labels)

    def __call__(self, memory: LiveMemory, labels: Sequence[int]) -> None:
        shown = self.show(memory, labels)
        self.labels += shown
        self.task += [memory.task] * len(shown)
        self.batch += [memory.fleet.number] * len(shown)
        memory.fleet.number += 1  # the step was taken
        memory.commit(shown)


def numbers_in(memory: LiveMemory) -> list[int]:
    assert memory.storage is not None
    return [int(n) for n in memory.storage.columns["x"][: memory.size, 0].tolist()]


def check(memory: LiveMemory, offered: Offered) -> None:
    """Everything that must hold at any time."""
    rows = range(memory.size)
    assert sorted(itertools.chain.from_iterable(memory._members.values())) == list(rows), "every row is in one group"
    for group, members in memory._members.items():
        assert all(memory._group[row] == group for row in members)
        assert len(members) <= memory._seen[group]
    assert len(memory._group) == len(memory._arrived) == memory.size
    assert {row: place for place, row in enumerate(memory._visible)} == memory._position
    hidden = {row for _, row in memory._coming} - memory._position.keys() if memory.task_free else set(memory._fresh)
    assert hidden.isdisjoint(memory._position)
    assert hidden | memory._position.keys() == set(rows)
    assert sum(memory.counts().values()) == memory.size
    assert sum(len(group) for group in memory.groups().values()) == memory.visible
    if memory.storage is None:
        return
    found = numbers_in(memory)
    assert len(set(found)) == memory.size, "no example twice"
    columns = memory.storage.columns
    for row, number in enumerate(found):
        task, label = memory._group[row]
        assert task == offered.task[number]
        assert int(columns["slots"][row]) == offered.labels[number]
        assert memory.policy == "reservoir" or label == offered.labels[number]
        assert columns["input 1"][row].tolist() == [number, 2 * number, 3 * number]


def real_bytes(memory: LiveMemory) -> int:
    """What the tensors really take, whatever part of them is shown."""
    assert memory.storage is not None
    return sum(column.untyped_storage().nbytes() for column in memory.storage.columns.values())


def some_labels(random: Random, most: int = 12) -> list[int]:
    """Classes of which some are rare."""
    return [min(int(random.expovariate(1.0)), CLASSES - 1) for _ in range(random.randrange(1, most))]


def something(memory: LiveMemory, offered: Offered, random: Random) -> Batch | None:
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


# ---- how much is kept


@every_policy
@pytest.mark.parametrize("where", ["module", "cpu", "disk"])
def test_the_byte_budget_holds_after_every_batch_and_is_used(policy: Policy, task_free: bool, where: str, tmp_path: Path) -> None:
    budget = 50 * EACH + 17
    memory = memory_of(Memory(per_task=30, bytes=budget, recent=2, **place_of(where, tmp_path)), policy, task_free)
    offered, random = Offered(), Random(7)
    for _ in range(250):
        something(memory, offered, random)
        if memory.storage is not None:
            assert real_bytes(memory) + INDEX * memory.size <= memory.nbytes <= budget
        check(memory, offered)
    assert memory.size == 50
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
def test_without_a_limit_every_task_has_its_share_and_room_grows_with_the_tasks(policy: Policy) -> None:
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


def test_what_the_memory_holds_beside_its_examples_does_not_grow_with_the_number_of_tasks() -> None:
    memory, offered, held = memory_of(Memory(bytes=40 * EACH), "class-balanced"), Offered(), []
    for task in range(300):
        memory.begin_task(task)
        offered(memory, range(CLASSES))
        memory.end_task()
        lists = (memory._members, memory._group, memory._arrived, memory._seen, memory._visible, memory._position, memory._fresh, memory._coming)
        held.append(sum(sys.getsizeof(one) for one in (*lists, *memory._members.values())))
    assert memory.size == 40
    assert held[299] < 1.5 * held[49]


def test_a_budget_below_one_example_is_refused_before_anything_is_learnt() -> None:
    module = nn.Linear(3, 2)
    learner = OnePass(module, learning_rate=0.1, memory=Memory(bytes=100))
    before = module.weight.detach().clone()
    with pytest.raises(InputError, match="100 bytes are too few"):
        learner.observe(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert torch.equal(module.weight, before)
    assert learner.steps == 0


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("batches", [0, 2], ids=["the first example", "later"])
def test_a_disk_that_is_full_refuses_the_batch_and_leaves_everything_as_it_was(batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(20, 3, generator=generator), torch.randint(0, 2, (20,), generator=generator)

    learner = OnePass(nn.Linear(3, 2), learning_rate=0.1, memory=Memory(per_task=20, where="disk", folder=tmp_path))
    for number in range(batches):
        learner.observe(*batch(number), task=number)
    with monkeypatch.context() as patch:
        patch.setattr("onepass.live.storage.os.posix_fallocate", full_disk)
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
def test_a_memory_on_disk_has_the_content_of_one_in_main_memory(policy: Policy, task_free: bool, tmp_path: Path) -> None:
    limit = {"examples": 30} if task_free else {}
    kept = [memory_of(Memory(per_task=11, recent=2, **limit, **place_of(where, tmp_path / "new")), policy, task_free) for where in ("cpu", "disk")]
    both = [(memory, Offered(), Random(3)) for memory in kept]
    for _ in range(120):
        drawn = [something(*one) for one in both]
        assert_same_batch(*drawn)
    assert_same_state(*kept)
    assert all(isinstance(memory.storage.columns["x"], Tensor) for memory in kept if memory.storage)
    assert not list((tmp_path / "new").iterdir()), "the files have no names, so nothing is left behind"


def assert_same_batch(one: Batch | None, other: Batch | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.slots, other.slots)
        assert list(one.extra) == list(other.extra)
        assert all(torch.equal(tensor, other.extra[name]) for name, tensor in one.extra.items())


def assert_same_state(one: LiveMemory, other: LiveMemory) -> None:
    found, expected = one.state(), other.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert one.counters() == other.counters()


# ---- which examples stay


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
    ("plan", "task_free"), [(Memory(per_task=60), False), (Memory(examples=60), True), (Memory(examples=60), False)], ids=["task", "free", "limit"]
)
def test_class_balanced_keeps_small_classes_whole_and_levels_the_others(plan: Memory, task_free: bool) -> None:
    counts = (3, 300, 12, 100, 40)
    memory = memory_of(plan, "class-balanced", task_free)
    offered = fill(memory, stream_of(counts))
    check(memory, offered)
    kept = Counter(offered.labels[number] for number in numbers_in(memory))
    assert (kept[0], kept[2]) == (3, 12)
    assert sorted(kept[label] for label in (1, 3, 4)) == [15, 15, 15]


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
@pytest.mark.parametrize("limit", [{"examples": 61}, {"bytes": 61 * EACH}], ids=["examples", "bytes"])
def test_tasks_and_their_classes_stay_level_when_the_budget_is_reached(policy: Policy, limit: dict[str, int]) -> None:
    memory, offered, random = memory_of(Memory(per_task=40, **limit), policy), Offered(), Random(4)
    for task in range(5):
        memory.begin_task(task)
        for _ in range(20):
            offered(memory, random.sample(range(CLASSES), CLASSES))
        memory.end_task()
        tasks = memory.counts()
        assert sum(tasks.values()) == min(61, 40 * (task + 1))
        assert max(tasks.values()) - min(tasks.values()) <= 1
        for one in tasks:
            groups = [len(members) for group, members in memory._members.items() if group[0] == one]
            assert max(groups) - min(groups) <= 1


def test_a_ring_keeps_the_last_examples_of_each_class() -> None:
    memory = memory_of(Memory(per_task=17), "ring")
    offered = fill(memory, stream_of((30, 2, 80, 3, 5)))
    for label, share in enumerate((4, 4, 3, 3, 3)):
        own = [number for number, found in enumerate(offered.labels) if found == label]
        assert sorted(number for number in numbers_in(memory) if offered.labels[number] == label) == own[-share:]


def test_a_ring_keeps_the_last_examples_of_each_class_when_the_budget_leaves_it_less_than_its_share() -> None:
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


def unevenness(policy: Policy, plan: Memory, task_free: bool, labels: Sequence[int], seeds: int = 150) -> dict[int, float]:
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
            found[label] = float(((parts - seeds * sizes * chance) ** 2 / (seeds * sizes * chance * (1 - chance))).sum())
    return found


UNIFORM: list[tuple[str, Policy, Memory, bool]] = [
    ("class-balanced, a task", "class-balanced", Memory(per_task=30), False),
    ("class-balanced, task-free", "class-balanced", Memory(examples=30), True),
    ("class-balanced, examples in all", "class-balanced", Memory(per_task=250, examples=30), False),
    ("class-balanced, bytes in all", "class-balanced", Memory(per_task=250, bytes=30 * EACH), False),
    ("class-reservoir, a task", "class-reservoir", Memory(per_task=30), False),
    ("class-reservoir, examples in all", "class-reservoir", Memory(per_task=250, examples=30), False),
    ("reservoir, a task", "reservoir", Memory(per_task=30), False),
    ("reservoir, task-free", "reservoir", Memory(examples=30), True),
    ("reservoir, examples in all", "reservoir", Memory(per_task=250, examples=30), False),
]


@pytest.mark.parametrize(("policy", "plan", "task_free"), [case[1:] for case in UNIFORM], ids=[case[0] for case in UNIFORM])
def test_every_example_of_a_class_has_the_same_chance_to_stay(policy: Policy, plan: Memory, task_free: bool) -> None:
    found = unevenness(policy, plan, task_free, stream_of((50, 4, 25, 80, 41)))
    assert len(found) == (1 if policy == "reservoir" else 4)
    # With four degrees of freedom, chance alone is above 28 once in a hundred thousand times.
    assert max(found.values()) < 28, found


# ---- what is drawn


def kept_by(memory: LiveMemory, tasks: int = 3) -> Offered:
    offered = Offered()
    for task in range(tasks):
        memory.begin_task(task)
        for _ in range(4):
            offered(memory, range(CLASSES))
        memory.end_task()
    return offered


def test_a_draw_is_without_replacement_and_a_function_of_seed_and_step() -> None:
    memory, twin, other = (memory_of(Memory(per_task=10), "class-balanced", seed=seed) for seed in (1, 1, 2))
    for one in (memory, twin, other):
        kept_by(one)
    seen: set[int] = set()
    drawn = {}
    for step in range(100, 180):
        memory.fleet.number = step
        batch = memory.draw(7)
        assert batch is not None
        drawn[step] = [int(n) for n in batch.x[0, :, 0].tolist()]
        assert len(set(drawn[step])) == 7
        seen |= set(drawn[step])
    assert seen == set(numbers_in(memory))
    assert len({tuple(numbers) for numbers in drawn.values()}) == len(drawn)
    for step in (179, 100, 141):  # in whatever order it is asked, and however often
        twin.fleet.number = other.fleet.number = step
        again, twice, elsewhere = twin.draw(7), twin.draw(7), other.draw(7)
        assert again is not None
        assert twice is not None
        assert elsewhere is not None
        assert again.x[0, :, 0].tolist() == twice.x[0, :, 0].tolist() == drawn[step]
        assert elsewhere.x[0, :, 0].tolist() != drawn[step]


def test_every_visible_example_is_drawn_equally_often() -> None:
    memory = memory_of(Memory(per_task=10), "class-balanced")
    kept_by(memory)
    counts = np.zeros(60)
    for step in range(2000):
        memory.fleet.number = step
        batch = memory.draw(6)
        assert batch is not None
        counts[batch.x[0, :, 0].long().numpy()] += 1
    own = counts[sorted(numbers_in(memory))]
    chance = 6 / 30
    assert own.sum() == 12_000
    assert ((own - 2000 * chance) ** 2 / (2000 * chance * (1 - chance))).sum() < 70  # 29 degrees of freedom: above once in 30 000 times


def test_the_current_task_is_never_drawn_and_few_examples_are_all_drawn() -> None:
    memory, offered = memory_of(Memory(per_task=10), "class-balanced"), Offered()
    assert memory.draw(5) is None
    for task in range(3):
        memory.begin_task(task)
        for _ in range(4):
            drawn = memory.draw(25)
            found = [] if drawn is None else [int(n) for n in drawn.x[0, :, 0].tolist()]
            assert all(offered.task[number] < task for number in found)
            assert len(found) == 10 * task
            offered(memory, range(CLASSES))
        memory.end_task()
        assert sorted(memory.of([task]).x[0, :, 0].tolist()) == [number for number in sorted(numbers_in(memory)) if offered.task[number] == task]


@pytest.mark.parametrize("policy", ["class-balanced", "reservoir"])
@pytest.mark.parametrize("recent", [0, 1, 7])
def test_without_tasks_nothing_recent_is_drawn_and_everything_older_is(policy: Policy, recent: int) -> None:
    memory, offered, random = memory_of(Memory(examples=40, recent=recent), policy, task_free=True), Offered(), Random(recent)
    for step in range(80):
        assert memory.fleet.number == step
        drawn = memory.draw(40)
        found = [] if drawn is None else [int(n) for n in drawn.x[0, :, 0].tolist()]
        assert all(step - offered.batch[number] > recent for number in found)
        if memory.size:
            old = {number for number in numbers_in(memory) if step - offered.batch[number] > recent + 1}
            assert old <= set(found)
        offered(memory, some_labels(random))
        check(memory, offered)
    assert memory.visible > 20


@pytest.mark.parametrize("method", ["a-gem", "er", "mega-1", "mega-2"])
def test_what_a_task_free_method_is_given_was_in_the_stream_with_that_label_and_is_not_recent(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Batch] = []
    draw = LiveMemory.draw

    def listen(memory: LiveMemory, count: int) -> Batch | None:
        batch = draw(memory, count)
        if batch is not None:
            given.append(batch)
        return batch

    monkeypatch.setattr(LiveMemory, "draw", listen)
    learner = OnePass(
        nn.Linear(2, 6), method, learning_rate=1e-3, task_free=True, grow=True, reference_batch=9, memory=Memory(examples=25, recent=5), seed=3
    )
    random, labels = Random(1), list[int]()
    for step in range(60):
        y = [random.randrange(2 + step // 10) for _ in range(6)]  # a new class now and then, and in the end more than there were outputs
        first, labels = len(labels), labels + y
        given.clear()
        learner.observe(torch.stack([torch.arange(first, first + 6.0) / 1000, torch.ones(6)], 1), torch.tensor(y))
        for batch in given:
            numbers = [round(1000 * n) for n in batch.x[0, :, 0].tolist()]
            assert batch.slots[0].tolist() == [labels[number] for number in numbers]
            assert all(step - number // 6 > 5 for number in numbers)
            assert len(set(numbers)) == len(numbers) <= 9
        assert given if step > 6 else not given or step == 6


class Halving(nn.Module):
    """A module that may work in place, on the tensor that it is given."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(3, 2), in_place

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mul_(0.5) if self.in_place else x * 0.5)
        return out


@pytest.mark.parametrize("method", ["er", "a-gem", "mega-1", "gem"])
def test_a_module_that_works_in_place_on_its_inputs_does_not_change_what_is_remembered(method: str) -> None:
    modules = [Halving(False), Halving(True)]
    modules[1].load_state_dict(modules[0].state_dict())
    learners = [OnePass(module, method, learning_rate=0.1, memory=Memory(per_task=10)) for module in modules]
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        for _ in range(3):
            x, y = torch.randn(5, 3, generator=generator), torch.randint(0, 2, (5,), generator=generator)
            for learner in learners:
                learner.observe(x.clone(), y)
        for learner in learners:
            learner.end_task()
    contents = [learner.memory.state() for learner in learners if learner.memory is not None]
    assert torch.equal(contents[0]["examples.x"], contents[1]["examples.x"])
    assert torch.equal(learners[0].fleet.theta, learners[1].fleet.theta)


# ---- what is refused


class Tempered(nn.Module):
    """Two weights, and a loss that can be made to go wrong for targets far below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.1], [0.2]]))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        far = self.scale if float(y.min()) < -4 else 1.0
        return far * (outputs - y).square().mean()


@pytest.mark.parametrize("method", ["er", "gem", "s-gem", "a-gem", "mega-1", "mega-2"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e30], ids=["NaN", "infinite", "a gradient too large to square"])
def test_a_refused_batch_leaves_no_trace(method: str, scale: float) -> None:
    module = Tempered()
    learner = OnePass(module, method, learning_rate=1e-3, loss=module.loss, memory=Memory(per_task=8))
    for task in range(2):
        for step in range(3):
            learner.observe(torch.tensor([[1.0, 0.5 + step]] * 4), torch.full((4, 1), 10.0 + task))
        learner.end_task()
    learner.observe(torch.ones(4, 2), torch.full((4, 1), 9.0))
    before = packed(learner)
    module.scale = scale
    wrong = torch.tensor([[2.0, 0.5]] * 4), torch.full((4, 1), -5.0)  # in conflict with what is remembered
    for _ in range(3):
        with pytest.raises(InputError, match="nothing was learnt"):
            learner.observe(*wrong)
        assert packed(learner) == before
    module.scale = 1.0
    learner.observe(*wrong)
    assert packed(learner) != before


@pytest.mark.parametrize("wrong", [torch.ones(4, 7), torch.ones(4, 6, dtype=torch.float64)], ids=["shape", "kind"])
def test_a_first_batch_that_is_refused_does_not_decide_what_examples_look_like(wrong: Tensor) -> None:
    learner = OnePass(nn.Linear(6, 2), "er", learning_rate=0.1, loss=nn.functional.mse_loss, memory=Memory(per_task=8))
    with pytest.raises(InputError, match="nothing was learnt"):
        learner.observe(wrong, torch.ones(4, 2))
    for _ in range(2):
        learner.observe(torch.ones(4, 6), torch.ones(4, 2))
        learner.end_task()
    assert learner.memory is not None
    assert learner.memory.size == learner.memory.visible == 8


def test_a_discarded_batch_does_not_count_as_seen() -> None:
    one, other = (memory_of(Memory(per_task=9), "class-balanced") for _ in range(2))
    offered, twin = Offered(), Offered()
    for _ in range(20):
        offered(one, range(CLASSES))
        twin(other, range(CLASSES))
        twin.show(other, [0] * 11)
        other.discard()
        other.commit([])
    assert_same_state(one, other)


# ---- going on


@every_policy
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("limit", [{}, {"bytes": 40 * EACH}], ids=["no limit", "bytes"])
def test_a_restored_memory_goes_on_identically(policy: Policy, task_free: bool, where: str, limit: dict[str, int], tmp_path: Path) -> None:
    plan = Memory(per_task=15, recent=3, **limit, **place_of(where, tmp_path))
    memory, offered, random = memory_of(plan, policy, task_free), Offered(), Random(11)
    for happened in range(160):
        something(memory, offered, random)
        if happened % 40 == 5:  # on from here in another one
            fresh = memory_of(plan, policy, task_free)
            fresh.fleet.number = memory.fleet.number
            fresh.restore({name: tensor.clone() for name, tensor in memory.state().items()}, memory.counters())
            check(fresh, offered)
            assert_same_state(fresh, memory)
            assert fresh.counts() == memory.counts()
            assert fresh.groups() == memory.groups()
            same, again = Random(happened), Random(happened)
            twin = Offered()
            twin.labels, twin.task, twin.batch = list(offered.labels), list(offered.task), list(offered.batch)
            for _ in range(30):
                assert_same_batch(something(fresh, twin, same), something(memory, offered, again))
            assert_same_state(fresh, memory)
    assert len(offered.labels) > 400


def test_an_empty_memory_is_restored_as_an_empty_one() -> None:
    memory, fresh = (memory_of(Memory(), "class-balanced") for _ in range(2))
    fresh.restore(memory.state(), memory.counters())
    assert fresh.size == fresh.visible == fresh.nbytes == 0
    assert fresh.draw(3) is None
