"""Batch-norm by its formula, and what moves its running statistics."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.models.norm import BatchNorm, Constants
from onepass.models.resnet import ResNet
from onepass.streams.base import separate_heads

X = 2 + 3 * torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0))


def by_formula(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, norm: BatchNorm
) -> torch.Tensor:
    m, v, gain, bias = (t[:, None, None] for t in (mean, variance, norm.weight, norm.bias))
    return gain * (x - m) / (v + norm.eps).sqrt() + bias


@pytest.mark.parametrize("constants", ["torch", "authors"])
def test_training_uses_the_statistics_of_the_batch_and_evaluation_the_running_ones(
    constants: Constants,
) -> None:
    norm = BatchNorm(4, constants)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    mean, variance = X.mean((0, 2, 3)), X.var((0, 2, 3), unbiased=False)
    assert torch.allclose(norm(X), by_formula(X, mean, variance, norm), atol=1e-4)
    moved = norm.running_mean.clone(), norm.running_var.clone()  # type: ignore[union-attr]
    norm.eval()
    assert torch.allclose(norm(X), by_formula(X, *moved, norm), atol=1e-3)
    assert torch.equal(norm.running_mean, moved[0])  # type: ignore[arg-type]
    assert torch.equal(norm.running_var, moved[1])  # type: ignore[arg-type]


def test_the_constants_of_torch_are_those_of_its_own_layer() -> None:
    ours, theirs = BatchNorm(4), nn.BatchNorm2d(4)
    for _ in range(3):
        assert torch.equal(ours(X), theirs(X))
    assert torch.equal(ours.running_mean, theirs.running_mean)  # type: ignore[arg-type]
    assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]
    assert torch.equal(ours.eval()(X), theirs.eval()(X))


def test_the_authors_statistics_begin_at_nothing_and_take_a_tenth_of_the_biased_variance() -> None:
    norm = BatchNorm(4, "authors")
    assert norm.eps == 1e-3
    assert float(norm.running_mean.abs().max()) == float(norm.running_var.max()) == 0  # type: ignore[union-attr]
    norm(X)
    norm(X)
    share = 1 - 0.9**2
    assert torch.allclose(norm.running_mean, share * X.mean((0, 2, 3)), atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(norm.running_var, share * X.var((0, 2, 3), unbiased=False), atol=1e-4)  # type: ignore[arg-type]


def test_a_file_that_counts_batches_can_be_loaded() -> None:
    theirs = nn.BatchNorm2d(4)
    theirs(X)
    ours = BatchNorm(4)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("constants", ["torch", "authors"])
def test_whether_a_pass_moves_running_statistics_is_the_callers_choice(
    constants: Constants, moves: bool
) -> None:
    build = partial(ResNet, 4, 6, (1, 1), channels=2, batch_norm=constants)
    fleet = Fleet(build, [1, 2], Slots(separate_heads(3, 2)), [0.1, 0.1])
    batch = Batch(torch.randn(2, 5, 2, 8, 8), torch.randint(0, 6, (2, 5)))
    for _ in range(2):  # by autograd or a program, and by a program
        before = {name: b.clone() for name, b in fleet.buffers.items()}
        g, _ = fleet.grad(batch, update_buffers=moves)
        assert all(torch.equal(b, before[name]) != moves for name, b in fleet.buffers.items())
        assert g.norm() > 0
