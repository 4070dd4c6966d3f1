"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """`inputs – hidden – … – outputs` with ReLU, initialised as the A-GEM authors do: weights from a normal distribution with standard
    deviation 0.1 cut off at twice that, all biases 0.1. The paper's network for MNIST is `mlp(784, [256, 256], 10)`.

    >>> sum(p.numel() for p in mlp(784, [256, 256], 10).parameters())
    269322
    """
    widths = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [initialise(nn.Linear(before, after)), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def initialise(linear: nn.Linear) -> nn.Linear:
    """As the authors do."""
    nn.init.trunc_normal_(linear.weight, std=0.1, a=-0.2, b=0.2)
    if linear.bias is not None:
        nn.init.constant_(linear.bias, 0.1)
    return linear
