from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from onepass.engine import quadratic
from onepass.engine.quadratic import solve
from onepass.learners.gem import closest
from tests.engine.interpreter import DEVICE, INTERPRETED, needs_kernels

Array = NDArray[np.float64]
SETTINGS = [(0.0, 0.0), (0.5, 0.0), (0.0, 1e-3), (0.5, 1e-3), (2.0, 0.1)]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def unit(rows: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def problem(seed: int, n: int, size: int, *, little: float = 0.0) -> tuple[Array, Array]:
    """A gradient that violates most of its constraints.

    Some of these are zero, repeated or opposite, or so up to something `little`.
    """
    random = np.random.default_rng(seed)
    common, g = random.standard_normal((2, size))
    G = random.standard_normal((n, size)) + random.uniform(0, 2) * common
    for k in range(1, n):
        other = G[random.integers(k)]
        kinds = [G[k], G[k], G[k], G[k], 0 * other, other + little * G[k], -other + little * G[k]]
        G[k] = kinds[random.integers(len(kinds))]
    return g - random.uniform(0, 2) * common, G * 10 ** random.uniform(-6, 6, (n, 1))


def solved(
    g: Array, G: Array, margin: float = 0.0, ridge: float = 0.0, noise: float = quadratic.NOISE
) -> tuple[Array, Array]:
    """`v` and `g̃ = g + Gᵀ v`."""
    v, ended = solve(
        torch.from_numpy(G @ G.T)[None],
        torch.from_numpy(G @ g)[None],
        torch.tensor([margin]),
        ridge,
        noise,
    )
    assert v.dtype == torch.float64
    assert ended.tolist() == [True]
    return v[0].numpy(), g + G.T @ v[0].numpy()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), size=st.integers(2, 40))
# These need two gradients that are opposite but for 0.005, an eigenvalue of 0.8 noise, and
# of less than a hundredth of it.
@example(seed=5407, n=8, size=2)
@example(seed=9498, n=20, size=3)
def test_the_gradient_is_the_one_that_nonnegative_least_squares_finds(
    seed: int, n: int, size: int
) -> None:
    g, G = problem(seed, n, size)
    columns, length = unit(G).T, np.linalg.norm(g)
    multipliers = nnls(columns, -g)[0]
    least = np.linalg.svd(columns[:, multipliers > 0], compute_uv=False).min(initial=1)
    # Products are exact here but for the rounding of float64, so there may be less noise.
    for noise, found in ((quadratic.NOISE, least**2 >= quadratic.NOISE / 2), (2.0**-40, True)):
        _, z = solved(g, G, noise=noise)
        assert np.linalg.norm(z - g - columns @ multipliers) <= 1e-5 * length or not found
        assert (unit(G) @ z).min() >= -(1e-6 if found else np.sqrt(noise)) * length
        assert np.linalg.norm(z) <= (1 + 1e-9) * length


@pytest.mark.parametrize(("margin", "ridge"), SETTINGS)
def test_margin_and_ridge_are_those_of_the_solver_on_the_host(margin: float, ridge: float) -> None:
    random = np.random.default_rng(0)
    for n in (1, 2, 5, 9):
        for scale in (0.03, 1.0, 20.0):
            g = random.standard_normal(12) * scale
            G = random.standard_normal((n, 12)) * random.uniform(0.5, 2, (n, 1)) * scale
            expected = closest(torch.from_numpy(g), torch.from_numpy(G), margin, ridge).numpy()
            _, z = solved(g, G, margin, ridge)
            assert np.linalg.norm(z - expected) <= 1e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize(("margin", "ridge"), SETTINGS)
@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 40, 100])
def test_the_solution_satisfies_the_optimality_conditions(
    n: int, margin: float, ridge: float
) -> None:
    random = np.random.default_rng(n)
    for correlation in (0.0, 0.5, 0.95, 0.999):
        common = random.standard_normal(150)
        own = random.standard_normal((n, 150))
        G = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
        g = random.standard_normal(150) - common
        v, _ = solved(g, G, margin, ridge)
        w = G @ (g + G.T @ v) + ridge * v
        length = np.linalg.norm(g) + margin * np.linalg.norm(G.sum(0))
        size = np.linalg.norm(G, axis=1) * length
        assert v.min() >= margin
        assert (w / size).min() >= -1e-8
        assert np.abs((v - margin) * w / size).max() <= 1e-8


def test_a_hundred_constraints_in_few_dimensions_are_met() -> None:
    for seed in range(5):
        g, G = problem(seed, 100, 30)
        _, z = solved(g, G)
        expected = closest(torch.from_numpy(g), torch.from_numpy(unit(G))).numpy()
        assert np.linalg.norm(z - expected) <= 1e-6 * np.linalg.norm(g)


