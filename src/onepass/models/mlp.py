"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

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
        nn.init.trunc_normal_(linear.weight, std=0.1, a=-0.2, b=0.2)
    else:
        nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, 0.1 if how == "normal" else 0.0)
    return linear
