"""A-GEM: averaged gradient episodic memory.

Chaudhry, Ranzato, Rohrbach, Elhoseiny: Efficient Lifelong Learning with A-GEM, ICLR 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.engine.algebra import dot
from onepass.learners.rehearsal import Referring
from onepass.learners.state import per_run

# Below this ‖g_ref‖² a float32 sum of squares has lost its digits: there is no constraint.
TINY = 1e-30


def project(g: Tensor, reference: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The update rule of A-GEM for each row, and which rows it changed `[R, 1]`.

    `g̃ = g − (gᵀ g_ref / g_refᵀ g_ref) g_ref` if `gᵀ g_ref < 0`, else `g̃ = g`: the closest vector
    to `g` with `g̃ᵀ g_ref ≥ 0`. Products run over all parameters at once, heads included.

    >>> project(torch.tensor([[1.0, 1.0]]), torch.tensor([[-2.0, 0.0]]))
    (tensor([[0., 1.]]), tensor([[True]]))
    """
    product = dot(g, reference)
    alone = len(g) == 1 and g.device.type == "cpu"  # a branch saves one run passes over all of P
    if alone:
        square = dot(reference, reference)
    else:
        square = torch.linalg.vector_norm(reference, dim=1, keepdim=True).square()
    violated = (product < 0) & (square > TINY)
    if alone and not violated:
        return g, violated
    factor = torch.where(violated, product / square, 0)
    return torch.addcmul(g, factor, reference, value=-1, out=out), violated


class AGem(Referring):
    """`g̃ = g − (gᵀ g_ref / g_refᵀ g_ref) g_ref` where `gᵀ g_ref < 0`.

    `g_ref` is the gradient on a random batch of the episodic memory: while a task is learnt, the
    average loss on the memory of all past tasks must not increase (the paper's section on A-GEM).
    """

    violations: Tensor = per_run()

    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        g, violated = project(g, g_ref, out=g)
        self.violations += (violated & self.fleet.active)[:, 0]
        return g
