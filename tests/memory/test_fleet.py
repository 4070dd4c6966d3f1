"""The episodic memory of a fleet: what it keeps, and what it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.memory import FleetMemory, Policy
from onepass.protocol import Run, Setup, assemble
from onepass.streams.base import separate_heads
from tests.toys import ToyStream, fleet_of, small_net

POLICIES: list[Policy] = ["class-reservoir", "ring", "reservoir"]


def stream(count: int, runs: int = 3, task: int = 0, seed: int = 0) -> Batch:
    """Examples that carry their own number and task, with slots of that task."""
    number = torch.arange(count).expand(runs, count)
    generator = torch.Generator().manual_seed(seed)
    slots = 2 * task + torch.randint(0, 2, (runs, count), generator=generator)
    return Batch(torch.stack([number, torch.full_like(number, task), slots], dim=-1), slots)


def fill(memory: FleetMemory, batch: Batch, size: int) -> None:
    for x, slots in zip(batch.x.split(size, 1), batch.slots.split(size, 1), strict=True):
        memory.observe(Batch(x, slots))


def remembered(memory: FleetMemory) -> tuple[Tensor, Tensor, Tensor]:
    contents = memory.contents()
    assert contents is not None
    return contents[0].x, contents[0].slots, contents[1]


def numbers(memory: FleetMemory, run: int) -> list[int]:
    return sorted(remembered(memory)[0][run, : memory.sizes[run], 0].tolist())


def many_runs(runs: int) -> Fleet:
    return Fleet(small_net, range(runs), Slots(separate_heads(4, 2)), [0.1] * runs)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_memory_does_not_depend_on_how_examples_are_cut_into_batches(policy: Policy) -> None:
    everything = stream(101)
    found = []
    for size in (1, 7, 10, 101):
        memory = FleetMemory(fleet_of(), 4, 9, policy=policy)
        fill(memory, everything, size)
        memory.end_task()
        found.append([numbers(memory, r) for r in range(3)])
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("policy", POLICIES)
def test_examples_keep_their_slots_and_tasks_and_each_is_stored_once(policy: Policy) -> None:
    memory = FleetMemory(fleet_of(), 4, 10, policy=policy)
    for task in range(4):
        memory.begin_task(task)
        fill(memory, stream(60, task=task, seed=task), 7)
        memory.end_task()
    x, slots, task_of = remembered(memory)
    assert memory.sizes == [40, 40, 40]
    assert torch.equal(x[..., 2], slots)
    assert torch.equal(x[..., 1], task_of)
    assert torch.equal(slots // 2, task_of)
    for r in range(3):
        assert len({tuple(row) for row in x[r, :, :2].tolist()}) == 40
        assert torch.bincount(task_of[r]).tolist() == [10, 10, 10, 10]
        if policy != "reservoir":
            assert torch.bincount(slots[r]).tolist() == [5] * 8


def test_the_class_reservoir_samples_each_class_uniformly() -> None:
    runs, count = 4000, 40
    memory = FleetMemory(many_runs(runs), 1, 8)
    # Even and odd numbers are the two classes.
    slots = (torch.arange(count) % 2).expand(runs, count)
    fill(memory, Batch(torch.arange(count).expand(runs, count)[..., None], slots), 10)
    memory.end_task()
    kept = torch.bincount(remembered(memory)[0].flatten(), minlength=count)
    assert kept.sum() == 8 * runs
    assert stats.chisquare(kept.numpy()).pvalue > 1e-3


def test_the_plain_reservoir_samples_the_task_uniformly() -> None:
    runs, count = 4000, 30
    memory = FleetMemory(many_runs(runs), 1, 5, policy="reservoir")
    numbers = torch.arange(count).expand(runs, count)
    fill(memory, Batch(numbers[..., None], (numbers < 3).long()), 4)
    memory.end_task()
    kept = torch.bincount(remembered(memory)[0].flatten(), minlength=count)
    assert stats.chisquare(kept.numpy()).pvalue > 1e-3


def test_the_ring_keeps_the_last_examples_of_each_class() -> None:
    memory, everything = FleetMemory(fleet_of(), 4, 6, policy="ring"), stream(50)
    fill(memory, everything, 8)
    memory.end_task()
    for r in range(3):
        of_class = [[i for i in range(50) if everything.slots[r, i] == c] for c in (0, 1)]
        assert numbers(memory, r) == sorted([*of_class[0][-3:], *of_class[1][-3:]])


def test_a_task_smaller_than_its_budget_leaves_no_holes_and_nothing_invented() -> None:
    memory = FleetMemory(fleet_of(), 4, 20)
    fill(memory, stream(6), 4)
    memory.end_task()
    memory.begin_task(1)
    fill(memory, stream(5, task=1), 4)
    memory.end_task()
    x, _, task_of = remembered(memory)
    assert memory.sizes == [11, 11, 11]
    expected = [(0, i) for i in range(6)] + [(1, i) for i in range(5)]
    for r in range(3):
        found = zip(task_of[r].tolist(), x[r, :, 0].tolist(), strict=True)
        assert sorted(found) == expected


def test_the_current_task_is_invisible_until_it_ends() -> None:
    memory = FleetMemory(fleet_of(), 4, 6)
    assert memory.draw(4) is None
    fill(memory, stream(30), 10)
    assert memory.draw(4) is None
    memory.end_task()
    memory.begin_task(1)
    fill(memory, stream(30, task=1), 10)
    drawn = memory.draw(100)
    assert drawn is not None
    assert (drawn.x[..., 1] == 0).all()


def test_contents_with_room_have_one_shape_and_say_what_is_not_there() -> None:
    memory = FleetMemory(fleet_of(), 4, 6)
    for task in range(2):
        memory.begin_task(task)
        fill(memory, stream(20, task=task), 5)
        memory.end_task()
        contents, plain = memory.contents(room=True), memory.contents()
        assert contents is not None
        assert plain is not None
        (wide, owner), (narrow, expected) = contents, plain
        assert wide.x.shape[1] == wide.slots.shape[1] == owner.shape[1] == 24
        assert narrow.x.shape[1] == 6 * (task + 1)
        assert torch.equal(owner[:, : 6 * (task + 1)], expected)
        assert owner[:, 6 * (task + 1) :].eq(-1).all()


def test_the_current_task_is_visible_when_asked_for() -> None:
    memory = FleetMemory(fleet_of(), 4, 6, include_current=True)
    fill(memory, stream(3), 10)
    drawn = memory.draw(6)
    assert drawn is not None
    assert all(sorted(row) == [0, 0, 1, 1, 2, 2] for row in drawn.x[..., 0].tolist())
    memory.end_task()
    memory.begin_task(1)
    fill(memory, stream(30, task=1), 10)
    drawn = memory.draw(5)
    assert drawn is not None
    tasks = set()
    for step in range(40):
        memory.fleet.step.fill_(step)
        batch = memory.draw(5)
        assert batch is not None
        tasks |= set(batch.x[..., 1].flatten().tolist())
    assert tasks == {0, 1}


# A population that is permuted, and one that is drawn from with rejection.
@pytest.mark.parametrize("budget", [30, 400])
def test_reference_batches_are_drawn_without_replacement_uniformly_from_the_union_of_tasks(
    budget: int,
) -> None:
    memory = FleetMemory(fleet_of(runs=1), 4, budget, policy="ring")
    for task in range(2):
        memory.begin_task(task)
        fill(memory, stream(2 * budget, runs=1, task=task), 50)
        memory.end_task()
    counts: dict[Any, int] = {}
    for step in range(1500):
        memory.fleet.step.fill_(step)
        drawn = memory.draw(20)
        assert drawn is not None
        members = [tuple(row[:2]) for row in drawn.x[0].tolist()]
        assert len(set(members)) == 20
        for member in members:
            counts[member] = counts.get(member, 0) + 1
    values = list(counts.values()) + [0] * (2 * budget - len(counts))
    assert stats.chisquare(values).pvalue > 1e-3


def test_reference_batches_may_be_drawn_with_replacement_when_asked_for() -> None:
    memory = FleetMemory(fleet_of(), 4, 4, with_replacement=True)
    fill(memory, stream(30), 10)
    memory.end_task()
    drawn = memory.draw(50)
    assert drawn is not None
    assert drawn.x.shape[1] == 50
    for r, row in enumerate(drawn.x[..., 0].tolist()):
        assert set(row) == set(numbers(memory, r))
    memory.fleet.step += 1
    again = memory.draw(50)
    assert again is not None
    assert not torch.equal(drawn.x, again.x)


def test_while_the_memory_is_smaller_than_the_batch_all_of_it_is_the_batch() -> None:
    memory = FleetMemory(fleet_of(), 4, 6)
    fill(memory, stream(30), 10)
    memory.end_task()
    drawn = memory.draw(6)
    assert drawn is not None
    assert drawn.x.shape[:2] == (3, 6)
    assert drawn.sizes is None
    for r, row in enumerate(drawn.x[..., 0].tolist()):
        assert sorted(row) == numbers(memory, r)


def test_rows_with_less_in_memory_have_smaller_batches_of_their_own() -> None:
    memory = FleetMemory(fleet_of(), 4, 10, policy="reservoir")
    memory.observe(Batch(stream(9).x, stream(9).slots, sizes=(9, 0, 3)))
    memory.end_task()
    assert memory.sizes == [9, 0, 3]
    for count, sizes in ((20, (9, 0, 3)), (5, (5, 0, 3))):
        drawn = memory.draw(count)
        assert drawn is not None
        assert drawn.sizes == sizes
        assert sorted(drawn.x[2, :3, 0].tolist()) == [0, 1, 2]
    assert remembered(memory)[2].tolist() == [[0] * 9, [-1] * 9, [0] * 3 + [-1] * 6]


def test_two_tasks_with_the_same_examples_are_sampled_differently() -> None:
    memory = FleetMemory(fleet_of(), 4, 10, policy="reservoir")
    for task in range(2):
        memory.begin_task(task)
        fill(memory, stream(200), 50)
        memory.end_task()
    x = remembered(memory)[0][0, :, 0]
    assert set(x[:10].tolist()) != set(x[10:].tolist())


def test_between_two_tasks_the_memory_counts_no_example_twice() -> None:
    memory = FleetMemory(fleet_of(), 4, 6, include_current=True)
    fill(memory, stream(30), 10)
    memory.end_task()
    drawn = memory.draw(12)
    assert drawn is not None
    for r, row in enumerate(drawn.x[..., 0].tolist()):
        assert set(row) == set(numbers(memory, r))


def test_a_memory_that_shows_the_current_task_has_room_for_every_class() -> None:
    with pytest.raises(InputError, match="class"):
        FleetMemory(fleet_of(), 4, 1, include_current=True)


def test_an_inactive_run_stores_nothing() -> None:
    fleet = fleet_of()
    memory = FleetMemory(fleet, 4, 6)
    fleet.active[1] = False
    fill(memory, stream(30), 10)
    memory.end_task()
    assert memory.sizes == [6, 0, 6]


@pytest.mark.parametrize(
    ("tasks", "budget", "policy"),
    [(4, 0, "ring"), (0, 5, "ring"), (4, -1, "ring"), (4, 5, "rings")],
)
def test_an_impossible_memory_is_refused_with_a_sentence(
    tasks: int, budget: int, policy: Any
) -> None:
    with pytest.raises(InputError):
        FleetMemory(fleet_of(), tasks, budget, policy=policy)


def test_a_run_that_has_diverged_does_not_make_batches_uneven() -> None:
    """It keeps nothing any more, and what it computes is not used."""
    runs = [Run(seed, {"learning_rate": rate}) for seed, rate in enumerate((0.1, 1e9, 0.1))]
    setup = Setup(hidden=(5,), memory_per_task=4)
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS["a-gem"], runs, setup)
    assert learner.memory is not None
    for phase in range(3):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            fleet.learn(learner, batch)
        learner.end_task()
    assert fleet.diverged() == [False, True, False]
    kept = learner.memory.state()["task"][:, :-1]  # the last place takes what is thrown away
    assert (kept == 2).sum(1).tolist() == [4, 0, 4]
    assert learner.memory.sizes == [12, 12, 12]
    memory = learner.memory
    for batch in (memory.draw(7), memory.draw(100), memory.of([2, 2, 2]), memory.of([0, 1, 2])):
        assert batch is not None
        assert batch.sizes is None
    contents = learner.memory.contents()
    assert contents is not None
    assert (contents[1] == 2).sum(1).tolist() == [4, 0, 4]
