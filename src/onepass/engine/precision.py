"""What products of float32 numbers are computed in on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(device: torch.device, *, tf32: bool, tried: int = 0) -> Iterator[None]:
    """Inside, products and convolutions on a GPU are in TF32 (factors of 10 bits, summed in float32) or in float32; as before outside. A CPU is
    left alone.

    With `tried`, so many ways of computing a convolution are timed the first time that its shape comes up, and the fastest is taken; what
    cuDNN believes to be fastest is not, where there are few channels.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = (
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.benchmark_limit,
    )
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32, cudnn.benchmark = tf32, tried > 0
    cudnn.benchmark_limit = tried or before[3]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before[1:]


@contextmanager
def untried() -> Iterator[None]:
    """Inside, convolutions are computed as cuDNN thinks best, whatever their shape: nothing is timed."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = before
