"""MEGA-II: rotate the gradient (Guo, Liu, Yang, Rosing: Improved schemes for episodic memory-based lifelong learning, NeurIPS 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.engine.algebra import dot
from onepass.learners.base import Referring
from onepass.streams.batch import Batch

COLLINEAR = 1e-4  # sine of an angle below which float32 does not know the plane of the rotation


def rotate(g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
    """`g` turned towards `g_ref` by `θ = argmax ℓ cos θ + ℓ_ref cos(θ̃ − θ)` in [0, π/2], `θ̃` the angle between them; losses are columns `[R, 1]`.

    `θ = atan2(ℓ_ref sin θ̃, ℓ + ℓ_ref cos θ̃)`; the length of `g` stays. Collinear gradients span no plane: `g` stays as it is.

    >>> g, g_ref, one = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.1]]), torch.ones(1, 1)
    >>> [round(x, 3) for x in rotate(g, one, g_ref, one)[0].tolist()]
    [2.121, 2.121]
    """
    length, length_ref = (torch.linalg.vector_norm(v, dim=1, keepdim=True) for v in (g, g_ref))
    flat = (length == 0) | (length_ref == 0)
    cosine = (dot(g, g_ref) / torch.where(flat, 1, length * length_ref)).clamp(-1, 1)
    angle = torch.acos(cosine)
    sine = torch.sin(angle)
    flat |= sine < COLLINEAR
    turn = torch.atan2(loss_ref * sine, loss + loss_ref * cosine).clamp(0, math.pi / 2)
    keep = torch.sin(angle - turn) / torch.where(flat, 1, sine)
    towards = torch.sin(turn) / torch.where(flat, 1, sine) * length / torch.where(flat, 1, length_ref)
    return torch.where(flat, 1, keep) * g + torch.where(flat, 0, towards) * g_ref


class Mega2(Referring):
    """`g̃`: the current gradient rotated towards the reference gradient by an angle that balances their losses, at the length of `g`."""

    def direction(self, batch: Batch) -> Tensor:
        g, loss = self.fleet.grad(batch)
        reference = self.rehearse(batch)
        if reference is None:
            return g
        g_ref, loss_ref = reference
        return rotate(g, loss[:, None], g_ref, loss_ref[:, None])
