"""The precision of products of float32 numbers on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(device: torch.device, *, tf32: bool, tried: int = 0) -> Iterator[None]:
    """Inside, products and convolutions on a GPU are in TF32 or in float32. A CPU is left alone.

    TF32 has factors of 10 bits, summed in float32. With `tried`, that number of ways of computing a
    convolution is timed when its shape first comes up, and the fastest is taken. What cuDNN
    believes to be fastest is not, where there are few channels.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    matmul = torch.get_float32_matmul_precision()
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32
    cudnn.benchmark = tried > 0
    cudnn.benchmark_limit = tried or cudnn.benchmark_limit
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def untried() -> Iterator[None]:
    """Inside, convolutions are computed as cuDNN thinks best, and nothing is timed."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = before
