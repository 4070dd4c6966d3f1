"""Whether states are equal, whatever they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        here = (
            isinstance(other, Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and one.device == other.device
        )
        return here and (one.is_meta or torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
