"""MEGA-II: rotate the gradient.

Guo, Liu, Yang, Rosing: Improved schemes for episodic memory-based lifelong learning, NeurIPS 2020.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.engine.algebra import dot
from onepass.learners.rehearsal import Referring

COLLINEAR = 1e-5  # sine of an angle below which float32 does not know the plane of the rotation


def rotate(g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
    """`g` turned towards `g_ref` by `θ = argmax ℓ cos θ + ℓ_ref cos(θ̃ − θ)` in [0, π/2].

    `θ̃` is the angle between them; losses are columns `[R, 1]`.
    `θ = atan2(ℓ_ref sin θ̃, ℓ + ℓ_ref cos θ̃)`; the length of `g` stays. Collinear gradients span no
    plane: `g` stays as it is.

    >>> g, g_ref, one = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.1]]), torch.ones(1, 1)
    >>> [round(x, 3) for x in rotate(g, one, g_ref, one)[0].tolist()]
    [2.121, 2.121]
    """
    length = torch.linalg.vector_norm(g, dim=1, keepdim=True)
    length_ref = torch.linalg.vector_norm(g_ref, dim=1, keepdim=True)
    along = g / torch.where(length > 0, length, 1)
    towards = g_ref / torch.where(length_ref > 0, length_ref, 1)
    cosine = dot(along, towards)
    # The part of g_ref across g. For an angle near π the formula above would take the difference
    # of two large numbers; this does not.
    across = torch.addcmul(towards, cosine, along, value=-1)
    sine = torch.linalg.vector_norm(across, dim=1, keepdim=True)
    turn = torch.atan2(loss_ref * sine, loss + loss_ref * cosine).clamp(0, math.pi / 2)
    turn = torch.where(sine < COLLINEAR, 0, turn)
    turned = torch.cos(turn) * along + torch.sin(turn) / torch.where(sine > 0, sine, 1) * across
    return torch.where(turn > 0, length * turned, g)


class Mega2(Referring):
    """The gradient rotated towards the reference gradient by an angle that balances their losses.

    Its length stays.
    """

    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        return rotate(g, loss, g_ref, loss_ref)
