"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from onepass.models.initial import Initialisation, initialise


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, initialisation: Initialisation = "normal"
) -> nn.Sequential:
    """`inputs – hidden – … – outputs` with ReLU.

    The paper's network for MNIST:

    >>> sum(p.numel() for p in mlp(784, [256, 256], 10).parameters())
    269322
    """
    widths = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [initialise(nn.Linear(before, after), initialisation), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
