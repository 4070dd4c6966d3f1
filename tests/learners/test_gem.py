from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners import METHODS
from onepass.learners.agem import project
from onepass.learners.base import NoOptions
from onepass.learners.gem import Gem, Options, closest, nonnegative
from onepass.learners.rehearsal import Rehearsal
from onepass.learners.van import Van
from onepass.memory import FleetMemory
from onepass.protocol import Run, Setup, assemble
from tests.toys import ToyStream, batch_of, by_hand, fleet_of

Array = NDArray[np.float64]


def unit(rows: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def by_enumeration(g: Array, constraints: Array) -> Array:
    """The closest feasible vector.

    For every set of constraints that may be tight, project onto where all of them are.
    """
    rows = unit(constraints)
    slack = 1e-12 * np.linalg.norm(g)
    found: list[Array] = []
    for tight in chain.from_iterable(
        combinations(range(len(rows)), k) for k in range(len(rows) + 1)
    ):
        some = rows[list(tight)]
        z = g - np.linalg.pinv(some, rcond=1e-10) @ (some @ g)
        if (rows @ z >= -slack).all():
            found.append(z)
    return min(found, key=lambda z: float(np.linalg.norm(z - g)))


def by_dual(g: Array, G: Array, margin: float, ridge: float) -> Array:
    """`min ½ vᵀ (G Gᵀ + ridge I) v + gᵀ Gᵀ v`, `v ≥ margin`, by a generic solver.

    In units of the rows' lengths it converges.
    """
    units = np.linalg.norm(g) / np.linalg.norm(G, axis=1)
    Q, q = (
        (G @ G.T + ridge * np.eye(len(G))) * np.outer(units, units) / (g @ g),
        units * (G @ g) / (g @ g),
    )
    solved = minimize(
        lambda u: u @ Q @ u / 2 + q @ u,
        margin / units,
        jac=lambda u: Q @ u + q,
        bounds=[(least, None) for least in margin / units],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return np.asarray(g + G.T @ (units * solved.x))


def problem(
    random: np.random.Generator, most: int = 8, closeness: float = -9
) -> tuple[Array, Array]:
    """A gradient and constraints: some zero, (almost) repeated or (almost) opposite."""
    n, size = int(random.integers(1, most + 1)), int(random.integers(2, 13))
    G, g = random.standard_normal((n, size)), random.standard_normal(size)
    for k in range(1, n):
        other, little = G[random.integers(k)], 10 ** random.uniform(closeness, -2)
        kinds = [
            G[k],
            G[k],
            0 * other,
            other,
            -other,
            other + little * G[k],
            -other + little * G[k],
        ]
        G[k] = kinds[random.integers(len(kinds))]
    return g, G


def test_the_closest_vector_violates_no_constraint_by_more_than_rounding() -> None:
    random = np.random.default_rng(0)
    for _ in range(4_000):
        g, G = problem(random)
        a = torch.from_numpy(g * 10 ** random.uniform(-12, 6)).float()
        constraints = torch.from_numpy(G * 10 ** random.uniform(-12, 6, (len(G), 1))).float()
        z, rows = closest(a, constraints).double().numpy(), unit(constraints.double().numpy())
        length = float(a.double().norm())
        assert (rows @ z).min() >= -1e-6 * length
        assert np.linalg.norm(z) <= (1 + 1e-6) * length


def test_the_closest_vector_is_the_one_that_trying_all_active_sets_finds() -> None:
    random = np.random.default_rng(1)
    moved = 0
    for _ in range(400):
        g, G = problem(random, most=4, closeness=-4)
        z, expected = (
            closest(torch.from_numpy(g), torch.from_numpy(G)).numpy(),
            by_enumeration(g, G),
        )
        assert np.linalg.norm(z - expected) <= 1e-6 * np.linalg.norm(g)
        moved += not np.allclose(expected, g)
    assert moved > 200


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_with_one_constraint_it_is_the_closed_form_of_a_gem(scale: float) -> None:
    for _ in range(100):
        g, reference = torch.randn(1, 20), torch.randn(1, 20) * scale
        assert torch.allclose(closest(g[0], reference), project(g, reference)[0][0], atol=2e-6)


def test_a_gradient_that_violates_nothing_stays_bit_identical() -> None:
    for _ in range(100):
        g, G = torch.randn(20), torch.randn(4, 20)
        G *= torch.where(G @ g < 0, -1.0, 1.0)[:, None]
        assert torch.equal(closest(g, G), g)
    assert torch.equal(closest(torch.zeros(5), torch.randn(3, 5)), torch.zeros(5))
    assert torch.equal(closest(torch.ones(5), torch.zeros(3, 5)), torch.ones(5))


@pytest.mark.parametrize(("constraints", "expected"), [(3, [0.0, 2.5, 1.5]), (2, [0.0, 2.5, 1.0])])
def test_a_margin_pushes_satisfied_constraints_too(constraints: int, expected: list[float]) -> None:
    assert closest(
        torch.tensor([-1.0, 2.0, 1.0]), torch.eye(3)[:constraints], margin=0.5
    ).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("margin", "ridge"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1e-3), (0.5, 1e-3), (2.0, 0.1)]
)
@pytest.mark.parametrize("scale", [0.03, 1.0, 20.0])
def test_margin_and_ridge_are_those_of_gems_quadratic_program(
    margin: float, ridge: float, scale: float
) -> None:
    random = np.random.default_rng(3)
    for _ in range(30):
        n = int(random.integers(1, 6))
        g, G = (
            random.standard_normal(9) * scale,
            random.standard_normal((n, 9)) * scale * random.uniform(0.5, 2, (n, 1)),
        )
        found = closest(torch.from_numpy(g), torch.from_numpy(G), margin, ridge).numpy()
        assert np.linalg.norm(found - by_dual(g, G, margin, ridge)) <= 1e-4 * max(
            np.linalg.norm(g), margin * np.linalg.norm(G)
        )


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_ridge_leaves_the_constraint_violated_where_gradients_are_small(scale: float) -> None:
    g, G = scale * torch.tensor([-1.0, 1.0]).double(), scale * torch.tensor([[1.0, 0.0]]).double()
    left = 1e-3 / (scale**2 + 1e-3)  # v = s² / (s² + ridge)
    assert torch.allclose(
        closest(g, G, ridge=1e-3) / scale, torch.tensor([-left, 1.0]).double(), atol=1e-9
    )
    assert torch.allclose(closest(g, G) / scale, torch.tensor([0.0, 1.0]).double(), atol=1e-12)