@pytest.mark.parametrize("little", [1e-3, 1e-4, 1e-6, 1e-9])
def test_almost_equal_and_almost_opposite_constraints_are_met_to_the_root_of_the_noise(
    little: float,
) -> None:
    for seed in range(60):
        g, G = problem(seed, 8, 20, little=little)
        for noise, most in ((quadratic.NOISE, 1e-3), (2.0**-40, 1e-6)):
            _, z = solved(g, G, noise=noise)
            assert (unit(G) @ z).min() >= -most * np.linalg.norm(g)
            assert np.linalg.norm(z) <= (1 + 1e-6) * np.linalg.norm(g)


def with_errors(
    seed: int, n: int, size: int, little: float, error: float
) -> tuple[bool, float, float]:
    """Whether a problem is solved if sums are only known to a relative error.

    Also by how much a constraint is violated, and the length of the result, both by ‖g‖.
    """
    g, G = problem(seed, n, size, little=little)
    random, lengths = np.random.default_rng(seed), np.linalg.norm(G, axis=1)
    errors = error * random.standard_normal((n, n))
    gram = G @ G.T + (errors + errors.T) / 2 * np.outer(lengths, lengths)
    products = G @ g + error * random.standard_normal(n) * lengths * np.linalg.norm(g)
    v, ended = solve(torch.from_numpy(gram)[None], torch.from_numpy(products)[None], torch.zeros(1))
    z = (g + G.T @ v[0].numpy()) / np.linalg.norm(g)
    return bool(ended.all()), -float((unit(G) @ z).min()), float(np.linalg.norm(z))


