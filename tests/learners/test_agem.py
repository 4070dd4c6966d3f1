from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners import METHODS
from onepass.learners.agem import AGem, project
from onepass.learners.rehearsal import Reference
from onepass.memory import FleetMemory
from onepass.protocol import Run, Setup, assemble
from tests.toys import Normed, ToyStream, batch_of, fleet_of

numbers = st.floats(-1e3, 1e3, width=32).map(lambda v: v if abs(v) > 1e-6 else 0.0)
vectors = st.integers(2, 12).flatmap(
    lambda n: st.tuples(
        *(st.lists(numbers, min_size=n, max_size=n) for _ in range(2)),
        st.sampled_from([1e-6, 1.0, 1e6]),
    )
)


def pair(drawn: tuple[list[float], list[float], float]) -> tuple[Tensor, Tensor]:
    g, reference, scale = drawn
    return torch.tensor([g]), torch.tensor([reference]) * scale


@settings(max_examples=300, deadline=None)
@given(vectors)
def test_the_projection_is_the_closed_form_of_the_paper(
    drawn: tuple[list[float], list[float], float],
) -> None:
    g, reference = pair(drawn)
    found, violated = project(g, reference)
    a, b = g[0].double(), reference[0].double()
    if float(a @ b) < 0 and float(b @ b) > 1e-29:
        expected = a - (a @ b) / (b @ b) * b
        assert torch.allclose(found[0].double(), expected, atol=1e-5 * float(a.norm()))
    elif float(a @ b) > 0:
        assert torch.equal(found, g)
        assert not violated