def test_without_margin_and_ridge_the_lengths_of_constraints_do_not_matter() -> None:
    random = np.random.default_rng(4)
    for _ in range(100):
        g, G = (
            torch.from_numpy(random.standard_normal(8)),
            torch.from_numpy(random.standard_normal((4, 8))),
        )
        lengths = torch.from_numpy(10 ** random.uniform(-8, 8, (4, 1)))
        assert torch.allclose(closest(g, G * lengths), closest(g, G), atol=1e-9)
        assert torch.allclose(closest(g * 1e-9, G), closest(g, G) * 1e-9, rtol=1e-9, atol=1e-18)


def test_least_squares_answers_are_optimal_where_scipys_are_not() -> None:
    random = np.random.default_rng(5)
    for _ in range(1000):
        n = int(random.integers(2, 9))
        A, b = random.standard_normal((n + 3, n)), random.standard_normal(n + 3)
        target = b - A @ nnls(A, b)[0]  # of this one the optimum is 0
        x = nonnegative(A, target)
        downhill = A.T @ (target - A @ x)
        assert x.min() >= 0
        assert downhill.max() <= 1e-8
        assert np.abs(x * downhill).max() <= 1e-8


def gem(
    fleet: Fleet,
    margin: float = 0.0,
    ridge: float = 0.0,
    budget: int = 10,
    include_current: bool = False,
) -> Gem:
    memory = FleetMemory(fleet, 4, budget, include_current=include_current)
    return Gem(fleet, {"margin": torch.full((fleet.runs, 1), margin)}, Options(ridge), memory)


