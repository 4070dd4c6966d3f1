from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.feed import Feed
from onepass.learners import METHODS
from onepass.learners.agem import project
from onepass.learners.rehearsal import Reference, Rehearsal
from onepass.learners.sgem import Options, SGem
from onepass.memory import FleetMemory, Policy
from onepass.protocol import Run, Setup, assemble
from onepass.streams.base import separate_heads
from tests.toys import ToyStream, batch_of, by_hand, fleet_of, small_net

both = pytest.mark.parametrize("method", ["gem", "s-gem"])


def sgem(fleet: Fleet, budget: int = 10) -> SGem:
    return SGem(fleet, {}, Options(), FleetMemory(fleet, 4, budget))


def of_task(batch: Batch, task: int, sizes: tuple[int, ...] | None = None) -> Batch:
    return Batch(batch.x, batch.slots % 2 + 2 * task, sizes)


def listen(learner: SGem) -> list[list[int]]:
    """The tasks that the learner asks the memory for, from now on."""
    heard: list[list[int]] = []
    of = learner.episodic.of

    def aloud(tasks: Sequence[int]) -> Batch:
        heard.append(list(tasks))
        return of(tasks)

    learner.episodic.of = aloud  # type: ignore[method-assign]
    return heard


def choices(fleet: Fleet, tasks: int, steps: int) -> Tensor:
    """The past tasks chosen in a task, `[steps, R]`; gradients are zero, to be quick."""
    learner, heard = sgem(fleet), []
    nothing = torch.zeros_like(fleet.theta), torch.zeros(fleet.runs)
    fleet.grad = lambda *_, **__: nothing  # type: ignore[method-assign]
    learner.episodic.of = lambda tasks: heard.append(list(tasks))  # type: ignore[method-assign, assign, func-returns-value]
    learner.begin_task(tasks)
    batch = batch_of(fleet.runs, 1)
    for _ in range(steps):
        fleet.learn(learner, of_task(batch, tasks))
    return torch.tensor(heard)


def ragged(seeds: Iterable[int]) -> tuple[Feed, Fleet, SGem]:
    rows = [Run(seed, {"learning_rate": 0.1}) for seed in seeds]
    feed, fleet, learner = assemble(
        ToyStream(ragged=True, shared=True),
        "ev",
        METHODS["s-gem"],
        rows,
        Setup(hidden=(5,), memory_per_task=30, batch_size=5),
    )
    assert isinstance(learner, SGem)
    return feed, fleet, learner


def test_the_past_task_is_uniform_in_every_step_and_run() -> None:
    chosen = choices(Fleet(small_net, range(40), Slots(separate_heads(4, 2)), [0.1] * 40), 3, 1000)
    pairs = (
        (chosen, 3),
        (3 * chosen[1:] + chosen[:-1], 9),
        (3 * chosen[:, 1:] + chosen[:, :-1], 9),
    )  # alone, after a step, beside a run
    for values, cells in pairs:
        assert (
            stats.chisquare(torch.bincount(values.flatten(), minlength=cells).numpy()).pvalue > 1e-3
        )


@pytest.mark.parametrize("task", [1, 2, 3])
def test_only_past_tasks_are_chosen_and_all_of_them(task: int) -> None:
    assert set(choices(fleet_of(), task, 60).flatten().tolist()) == set(range(task))


def test_the_choice_is_a_function_of_the_runs_seed_and_step() -> None:
    together = choices(fleet_of(), 3, 50)
    assert torch.equal(
        together[:, 1:2], choices(Fleet(small_net, [11], Slots(separate_heads(4, 2)), [0.1]), 3, 50)
    )
    assert torch.equal(together, choices(fleet_of(), 3, 50))
    assert len({tuple(row.tolist()) for row in together.T}) == 3


def test_a_run_of_a_ragged_fleet_chooses_as_it_would_alone() -> None:
    heard = []
    for seeds, row in (((1, 2, 3), 1), ((2,), 0)):
        feed, fleet, learner = ragged(seeds)
        chosen = listen(learner)
        mine = []
        for task in range(4):
            learner.begin_task(task)
            for batch in feed.batches(task):
                step = int(fleet.step[row])
                fleet.learn(learner, batch)
                if fleet.step[row] > step and task:
                    mine.append(chosen[-1][row])
            learner.end_task()
        heard.append(mine)
    assert heard[0] == heard[1]
    assert set(heard[0]) == {0, 1, 2}


