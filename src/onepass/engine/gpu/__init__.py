"""Triton kernels for what torch's operations are slow at on a GPU, as operations of torch.

`fusing` puts them into a traced program, `kernel_checks` compares them with torch's operations.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed, as it is with torch for CUDA; it may still lack a C compiler."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def by_kernels(x: Tensor, numbers: int = 0) -> bool:
    """Whether kernels compute an operation on `x`, whose other images have `numbers` elements.

    On a CPU, in float64 and beyond the range of a kernel's indices torch's operations do.
    """
    return x.is_cuda and x.dtype == torch.float32 and max(x.numel(), numbers) < 2**31 - 2**20


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of `x` the current one, on which kernels start."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
