"""Vector algebra on `[R, P]` that has a fast way and a slow way."""

from __future__ import annotations

import torch
from torch import Tensor


def dot(a: Tensor, b: Tensor) -> Tensor:
    """`Σ_p a[r, p] b[r, p]` for each row, `[R, 1]`.

    >>> dot(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])).tolist()
    [[3.0], [8.0]]
    """
    if a.device.type == "cpu" or len(a) == 1:  # a product a row reads memory once; a batched one writes all products out first
        return torch.stack([torch.dot(x, y) for x, y in zip(a.unbind(0), b.unbind(0), strict=True)])[:, None]
    return (a * b).sum(1, keepdim=True)
