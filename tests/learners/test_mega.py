from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.mega1 import Mega1, balance
from onepass.learners.mega2 import Mega2, rotate
from onepass.learners.rehearsal import Reference, Referring
from onepass.memory import FleetMemory
from tests.toys import Normed, batch_of, by_hand, fleet_of

both = pytest.mark.parametrize("method", ["mega-1", "mega-2"])


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def gradients(rows: int, size: int = 40) -> tuple[Tensor, Tensor]:
    """Pairs of all lengths and angles."""
    g, other = torch.randn(2, rows, size).double()
    along = torch.nn.functional.normalize(g, dim=1)
    across = torch.nn.functional.normalize(
        other - (other * along).sum(1, keepdim=True) * along, dim=1
    )
    angle = torch.rand(rows, 1).double() * (math.pi - 0.4) + 0.2
    lengths = 10 ** (torch.rand(rows, 1).double() * 8 - 4)
    return g.float(), ((angle.cos() * along + angle.sin() * across) * lengths).float()


def turned(found: Tensor, g: Tensor, g_ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Angles from `g` to `found` and to `g_ref`, and the share of `found` out of their plane."""
    found, g, g_ref = found.double(), g.double(), g_ref.double()
    along = torch.nn.functional.normalize(g, dim=1)
    across = torch.nn.functional.normalize(
        g_ref - (g_ref * along).sum(1, keepdim=True) * along, dim=1
    )

    def angle(v: Tensor) -> Tensor:
        return torch.atan2((v * across).sum(1), (v * along).sum(1))

    out = (
        found
        - (found * along).sum(1, keepdim=True) * along
        - (found * across).sum(1, keepdim=True) * across
    )
    return angle(found), angle(g_ref), out.norm(dim=1) / g.norm(dim=1)


def test_mega_1_is_the_sum_weighted_by_the_losses() -> None:
    g, g_ref = torch.randn(2, 50, 9)
    loss, loss_ref = torch.rand(2, 50, 1) * 2 + 0.2
    found = balance(g, loss, g_ref, loss_ref, column(*[0.1] * 50))
    assert torch.allclose(found, g + loss_ref / loss * g_ref, atol=1e-5)


def test_mega_1_is_plain_sgd_when_the_past_is_known_perfectly() -> None:
    g, g_ref = torch.randn(2, 5, 9)
    assert torch.equal(
        balance(g, torch.rand(5, 1) + 0.2, g_ref, torch.zeros(5, 1), torch.full((5, 1), 0.1)), g
    )


@pytest.mark.parametrize(
    ("loss", "sensitivity"), [(0.1, 0.1), (0.05, 0.1), (0.0, 0.1), (0.0, 0.0), (1e-44, 1e-3)]
)
def test_mega_1_is_exactly_the_reference_gradient_when_the_current_task_is_known(
    loss: float, sensitivity: float
) -> None:
    g, g_ref = torch.randn(2, 3, 9)
    found = balance(
        g, column(*[loss] * 3), g_ref, column(0.0, 2.0, 1e-3), column(*[sensitivity] * 3)
    )
    assert torch.equal(found, g_ref)


def test_mega_1_looks_at_each_row_on_its_own() -> None:
    g, g_ref = torch.randn(2, 4, 9)
    loss, loss_ref, sensitivity = (
        column(1.0, 0.5, 0.0, 0.5),
        column(2.0, 3.0, 1.0, 0.0),
        column(0.1, 0.6, 0.1, 0.4),
    )
    g[2] = torch.nan  # not even looked at: its task is known
    found = balance(g, loss, g_ref, loss_ref, sensitivity)
    expected = torch.stack([g[0] + 2 * g_ref[0], g_ref[1], g_ref[2], g[3]])
    assert torch.allclose(found, expected, atol=1e-6)
    loss[1] = loss_ref[1] = torch.nan
    assert torch.equal(balance(g, loss, g_ref, loss_ref, sensitivity)[[0, 2, 3]], found[[0, 2, 3]])


def test_mega_2_keeps_the_length_and_stays_in_the_plane() -> None:
    g, g_ref = gradients(5000)
    found = rotate(g, torch.rand(5000, 1) * 3, g_ref, torch.rand(5000, 1) * 3)
    assert (found.double().norm(dim=1) / g.double().norm(dim=1) - 1).abs().max() < 1e-4
    assert turned(found, g, g_ref)[2].max() < 1e-4


@pytest.mark.parametrize("apart", [0.1, 0.03, 0.01, 0.003, 0.001])
def test_mega_2_keeps_the_length_of_almost_opposite_gradients(apart: float) -> None:
    g, other = torch.randn(2, 100, 40).double()
    along = torch.nn.functional.normalize(g, dim=1)
    across = torch.nn.functional.normalize(
        other - (other * along).sum(1, keepdim=True) * along, dim=1
    )
    g_ref = (math.sin(apart) * across - math.cos(apart) * along).float()
    found = rotate(g.float(), torch.rand(100, 1), g_ref, torch.rand(100, 1) * 3)
    assert (found.double().norm(dim=1) / g.norm(dim=1) - 1).abs().max() < 1e-3


def test_mega_2_turns_by_the_angle_that_is_best_for_both_losses() -> None:
    g, g_ref = gradients(500)
    loss, loss_ref = torch.rand(2, 500, 1) * 3
    angle, whole, _ = turned(rotate(g, loss, g_ref, loss_ref), g, g_ref)

    def value(t: Tensor) -> Tensor:
        return loss.double() * t.cos() + loss_ref.double() * (whole[:, None] - t).cos()

    grid = torch.linspace(0, math.pi / 2, 20_001).double()
    best = value(grid.expand(500, -1))
    assert (value(angle[:, None])[:, 0] >= best.max(1).values - 1e-5).all()
    assert (angle - grid[best.argmax(1)]).abs().max() < 1e-3
    assert ((angle > 0.1) & (angle < math.pi / 2 - 0.1)).sum() > 100


def test_mega_2_is_plain_sgd_when_the_past_is_known_perfectly() -> None:
    g, g_ref = gradients(50)
    for loss in (torch.rand(50, 1), torch.zeros(50, 1)):
        assert torch.allclose(rotate(g, loss, g_ref, torch.zeros(50, 1)), g, rtol=1e-4, atol=1e-5)


def test_mega_2_turns_to_the_reference_but_never_beyond_a_right_angle() -> None:
    g, g_ref = gradients(500)
    angle, whole, _ = turned(
        rotate(g, torch.zeros(500, 1), g_ref, torch.rand(500, 1) + 0.1), g, g_ref
    )
    assert (angle - whole.clamp(max=math.pi / 2)).abs().max() < 1e-4
    assert 50 < (whole > math.pi / 2).sum() < 450


@pytest.mark.parametrize("losses", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.5, 2.0)])
@pytest.mark.parametrize("factor", [2.0, -2.0, -0.7, -1.0, 1e-20, -1e-20, 0.0])
def test_mega_2_leaves_collinear_and_zero_gradients_alone(
    losses: tuple[float, float], factor: float
) -> None:
    g = torch.randn(20, 40)
    loss, loss_ref = column(*[losses[0]] * 20), column(*[losses[1]] * 20)
    found = rotate(g, loss, factor * g, loss_ref)
    assert ((found - g).norm(dim=1) <= 1e-4 * g.norm(dim=1)).all()
    assert torch.equal(rotate(torch.zeros(20, 40), loss, g, loss_ref), torch.zeros(20, 40))
    assert torch.equal(rotate(g, loss, torch.zeros(20, 40), loss_ref), g)


def test_mega_2_looks_at_each_row_on_its_own() -> None:
    g, g_ref = gradients(6)
    loss, loss_ref = torch.rand(2, 6, 1)
    found = rotate(g, loss, g_ref, loss_ref)
    for r in range(6):
        one = slice(r, r + 1)
        assert torch.allclose(
            rotate(g[one], loss[one], g_ref[one], loss_ref[one])[0], found[r], atol=1e-6
        )
    g[2], g_ref[4], loss[5] = torch.nan, 0, torch.nan
    assert torch.equal(rotate(g, loss, g_ref, loss_ref)[[0, 1, 3]], found[[0, 1, 3]])


def after_two_tasks(
    method: str, reference_batch: int = 7, **more: object
) -> tuple[Referring, Batch]:
    """A learner whose memory holds two tasks, and a batch of the third."""
    fleet = fleet_of(**more)  # type: ignore[arg-type]
    memory, sensitivity = FleetMemory(fleet, 4, 10), {"sensitivity": column(0.01, 0.5, 3.0)}
    make = {"mega-1": Mega1, "mega-2": Mega2}[method]
    learner = make(fleet, sensitivity, Reference(reference_batch), memory)
    for task in range(2):
        learner.begin_task(task)
        batch = batch_of(size=20, seed=task)
        fleet.learn(learner, Batch(batch.x, batch.slots % 2 + 2 * task))
        learner.end_task()
    learner.begin_task(2)
    fleet.learning_rate.fill_(1.0)
    last = batch_of(size=8, seed=9)
    return learner, Batch(last.x, last.slots % 2 + 4)


def expected_direction(
    method: str, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor, sensitivity: float
) -> Tensor:
    if method == "mega-1":
        return g + loss_ref / loss * g_ref if loss > sensitivity else g_ref
    whole = torch.acos(g @ g_ref / g.norm() / g_ref.norm())
    turn = torch.atan2(loss_ref * whole.sin(), loss + loss_ref * whole.cos()).clamp(0, math.pi / 2)
    return (
        g.norm()
        / whole.sin()
        * ((whole - turn).sin() * g / g.norm() + turn.sin() * g_ref / g_ref.norm())
    )


@both
def test_a_step_weighs_the_gradients_of_batch_and_reference_by_their_own_losses_over_all_parameters(
    method: str,
) -> None:
    learner, batch = after_two_tasks(method)
    fleet, known = learner.fleet, 0
    for _ in range(10):
        fleet.theta.copy_(torch.randn_like(fleet.theta) * 0.7)
        reference = learner.episodic.draw(7)
        assert reference is not None
        ours = [by_hand(fleet, batch, r) for r in range(3)]
        theirs = [by_hand(fleet, reference, r) for r in range(3)]
        before = fleet.theta.clone()
        fleet.learn(learner, batch)
        for r, sensitivity in enumerate((0.01, 0.5, 3.0)):
            (g, loss), (g_ref, loss_ref) = (
                (v.double(), x.double()) for v, x in (ours[r], theirs[r])
            )
            known += int(loss <= sensitivity)
            assert (loss - loss_ref).abs() > 1e-3
            taken = (before - fleet.theta)[r].double()
            assert torch.allclose(
                taken, expected_direction(method, g, loss, g_ref, loss_ref, sensitivity), atol=2e-5
            )
    assert 5 < known < 25


@both
@pytest.mark.parametrize("moves", [True, False])
def test_the_reference_pass_moves_batch_norm_statistics_only_if_asked_to(
    method: str, moves: bool
) -> None:
    learner, batch = after_two_tasks(method, build=Normed)
    learner.option = replace(learner.option, reference_moves_buffers=moves)
    before = learner.fleet.buffers["norm.num_batches_tracked"].clone()
    learner.fleet.learn(learner, batch)
    assert torch.equal(
        learner.fleet.buffers["norm.num_batches_tracked"] - before,
        torch.full((3,), 2 if moves else 1),
    )