wherever_it_is_solved = pytest.mark.parametrize(
    "on_device", [False, True]
)  # by QR and SciPy, or as on a GPU


def of_task(batch: Batch, task: int, sizes: tuple[int, ...] | None = None) -> Batch:
    return Batch(batch.x, batch.slots % 2 + 2 * task, sizes)


def after_tasks(past: int, **more: object) -> tuple[Gem, Batch]:
    """A learner with some tasks in memory that has begun the next, and a batch of that."""
    learner = gem(fleet_of(), **more)  # type: ignore[arg-type]
    for task in range(past + 1):
        learner.begin_task(task)
        learner.fleet.learn(learner, of_task(batch_of(size=20, seed=task), task))
        if task < past:
            learner.end_task()
    learner.fleet.learning_rate.fill_(1.0)
    return learner, of_task(batch_of(size=8, seed=9), past)


def memory_gradient(learner: Rehearsal, run: int, task: int) -> Array:
    contents = learner.episodic.contents()
    assert contents is not None
    batch, owner = contents
    mine = owner[run] == task
    return (
        by_hand(learner.fleet, Batch(batch.x[:, mine], batch.slots[:, mine]), run)[0]
        .double()
        .numpy()
    )


def elsewhere(fleet: Fleet) -> Tensor:
    fleet.theta.copy_(torch.randn_like(fleet.theta) * 0.7)
    return fleet.theta.clone()


@pytest.mark.parametrize("include_current", [False, True])
def test_a_step_respects_the_whole_memory_of_every_past_task_over_all_parameters(
    include_current: bool,
) -> None:
    learner, batch = after_tasks(3, include_current=include_current)
    fleet, expected, needed = learner.fleet, learner.violations.clone(), np.zeros(3)
    for _ in range(20):
        before = elsewhere(fleet)
        g = [by_hand(fleet, batch, r)[0].double().numpy() for r in range(3)]
        G = [np.stack([memory_gradient(learner, r, k) for k in range(3)]) for r in range(3)]
        fleet.learn(learner, batch)
        for r in range(3):
            solution = by_enumeration(g[r], G[r])
            taken = (before - fleet.theta)[r].double().numpy()
            assert np.allclose(taken, solution, atol=1e-5)
            assert (unit(G[r]) @ taken).min() >= -1e-5
            expected[r] += int((G[r] @ g[r] < 0).any())
            needed += [
                np.linalg.norm(by_enumeration(g[r], np.delete(G[r], k, 0)) - solution) > 1e-3
                for k in range(3)
            ]
            if not np.allclose(solution, g[r]):
                assert (
                    taken[-8:-2] != 0
                ).any()  # biases of old heads, of which the current task's gradient knows nothing
    assert (needed > 3).all()  # no constraint could have been left out
    assert torch.equal(learner.violations, expected)


def test_a_step_without_violation_is_exactly_plain_sgd() -> None:
    learner, batch = after_tasks(2)
    fleet, plain = learner.fleet, fleet_of()
    van = Van(plain, {}, NoOptions(), None)
    plain.learning_rate.fill_(1.0)
    same = 0
    for _ in range(20):
        plain.theta.copy_(elsewhere(fleet))
        counted = learner.violations.clone()
        fleet.learn(learner, batch)
        plain.learn(van, batch)
        for r in range(3):
            untouched = bool(learner.violations[r] == counted[r])
            assert torch.equal(fleet.theta[r], plain.theta[r]) == untouched
            same += untouched
    assert 5 < same < 55


@wherever_it_is_solved
def test_the_whole_vector_decides_not_its_parts(on_device: bool) -> None:
    learner = gem(fleet_of(runs=1))
    learner._on_device = on_device
    g, reference = torch.tensor([[1.0, 0.0, 1.0, 1.0]]), torch.tensor([[-1.0, 0.0, 2.0, 2.0]])
    assert torch.equal(learner.respect(g.clone(), [reference]), g)
    assert learner.violations.tolist() == [0]


