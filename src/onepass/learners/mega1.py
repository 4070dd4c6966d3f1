"""MEGA-I: balance two losses.

Guo, Liu, Yang, Rosing: Improved schemes for episodic memory-based lifelong learning, NeurIPS 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.learners.rehearsal import Referring


def balance(
    g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor, sensitivity: Tensor
) -> Tensor:
    """`g + (ℓ_ref / ℓ) g_ref` if `ℓ > ε`, else `g_ref`; losses and `ε` are columns `[R, 1]`.

    >>> g, g_ref, one = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.ones(1, 1)
    >>> balance(g, 2 * one, g_ref, one, 0.1 * one).tolist()
    [[1.0, 0.5]]
    """
    learning = loss > sensitivity
    share = torch.where(learning, loss_ref / torch.where(learning, loss, 1), 1)
    return torch.where(learning, g, 0) + share * g_ref


class Mega1(Referring):
    """`g̃ = g + (ℓ_ref / ℓ_t) g_ref` while the loss `ℓ_t` of the batch is above `ε`, else `g_ref`.

    `ε` is the `sensitivity`. The better the current task is known compared with the past, the more
    a step is for the past.
    """

    hyperparameters = {"sensitivity": (0.001, 0.01, 0.1)}

    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        return balance(g, loss, g_ref, loss_ref, self.columns["sensitivity"])
