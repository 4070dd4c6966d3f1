"""What products of float32 numbers are computed in on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Inside, matrix products on a GPU are in TF32 (factors of 10 bits, summed in float32) or in float32; as before outside. A CPU is left alone."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