def test_a_step_is_projected_onto_the_whole_memory_gradient_of_the_chosen_task() -> None:
    learner = sgem(fleet_of())
    fleet, heard, conflicts = learner.fleet, listen(learner), 0
    for task in range(4):
        learner.begin_task(task)
        fleet.learn(learner, of_task(batch_of(size=20, seed=task), task))
        if task < 3:
            learner.end_task()
    contents = learner.episodic.contents()
    assert contents is not None
    kept, owner = contents
    fleet.learning_rate.fill_(1.0)
    batch, counted = of_task(batch_of(size=8, seed=9), 3), learner.violations.clone()
    for _ in range(25):
        fleet.theta.copy_(torch.randn_like(fleet.theta) * 0.7)
        before = fleet.theta.clone()
        g = [by_hand(fleet, batch, r)[0] for r in range(3)]
        mine = [[owner[r] == k for k in range(3)] for r in range(3)]
        references = [
            [by_hand(fleet, Batch(kept.x[:, m], kept.slots[:, m]), r)[0] for m in mine[r]]
            for r in range(3)
        ]
        fleet.learn(learner, batch)
        for r in range(3):
            g_ref = references[r][heard[-1][r]]
            product = g[r] @ g_ref
            expected = g[r] - product / (g_ref @ g_ref) * g_ref if product < 0 else g[r]
            assert torch.allclose((before - fleet.theta)[r], expected, atol=1e-5)
            counted[r] += int(product < 0)
            conflicts += int(product < 0)
    assert torch.equal(learner.violations, counted)
    assert conflicts > 10


def test_a_resumed_learner_goes_on_with_the_same_choices() -> None:
    feed, fleet, learner = ragged((1, 2, 3))
    for task in range(4):
        learner.begin_task(task)
        for number, batch in enumerate(feed.batches(task)):
            if (task, number) == (3, 2):
                saved = [
                    {name: t.clone() for name, t in part.state().items()}
                    for part in (fleet, learner, learner.episodic)
                ]
                counters = fleet.counters(), learner.counters()
                heard = listen(learner)
            fleet.learn(learner, batch)
        if task < 3:
            learner.end_task()
    _, other, resumed = ragged((1, 2, 3))
    resumed.restore(saved[1], counters[1])
    other.restore(saved[0], counters[0])
    resumed.episodic.restore(saved[2], {"task": 3})
    other.steps_in_task = 2
    again = listen(resumed)
    for batch in feed.batches(3, skip=2):
        other.learn(resumed, batch)
    assert again == heard
    assert len(heard) > 2
    assert torch.equal(other.theta, fleet.theta)
    assert torch.equal(resumed.violations, learner.violations)


def rehearsing(method: str, fleet: Fleet, budget: int) -> Rehearsal:
    made = METHODS[method].learner
    learner = made(
        fleet, {"margin": torch.zeros(fleet.runs, 1)}, made.options(), FleetMemory(fleet, 4, budget)
    )
    assert isinstance(learner, Rehearsal)
    return learner


@both
def test_the_first_task_is_plain_sgd(method: str) -> None:
    rows = [Run(s, {"learning_rate": 0.1, "margin": 0.5}) for s in (1, 2)]
    feed, fleet, learner = assemble(
        ToyStream(), "ev", METHODS[method], rows, Setup(hidden=(5,), memory_per_task=4)
    )
    _, plain, van = assemble(ToyStream(), "ev", METHODS["van"], rows, Setup(hidden=(5,)))
    learner.begin_task(0)
    for batch in feed.batches(0):
        fleet.learn(learner, batch)
        plain.learn(van, batch)
    assert torch.equal(fleet.theta, plain.theta)


@both
def test_a_run_that_diverges_in_a_step_counts_no_violation_in_it(method: str) -> None:
    learner, batch = rehearsing(method, fleet_of(), 10), batch_of(size=8)
    fleet = learner.fleet
    fleet.learn(learner, of_task(batch, 0))
    learner.end_task()
    learner.begin_task(1)
    fleet.theta[:, -48:] *= (
        1e6  # the head: the hidden layer is not saturated, and its gradients conflict
    )
    g, _ = fleet.grad(of_task(batch, 1), theta=fleet.theta)
    assert project(g, fleet.grad(learner.episodic.of([0, 0, 0]), theta=fleet.theta)[0])[1].any()
    fleet.learn(learner, of_task(batch, 1))
    assert fleet.diverged() == [True, True, True]
    assert learner.violations is not None
    assert learner.violations.tolist() == [0, 0, 0]