@settings(max_examples=300, deadline=None)
@given(vectors)
def test_a_projected_gradient_never_points_against_the_reference(
    drawn: tuple[list[float], list[float], float],
) -> None:
    g, reference = pair(drawn)
    found, _ = project(g, reference)
    if float(reference.double().norm()) > 1e-12:
        assert float((found.double() * reference.double()).sum()) >= -1e-5 * float(
            g.double().norm()
        ) * float(reference.double().norm())
    assert found.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_projection_solves_the_quadratic_program(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    g, reference = torch.randn(1, 4, generator=generator), torch.randn(1, 4, generator=generator)
    a, b = g[0].double().numpy(), reference[0].double().numpy()
    solved = minimize(
        lambda z: ((z - a) ** 2).sum() / 2,
        a,
        jac=lambda z: z - a,
        constraints={"type": "ineq", "fun": lambda z: z @ b, "jac": lambda z: b},
    )
    assert solved.success
    assert torch.allclose(
        project(g, reference)[0][0].double(), torch.from_numpy(solved.x), atol=1e-4
    )


@pytest.mark.parametrize(
    ("g", "reference"),
    [
        ([1.0, 2.0], [0.0, 0.0]),
        ([0.0, 0.0], [-1.0, 1.0]),
        ([1.0, 1.0], [1.0, -1.0]),
        ([1.0, 1.0], [-1e-30, 0.0]),
        ([1.0, 1.0], [-1e-44, 0.0]),
        ([1e-44, 0.0], [-1e-44, 0.0]),
        ([1e30, 0.0], [-1e-25, 0.0]),
    ],
    ids=[
        "no reference",
        "no gradient",
        "orthogonal",
        "tiny reference",
        "denormal reference",
        "both denormal",
        "huge against tiny",
    ],
)
def test_nothing_changes_and_nothing_breaks_without_a_real_conflict(
    g: list[float], reference: list[float]
) -> None:
    found, violated = project(torch.tensor([g]), torch.tensor([reference]))
    assert found.tolist() == [torch.tensor(g).tolist()]
    assert not violated.any()


def test_the_whole_vector_decides_not_its_parts() -> None:
    g, reference = torch.tensor([[1.0, 0.0, 1.0, 1.0]]), torch.tensor([[-1.0, 0.0, 2.0, 2.0]])
    found, violated = project(g, reference)
    assert torch.equal(
        found, g
    )  # the product is +3, although the first two components alone would be projected
    assert not violated.any()


def test_rows_are_projected_on_their_own() -> None:
    g, reference = torch.randn(6, 9), torch.randn(6, 9)
    found, violated = project(g, reference)
    for r in range(6):
        alone, one = project(g[r : r + 1], reference[r : r + 1])
        assert torch.allclose(alone[0], found[r], atol=1e-6)
        assert one[0] == violated[r]
    assert violated.any()
    assert not violated.all()


def learner_after_a_task(reference_batch: int = 100, **more: object) -> tuple[AGem, Batch]:
    """A learner whose memory holds task 0, and a batch of task 1 with some conflicts."""
    fleet = fleet_of(**more)  # type: ignore[arg-type]
    memory = FleetMemory(fleet, 4, 10)
    learner = AGem(fleet, {}, Reference(reference_batch), memory)
    learner.begin_task(0)
    batch = batch_of(size=20, seed=1)
    fleet.learn(learner, Batch(batch.x, batch.slots % 2))
    learner.end_task()
    learner.begin_task(1)
    second = batch_of(size=8, seed=2)
    return learner, Batch(second.x, second.slots % 2 + 2)


def test_a_step_is_plain_sgd_in_the_first_task_and_projected_over_all_parameters_after_it() -> None:
    learner, batch = learner_after_a_task()
    fleet = learner.fleet
    torch.manual_seed(0)
    conflicts = 0
    for _ in range(25):
        fleet.theta.copy_(torch.randn_like(fleet.theta) * 0.7)
        g, _ = fleet.grad(batch)
        reference = learner.episodic.draw(100)
        assert reference is not None
        g_ref, _ = fleet.grad(reference)
        before = fleet.theta.clone()
        fleet.learn(learner, batch)
        taken = (before - fleet.theta) / 0.1
        dot = (g * g_ref).sum(1)
        for r in range(3):
            if dot[r] < 0:
                conflicts += 1
                assert (taken[r] @ g_ref[r]) >= -1e-4 * g[r].norm() * g_ref[r].norm()
                assert torch.allclose(
                    taken[r], g[r] - dot[r] / (g_ref[r] @ g_ref[r]) * g_ref[r], atol=1e-4
                )
                # The old head gets no gradient from the current task, but its part of the
                # projection must be written all the same.
                assert (g[r][-8:-6] == 0).all()
                assert (taken[r][-8:-6] != 0).all()
            else:
                assert torch.allclose(taken[r], g[r], atol=1e-4)
    assert conflicts > 5


def test_violations_count_the_steps_that_were_projected() -> None:
    learner, batch = learner_after_a_task()
    fleet, expected = learner.fleet, torch.zeros(3, dtype=torch.int64)
    torch.manual_seed(1)
    for _ in range(20):
        fleet.theta.copy_(torch.randn_like(fleet.theta) * 0.7)
        reference = learner.episodic.draw(100)
        assert reference is not None
        expected += ((fleet.grad(batch)[0] * fleet.grad(reference)[0]).sum(1) < 0).long()
        fleet.learn(learner, batch)
    assert torch.equal(learner.violations, expected)
    assert expected.sum() > 0


def test_the_reference_loss_is_the_mean_over_memory_examples_masked_to_their_own_task() -> None:
    learner, _ = learner_after_a_task()
    reference = learner.episodic.draw(100)
    assert reference is not None
    logits = learner.fleet.forward(reference).logits
    own = torch.stack(
        [
            torch.stack(
                [
                    x[0:2].logsumexp(0) - x[s]
                    for x, s in zip(logits[r], reference.slots[r], strict=True)
                ]
            ).mean()
            for r in range(3)
        ]
    )
    assert torch.allclose(learner.fleet.grad(reference)[1], own, atol=1e-5)


def test_projection_never_increases_memory_loss() -> None:
    """To first order: with a small step, the average loss on the whole memory does not go up."""
    learner, batch = learner_after_a_task()
    fleet = learner.fleet
    fleet.learning_rate.fill_(1e-3)
    torch.manual_seed(2)
    raised_by_sgd = 0
    for _ in range(30):
        start = torch.randn_like(fleet.theta) * 0.7
        fleet.theta.copy_(start)
        reference = learner.episodic.draw(100)
        assert reference is not None
        _, before = fleet.grad(reference)
        g, _ = fleet.grad(batch)
        fleet.learn(learner, batch)
        _, after = fleet.grad(reference)
        fleet.theta.copy_(start - 1e-3 * g)
        raised_by_sgd += int((fleet.grad(reference)[1] > before + 1e-6).sum())
        assert (after <= before + 2e-6).all()
    assert raised_by_sgd > 10


@pytest.mark.parametrize("moves", [True, False])
def test_the_reference_pass_moves_batch_norm_statistics_only_if_asked_to(moves: bool) -> None:
    learner, batch = learner_after_a_task(build=Normed)
    learner.option = replace(learner.option, reference_moves_buffers=moves)
    before = learner.fleet.buffers["norm.num_batches_tracked"].clone()
    learner.fleet.learn(learner, batch)
    assert torch.equal(
        learner.fleet.buffers["norm.num_batches_tracked"] - before,
        torch.full((3,), 2 if moves else 1),
    )


def test_statistics_of_the_reference_pass_change_no_weight_but_what_evaluation_sees() -> None:
    (moving, batch), (still, _) = (learner_after_a_task(build=Normed) for _ in range(2))
    still.option = replace(still.option, reference_moves_buffers=False)
    for seed in range(8):
        more = batch_of(size=8, seed=seed)
        for learner in (moving, still):
            learner.fleet.learn(learner, Batch(more.x, more.slots % 2 + 2))
    assert torch.equal(moving.fleet.theta, still.fleet.theta)
    assert moving.violations.sum() > 0
    assert torch.equal(moving.violations, still.violations)
    assert not torch.allclose(moving.scores(batch), still.scores(batch), atol=1e-3)


def test_a_run_that_diverges_in_a_step_counts_no_violation_in_it() -> None:
    learner, batch = learner_after_a_task()
    learner.fleet.theta[:, -48:].mul_(
        1e6
    )  # the head alone: a saturated body would have no gradient to conflict
    reference = learner.episodic.draw(100)
    assert reference is not None
    g, g_ref = (learner.fleet.grad(b, theta=learner.fleet.theta)[0] for b in (batch, reference))
    assert project(g, g_ref)[1].any()
    learner.fleet.learn(learner, batch)
    assert learner.fleet.diverged() == [True, True, True]
    assert learner.violations.tolist() == [0, 0, 0]


def test_with_an_empty_memory_a_step_is_plain_sgd() -> None:
    feed, fleet, learner = assemble(
        ToyStream(),
        "ev",
        METHODS["a-gem"],
        [Run(0, {"learning_rate": 0.1})],
        Setup(hidden=(5,), memory_per_task=4),
    )
    _, plain, van = assemble(
        ToyStream(), "ev", METHODS["van"], [Run(0, {"learning_rate": 0.1})], Setup(hidden=(5,))
    )
    learner.begin_task(0)
    for batch in feed.batches(0):
        fleet.learn(learner, batch)
        plain.learn(van, batch)
    assert torch.equal(fleet.theta, plain.theta)
    assert fleet.theta.isfinite().all()