@wherever_it_is_solved
def test_margins_are_the_rows_own_and_the_ridge_is_everybodys(on_device: bool) -> None:
    learner = gem(fleet_of(), ridge=1e-3)
    learner = Gem(
        learner.fleet,
        {"margin": torch.tensor([[0.0], [0.5], [2.0]])},
        Options(1e-3),
        learner.episodic,
    )
    learner._on_device = on_device
    g, constraints = torch.randn(3, 9), [torch.randn(3, 9) for _ in range(3)]
    constraints[0] = -g + 0.1 * torch.randn(3, 9)
    found = learner.respect(g.clone(), constraints)
    for r, margin in enumerate((0.0, 0.5, 2.0)):
        G = torch.stack([c[r] for c in constraints]).double().numpy()
        assert np.allclose(
            found[r].numpy(), by_dual(g[r].double().numpy(), G, margin, 1e-3), atol=1e-4
        )


@wherever_it_is_solved
def test_a_step_with_several_violations_counts_once_and_only_for_active_runs(
    on_device: bool,
) -> None:
    learner = gem(fleet_of())
    learner._on_device = on_device
    learner.fleet.active[1] = False
    g = torch.ones(3, 4)
    violating, harmless = -torch.ones(3, 4), torch.ones(3, 4)
    harmless[2] = violating[2] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    learner.respect(g, [violating, 2 * violating, harmless])
    assert learner.violations.tolist() == [1, 0, 0]


@wherever_it_is_solved
def test_zero_gradients_and_rows_that_are_not_numbers_disturb_nobody(on_device: bool) -> None:
    learner = gem(fleet_of(runs=5))
    learner._on_device = on_device
    g, constraints = torch.randn(5, 9), [torch.randn(5, 9), torch.randn(5, 9)]
    constraints[0] = -g + 0.1 * torch.randn(5, 9)  # all would be violated
    g[1], constraints[1][2], constraints[1][3], g[4, 3], constraints[0][4, 3] = (
        0,
        torch.nan,
        0,
        torch.inf,
        -1,
    )
    found = learner.respect(g.clone(), constraints)
    assert torch.equal(found[[1, 2, 4]], g[[1, 2, 4]])
    for r in (0, 3):
        assert torch.allclose(
            found[r],
            closest(g[r], torch.stack([c[r] for c in constraints])),
            atol=1e-5 if on_device else 0,
            rtol=0,
        )
    assert learner.violations.tolist() == [1, 0, 0, 1, 0]


def test_tasks_smaller_than_their_memory_are_constraints_of_their_own_size() -> None:
    rows = [Run(seed, {"learning_rate": 0.3, "margin": 0.0}) for seed in (1, 2, 3)]
    feed, fleet, learner = assemble(
        ToyStream(ragged=True, shared=True),
        "ev",
        METHODS["gem"],
        rows,
        Setup(hidden=(5,), memory_per_task=60),
    )
    assert isinstance(learner, Gem)
    compared = 0
    for phase in range(3):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            before, steps = fleet.theta.clone(), fleet.step.clone()
            g = [
                by_hand(fleet, batch, r)[0].double().numpy() if batch.lengths()[r] else np.zeros(1)
                for r in range(3)
            ]
            G = [[memory_gradient(learner, r, k) for k in range(phase)] for r in range(3)]
            fleet.learn(learner, batch)
            for r in range(3):
                if fleet.step[r] > steps[r] and phase:
                    taken = (before - fleet.theta)[r].double().numpy() / 0.3
                    assert np.allclose(taken, by_enumeration(g[r], np.stack(G[r])), atol=1e-4)
                    compared += 1
        learner.end_task()
        assert learner.episodic.sizes == [
            sum(feed.lengths(k)[r] for k in range(phase + 1)) for r in range(3)
        ]
    assert compared > 15
    assert len(set(learner.episodic.sizes)) > 1
    assert learner.violations.min() > 0