@both
def test_a_past_task_of_which_nothing_was_kept_is_no_constraint(method: str) -> None:
    learner, batch = (
        rehearsing(method, fleet_of(), budget=1),
        batch_of(size=8),
    )  # room for the first class alone
    learner.fleet.learn(learner, Batch(batch.x, torch.ones_like(batch.slots)))
    learner.end_task()
    assert learner.episodic.sizes == [0, 0, 0]
    learner.begin_task(1)
    learner.fleet.learn(learner, of_task(batch, 1))
    assert learner.fleet.diverged() == [False, False, False]


def test_with_one_past_task_gem_and_s_gem_are_a_gem_on_that_tasks_whole_memory() -> None:
    ended: dict[str, tuple[Tensor, Tensor]] = {}
    for name, options in (("gem", None), ("s-gem", None), ("a-gem", Reference(100))):
        rows = [Run(seed, {"learning_rate": 0.1, "margin": 0.0}) for seed in (1, 2, 3)]
        feed, fleet, learner = assemble(
            ToyStream(shared=True),
            "ev",
            METHODS[name],
            rows,
            Setup(hidden=(12,), memory_per_task=8),
            options,
        )
        for task, passes in ((0, 1), (1, 20)):
            learner.begin_task(task)
            for _ in range(passes):
                for batch in feed.batches(task):
                    fleet.learn(learner, batch)
            learner.end_task()
        assert learner.violations is not None
        ended[name] = fleet.theta, learner.violations
    for name in ("s-gem", "a-gem"):
        assert torch.allclose(ended[name][0], ended["gem"][0], atol=1e-5)
        assert torch.equal(ended[name][1], ended["gem"][1])
    assert ended["gem"][1].min() > 5


POLICIES: list[Policy] = ["class-reservoir", "ring", "reservoir"]
SIZES = [(9, 4, 0), (3, 8, 5), (7, 7, 7)]


def filled(policy: Policy, budget: int) -> FleetMemory:
    """Three past tasks of unequal sizes and a part of a fourth; examples carry number and task."""
    memory = FleetMemory(fleet_of(), 4, budget, policy=policy)
    for task, sizes in enumerate([*SIZES, (6, 6, 6)]):
        memory.begin_task(task)
        number = torch.arange(9).expand(3, 9)
        memory.observe(
            Batch(
                torch.stack([number, torch.full_like(number, task)], -1),
                number % 2 + 2 * task,
                sizes,
            )
        )
        if task < 3:
            memory.end_task()
    return memory


def rows_of(memory: FleetMemory, tasks: list[int]) -> list[list[tuple[int, int, int]]]:
    """Number, task and slot of what is given for each run."""
    batch = memory.of(tasks)
    cut = [
        (batch.x[r, :n].tolist(), batch.slots[r, :n].tolist())
        for r, n in enumerate(batch.lengths())
    ]
    return [sorted((*x, s) for x, s in zip(xs, slots, strict=True)) for xs, slots in cut]


ASKED = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]]


@pytest.mark.parametrize("tasks", ASKED)
def test_the_memory_of_a_task_is_all_that_was_kept_of_it(tasks: list[int]) -> None:
    everything = [[(i, k, i % 2 + 2 * k) for i in range(SIZES[k][r])] for r, k in enumerate(tasks)]
    assert rows_of(filled("reservoir", 20), tasks) == everything


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tasks", ASKED)
def test_the_memory_of_a_task_is_the_same_after_restoring(policy: Policy, tasks: list[int]) -> None:
    memory = filled(policy, 5)
    contents = memory.contents()
    assert contents is not None
    batch, owner = contents
    kept = [
        sorted(
            (*x, s)
            for x, s, k in zip(
                batch.x[r].tolist(), batch.slots[r].tolist(), owner[r].tolist(), strict=True
            )
            if k == tasks[r]
        )
        for r in range(3)
    ]
    restored = FleetMemory(fleet_of(), 4, 5, policy=policy)
    restored.restore({name: t.clone() for name, t in memory.state().items()}, memory.counters())
    assert rows_of(memory, tasks) == rows_of(restored, tasks) == kept
