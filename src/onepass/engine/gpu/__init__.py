"""Kernels of our own (Triton) for what torch's take long over on a GPU, as operations of torch, and how they get into a program."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """It comes with torch for CUDA. Whether it finds a compiler for C is another question."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def by_kernels(x: Tensor, numbers: int = 0) -> bool:
    """On a CPU, in float64 and where kernels count further than they can, the same operations are written with torch's. `numbers` is how many other
    images have."""
    return x.is_cuda and x.dtype == torch.float32 and max(x.numel(), numbers) < 2**31 - 2**20


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
