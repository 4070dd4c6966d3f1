"""A-GEM: averaged gradient episodic memory (Chaudhry, Ranzato, Rohrbach, Elhoseiny: Efficient Lifelong Learning with A-GEM, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onepass.engine.algebra import dot
from onepass.engine.fleet import Fleet
from onepass.learners.base import Reference, Referring
from onepass.memory import EpisodicMemory

# Below this ‖g_ref‖² a float32 sum of squares has lost its digits: such a reference gradient is no constraint.
TINY = 1e-30


def project(g: Tensor, reference: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The update rule of A-GEM for each row (into `out` if given), and which rows it changed `[R, 1]`.

    `g̃ = g − (gᵀ g_ref / g_refᵀ g_ref) g_ref` if `gᵀ g_ref < 0`, else `g̃ = g`: the closest vector to `g` with `g̃ᵀ g_ref ≥ 0`. The products
    run over all parameters at once, heads included.

    >>> project(torch.tensor([[1.0, 1.0]]), torch.tensor([[-2.0, 0.0]]))
    (tensor([[0., 1.]]), tensor([[True]]))
    """
    product = dot(g, reference)
    alone = (
        len(g) == 1 and g.device.type == "cpu"
    )  # one run may ask, and is saved passes over all parameters
    square = (
        dot(reference, reference)
        if alone
        else torch.linalg.vector_norm(reference, dim=1, keepdim=True).square()
    )
    violated = (product < 0) & (square > TINY)
    if alone and not violated:
        return g, violated
    return torch.addcmul(
        g, torch.where(violated, product / square, 0), reference, value=-1, out=out
    ), violated


class AGem(Referring):
    """`g̃ = g − (gᵀ g_ref / g_refᵀ g_ref) g_ref` where `gᵀ g_ref < 0`, with `g_ref` the gradient on a random batch of the episodic memory.

    While learning a task, the average loss on the memory of all past tasks must not increase (equation for `g̃` in the section on A-GEM).
    """

    keeps = ("violations",)

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Reference,
        memory: EpisodicMemory,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.violations: Tensor = torch.zeros(fleet.runs, dtype=torch.int64, device=fleet.device)

    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        g, violated = project(g, g_ref, out=g)
        self.violations += (violated & self.fleet.active)[:, 0]
        return g
