"""Fully connected networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

Initialisation = Literal["normal", "xavier"]


def mlp(inputs: int, hidden: Sequence[int], outputs: int, initialisation: Initialisation = "normal") -> nn.Sequential:
    """`inputs – hidden – … – outputs` with ReLU. The paper's network for MNIST is `mlp(784, [256, 256], 10)`.

    Initialised as the A-GEM authors do (`normal`: weights from a normal distribution with standard deviation 0.1 cut off at twice that, all
    biases 0.1), or as GEM's do (`xavier`: weights uniform within `±√(6 / (inputs + outputs))` of their layer, biases 0).

    >>> sum(p.numel() for p in mlp(784, [256, 256], 10).parameters())
    269322
    """
    widths = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [initialise(nn.Linear(before, after), initialisation), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def initialise(linear: nn.Linear, how: Initialisation = "normal") -> nn.Linear:
    """As one of them does."""
    if how == "normal":
        truncated_normal_(linear.weight, 0.1)
    else:
        nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, 0.1 if how == "normal" else 0.0)
    return linear


def truncated_normal_(values: Tensor, deviation: float) -> None:
    """A normal distribution cut off at twice its standard deviation, by the inverse of its distribution function.

    Not by torch's own: what that draws from a seed differs from one version of torch to the next, and a run would not be that of its seed.
    """
    within = math.erf(math.sqrt(2))
    with torch.no_grad():
        values.uniform_(-within, within).erfinv_().mul_(math.sqrt(2) * deviation).clamp_(-2 * deviation, 2 * deviation)
