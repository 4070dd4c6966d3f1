"""Initial weights."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

Initialisation = Literal["normal", "xavier", "uniform", "torch"]
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def initialise(layer: Layer, how: Initialisation = "normal") -> Layer:
    """Give a layer its initial values, and return it.

    - `normal`: the A-GEM authors' fully connected layers. Weights from a normal distribution with
      standard deviation 0.1 cut off at twice that, biases 0.1.
    - `uniform`: the layers of their residual networks. Weights and biases uniform within `±1/√n`
      with `n` the inputs of a linear layer, and of a `k×k` convolution `k` times its input channels
      (not `k²` times).
    - `xavier`: GEM's. Weights uniform within `±√(6 / (inputs + outputs))`, biases 0.
    - `torch`: as torch does it.
    """
    weight, bias = layer.weight, layer.bias
    if weight.is_meta:
        return layer  # it has no values, and torch would import its compiler for erfinv
    if how == "normal":
        truncated_normal_(weight, 0.1)
    elif how == "xavier":
        nn.init.xavier_uniform_(weight)
    elif how == "uniform":
        size = weight.shape[1] * (weight.shape[-1] if weight.dim() == 4 else 1)
        bound = 1 / math.sqrt(size)
        nn.init.uniform_(weight, -bound, bound)
        if bias is not None:
            nn.init.uniform_(bias, -bound, bound)
    if bias is not None and how in ("normal", "xavier"):
        nn.init.constant_(bias, 0.1 if how == "normal" else 0.0)
    return layer


def truncated_normal_(values: Tensor, deviation: float) -> None:
    """Draw from a normal distribution cut off at twice its standard deviation.

    This is by the inverse of its distribution function, and not torch's own: what that draws from a
    seed differs from one version of torch to the next.
    """
    within = math.erf(math.sqrt(2))
    most = 2 * deviation
    with torch.no_grad():
        values.uniform_(-within, within).erfinv_().mul_(math.sqrt(2) * deviation).clamp_(
            -most, most
        )
