"""Vector algebra on `[R, P]` that has a fast way and a slow way."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.engine.precision import products

CHUNK = 2048  # numbers whose products are summed in float32


def gram(vectors: Tensor) -> Tensor:
    """`G Gᵀ` of the vectors `G [n, P]` of each row, `[R, n, n]` in float64.

    Short sums are in float32 and sums of those in float64. For float32 numbers that is as good as
    float64, at the speed of float32.

    >>> gram(torch.tensor([[[1.0, 2.0], [0.0, 3.0]]])).tolist()
    [[[5.0, 6.0], [6.0, 9.0]]]
    """
    whole = vectors.shape[-1] // CHUNK * CHUNK
    found = []
    with products(vectors.device, tf32=False):
        for row in vectors.unbind(0):
            pieces, rest = row[:, :whole].view(len(row), -1, CHUNK).transpose(0, 1), row[:, whole:]
            total = (pieces @ pieces.mT).sum(0, dtype=torch.float64)
            found.append(total + (rest @ rest.T).double())
    return torch.stack(found)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """`Σ_p a[r, p] b[r, p]` for each row, `[R, 1]`.

    >>> dot(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])).tolist()
    [[3.0], [8.0]]
    """
    if a.device.type != "cpu" and len(a) > 1:
        return (a * b).sum(1, keepdim=True)
    # One product per row reads memory once; a batched one writes all products out first.
    rows = zip(a.unbind(0), b.unbind(0), strict=True)
    return torch.stack([torch.dot(x, y) for x, y in rows])[:, None]
