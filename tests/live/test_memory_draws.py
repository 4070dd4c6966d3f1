"""What is drawn from a memory, what leaves no trace in it, and how it goes on when restored."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.engine.batch import Batch
from onepass.live.memory import StreamMemory
from onepass.live.plan import Policy
from onepass.live.saving import packed
from tests.live.memories import (
    CLASSES,
    EACH,
    Offered,
    assert_same_batch,
    assert_same_state,
    check,
    every_policy,
    memory_of,
    numbers_in,
    place_of,
    some_labels,
    something,
)

# ---- what is drawn


def kept_by(memory: StreamMemory, tasks: int = 3) -> Offered:
    offered = Offered()
    for task in range(tasks):
        memory.begin_task(task)
        for _ in range(4):
            offered(memory, range(CLASSES))
        memory.end_task()
    return offered


def test_a_draw_is_without_replacement_and_a_function_of_seed_and_step() -> None:
    memory, twin, other = (
        memory_of(Memory(per_task=10), "class-balanced", seed=seed) for seed in (1, 1, 2)
    )
    for one in (memory, twin, other):
        kept_by(one)
    seen: set[int] = set()
    drawn = {}
    for step in range(100, 180):
        memory.fleet.steps = step
        batch = memory.draw(7)
        assert batch is not None
        drawn[step] = [int(n) for n in batch.x[0, :, 0].tolist()]
        assert len(set(drawn[step])) == 7
        seen |= set(drawn[step])
    assert seen == set(numbers_in(memory))
    assert len({tuple(numbers) for numbers in drawn.values()}) == len(drawn)
    for step in (179, 100, 141):  # in whatever order it is asked, and however often
        twin.fleet.steps = other.fleet.steps = step
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
        memory.fleet.steps = step
        batch = memory.draw(6)
        assert batch is not None
        counts[batch.x[0, :, 0].long().numpy()] += 1
    own = counts[sorted(numbers_in(memory))]
    chance = 6 / 30
    assert own.sum() == 12_000
    squares = (own - 2000 * chance) ** 2 / (2000 * chance * (1 - chance))
    # 29 degrees of freedom: chance alone is above 70 once in 30 000 times.
    assert squares.sum() < 70


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
        own = [number for number in numbers_in(memory) if offered.task[number] == task]
        assert sorted(memory.of([task]).x[0, :, 0].tolist()) == sorted(own)


@pytest.mark.parametrize("policy", ["class-balanced", "reservoir"])
@pytest.mark.parametrize("recent", [0, 1, 7])
def test_without_tasks_nothing_recent_is_drawn_and_everything_older_is(
    policy: Policy, recent: int
) -> None:
    memory = memory_of(Memory(examples=40, recent=recent), policy, task_free=True)
    offered, random = Offered(), Random(recent)
    for step in range(80):
        assert memory.fleet.steps == step
        drawn = memory.draw(40)
        found = [] if drawn is None else [int(n) for n in drawn.x[0, :, 0].tolist()]
        assert all(step - offered.batch[number] > recent for number in found)
        if memory.size:
            ages = {number: step - offered.batch[number] for number in numbers_in(memory)}
            assert {number for number, age in ages.items() if age > recent + 1} <= set(found)
        offered(memory, some_labels(random))
        check(memory, offered)
    assert memory.visible > 20


@pytest.mark.parametrize("method", ["a-gem", "er", "mega-1", "mega-2"])
def test_what_a_task_free_method_is_given_was_in_the_stream_with_that_label_and_is_not_recent(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Batch] = []
    draw = StreamMemory.draw

    def listen(memory: StreamMemory, count: int) -> Batch | None:
        batch = draw(memory, count)
        if batch is not None:
            given.append(batch)
        return batch

    monkeypatch.setattr(StreamMemory, "draw", listen)
    asked: dict[str, Any] = {"task_free": True, "grow": True, "reference_batch": 9, "seed": 3}
    asked |= {"memory": Memory(examples=25, recent=5)}
    learner = OnePass(nn.Linear(2, 6), method, learning_rate=1e-3, **asked)
    random, labels = Random(1), list[int]()
    for step in range(60):
        # A new class now and then, and in the end more than there were outputs.
        y = [random.randrange(2 + step // 10) for _ in range(6)]
        first, labels = len(labels), labels + y
        given.clear()
        x = torch.stack([torch.arange(first, first + 6.0) / 1000, torch.ones(6)], 1)
        learner.observe(x, torch.tensor(y))
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
def test_a_module_that_works_in_place_on_its_inputs_does_not_change_what_is_remembered(
    method: str,
) -> None:
    modules = [Halving(False), Halving(True)]
    modules[1].load_state_dict(modules[0].state_dict())
    plan = Memory(per_task=10)
    learners = [OnePass(module, method, learning_rate=0.1, memory=plan) for module in modules]
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(5, 3, generator=generator)
            y = torch.randint(0, 2, (5,), generator=generator)
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


SCALES = {"NaN": float("nan"), "infinite": float("inf"), "a gradient too large to square": 1e30}


@pytest.mark.parametrize("method", ["er", "gem", "s-gem", "a-gem", "mega-1", "mega-2"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_refused_batch_leaves_no_trace(method: str, scale: float) -> None:
    module, plan = Tempered(), Memory(per_task=8)
    learner = OnePass(module, method, learning_rate=1e-3, loss=module.loss, memory=plan)
    for task in range(2):
        for step in range(3):
            learner.observe(torch.tensor([[1.0, 0.5 + step]] * 4), torch.full((4, 1), 10.0 + task))
        learner.end_task()
    learner.observe(torch.ones(4, 2), torch.full((4, 1), 9.0))
    before = packed(learner)
    module.scale = scale
    # In conflict with what is remembered.
    wrong = torch.tensor([[2.0, 0.5]] * 4), torch.full((4, 1), -5.0)
    for _ in range(3):
        with pytest.raises(InputError, match="nothing was learnt"):
            learner.observe(*wrong)
        assert packed(learner) == before
    module.scale = 1.0
    learner.observe(*wrong)
    assert packed(learner) != before


@pytest.mark.parametrize(
    "wrong", [torch.ones(4, 7), torch.ones(4, 6, dtype=torch.float64)], ids=["shape", "kind"]
)
def test_a_first_batch_that_is_refused_does_not_decide_what_examples_look_like(
    wrong: Tensor,
) -> None:
    plan, loss = Memory(per_task=8), nn.functional.mse_loss
    learner = OnePass(nn.Linear(6, 2), "er", learning_rate=0.1, loss=loss, memory=plan)
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
def test_a_restored_memory_goes_on_identically(
    policy: Policy, task_free: bool, where: str, limit: dict[str, int], tmp_path: Path
) -> None:
    plan = Memory(per_task=15, recent=3, **limit, **place_of(where, tmp_path))
    memory, offered, random = memory_of(plan, policy, task_free), Offered(), Random(11)
    for happened in range(160):
        something(memory, offered, random)
        if happened % 40 == 5:  # on from here in another one
            fresh = memory_of(plan, policy, task_free)
            fresh.fleet.steps = memory.fleet.steps
            state = {name: tensor.clone() for name, tensor in memory.state().items()}
            fresh.restore(state, memory.counters())
            check(fresh, offered)
            assert_same_state(fresh, memory)
            assert fresh.counts() == memory.counts()
            assert fresh.groups() == memory.groups()
            same, again = Random(happened), Random(happened)
            twin = copy.deepcopy(offered)
            for _ in range(30):
                assert_same_batch(something(fresh, twin, same), something(memory, offered, again))
            assert_same_state(fresh, memory)
    assert len(offered.labels) > 400


def test_an_empty_memory_is_restored_as_an_empty_one() -> None:
    memory, fresh = (memory_of(Memory(), "class-balanced") for _ in range(2))
    fresh.restore(memory.state(), memory.counters())
    assert fresh.size == fresh.visible == fresh.nbytes == 0
    assert fresh.draw(3) is None