@pytest.mark.parametrize(
    ("n", "size", "little", "most"),
    [(10, 20, 0.0, 1e-5), (10, 20, 1e-3, 1e-3), (10, 20, 1e-6, 1e-4), (100, 30, 0.0, 1e-4)],
)
def test_errors_of_single_precision_stay_small(
    n: int, size: int, little: float, most: float
) -> None:
    for seed in range(600 // n):
        ended, violated, length = with_errors(seed, n, size, little, 1e-6)
        assert ended
        assert violated <= most
        assert length <= 1 + most


@pytest.mark.parametrize("little", [0.0, 1e-3])
def test_errors_beyond_the_noise_are_not_multiplied(little: float) -> None:
    found = [with_errors(seed, 10, 20, little, 1e-5) for seed in range(200)]
    assert sum(ended for ended, _, _ in found) >= 195
    for ended, violated, length in found:
        assert length <= 1 + 1e-3
        assert violated <= 1e-2 or not ended


def test_equal_gradients_share_their_multiplier() -> None:
    v, _ = solved(np.array([-1.0, 2.0]), np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    assert np.allclose(v, [0.5, 0.5, 0], atol=1e-9)


def test_opposite_gradients_leave_nothing_along_them() -> None:
    for sign in (-1, 1):
        _, z = solved(np.array([sign * 3.0, 2.0]), np.array([[1.0, 0.0], [-1.0, 0.0]]))
        assert np.allclose(z, [0, 2], atol=1e-9)


def test_a_gradient_of_zero_is_no_constraint() -> None:
    G = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    for margin, expected in ((0.0, 1.0), (0.5, 1.0), (2.0, 2.0)):
        v, _ = solved(np.array([-1.0, 2.0]), G, margin)
        assert np.allclose(v, [margin, expected, margin], atol=1e-9)
    assert solved(np.array([-1.0, 2.0]), 1e-20 * G)[0].tolist() == [0, 0, 0]


def test_a_run_that_violates_nothing_has_only_zeros() -> None:
    G = np.random.default_rng(0).standard_normal((6, 20))
    g = np.random.default_rng(1).standard_normal(20)
    G *= np.where(G @ g < 0, -1, 1)[:, None]
    assert solved(g, G)[0].tolist() == [0.0] * 6
    assert solved(0 * g, G)[0].tolist() == [0.0] * 6


def batch(n: int, runs: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    problems = [problem(seed, n, 2 * n + 2) for seed in range(runs)]
    grams, products = (
        torch.from_numpy(np.stack([f(g, unit(G)) for g, G in problems]))
        for f in (lambda g, G: G @ G.T, lambda g, G: G @ g)
    )
    return grams, products, torch.tensor([0.0, 0.5, 1.0]).repeat(runs)[:runs]


def test_the_order_of_the_numbers_in_memory_does_not_matter() -> None:
    inputs = batch(9)
    gram, products, margin = (x.movedim(0, -1).contiguous().movedim(-1, 0) for x in inputs)
    assert gram.stride() != inputs[0].stride()
    assert torch.allclose(solve(gram, products, margin)[0], solve(*inputs)[0], rtol=1e-9, atol=1e-9)


def test_a_run_does_not_depend_on_its_neighbours() -> None:
    grams, products, margins = batch(9)
    together, _ = solve(grams, products, margins, 1e-3)
    products[5] *= torch.nan
    still, ended = solve(grams, products, margins, 1e-3)
    assert ended.tolist() == [True] * 5 + [False]
    assert torch.equal(still[:5], together[:5])
    for r in range(5):
        alone, _ = solve(grams[r : r + 1], products[r : r + 1], margins[r : r + 1], 1e-3)
        assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_run_with_a_number_that_is_not_finite_is_not_solved(wrong: float) -> None:
    for where in range(3):
        grams, products, margins = batch(4, 2)
        (grams[1, 2], grams[1, :, 2], products[1])[where][1] = wrong
        v, ended = solve(grams, products, margins)
        assert ended.tolist() == [True, False]
        assert v[1].tolist() == [0.5] * 4


def test_the_rule_of_the_least_index_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (3, 16, 40):
        gram = batch(n)[0]
        expected, _ = solve(*batch(n))
        with monkeypatch.context() as patched:
            patched.setattr(quadratic, "PATIENCE", 0)
            patched.setattr(quadratic, "MOST", 10**6)
            found, ended = solve(*batch(n))
        assert ended.all()
        # Of almost dependent constraints the multipliers may differ by more than what they make.
        assert torch.allclose(
            (gram @ found[..., None]), (gram @ expected[..., None]), rtol=1e-6, atol=1e-6
        )
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_run_with_too_many_exchanges_or_no_gram_matrix_is_not_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indefinite = torch.tensor([[[1.0, -2.0], [-2.0, 1.0]]], dtype=torch.float64)
    v, ended = solve(indefinite, -torch.ones(1, 2, dtype=torch.float64), torch.zeros(1))
    assert ended.tolist() == [False]
    assert v.tolist() == [[0, 0]]
    monkeypatch.setattr(quadratic, "MOST", 0.5)  # one for two constraints
    v, ended = solve(
        torch.eye(2, dtype=torch.float64)[None],
        torch.tensor([[-2.0, -0.501]], dtype=torch.float64),
        torch.tensor([0.5]),
    )
    assert ended.tolist() == [False]
    assert v.tolist() == [[0.5, 0.5]]


def test_a_run_takes_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic, "MOST", 3)
    for n in (4, 16, 64):
        assert solve(*batch(n))[1].all()


def test_sizes_beyond_the_kernel_are_solved_on_the_host() -> None:
    assert not quadratic.available(max(quadratic.WARPS) + 1)


@needs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize(
    "n", [2, 16, 17, 65] if INTERPRETED else [1, 2, 15, 16, 17, 32, 33, 64, 65, 100, 128, 129]
)
def test_the_kernel_finds_what_the_host_finds(
    n: int, ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = batch(n, 4 if INTERPRETED else 12)
    inputs[1][3] = torch.nan
    expected, ended = solve(*inputs, ridge)
    if INTERPRETED:
        monkeypatch.setattr(quadratic, "_on_host", quadratic._on_device)
    there = [x.to(DEVICE) for x in inputs]
    runs_last = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in there]
    for gram, products, margin in (there, runs_last):
        found, ended_too = solve(gram, products, margin, ridge)
        assert ended.tolist() == ended_too.tolist()
        # Compare what multipliers do to the gradient: where constraints depend on each other,
        # different multipliers do the same.
        other = (found.cpu() - expected)[:, :, None]
        effect = (other.mT @ inputs[0] @ other).flatten().clamp(min=0).sqrt()
        assert effect.tolist() == pytest.approx([0] * len(expected), abs=1e-6)


@cuda
def test_the_kernel_never_waits_for_the_host_and_can_be_captured() -> None:
    if not quadratic.available():
        pytest.skip("there is no Triton here")
    inputs = [x.cuda() for x in batch(9)]
    expected, _ = solve(inputs[0], inputs[1], inputs[2])
    graph, elsewhere = torch.cuda.CUDAGraph(), [x.clone() for x in inputs]
    elsewhere[1].neg_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        solve(elsewhere[0], elsewhere[1], elsewhere[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        found, ended = solve(elsewhere[0], elsewhere[1], elsewhere[2])
    elsewhere[1].neg_()
    for _ in range(2):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)
        assert ended.all()
