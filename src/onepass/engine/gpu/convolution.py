"""Convolutions of many images with few channels, channels last, and their gradients.

As a product of matrices a convolution has rows for pixels and as many columns as there are channels. Few channels make a narrow product, of which
bytes are the most; `benchmarks/kernels.py` compares what cuDNN and these kernels take. Sums are added in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.grad import conv2d_input, conv2d_weight

from onepass.engine import gpu

LAST = torch.channels_last
PROGRAMS = 528  # of a gradient by the weights, which share its numbers first, then the pixels


class Tile(NamedTuple):
    """What a program has at a time: pixels, of each so many numbers of its window, and output channels; and how it is compiled."""

    rows: int
    inner: int
    wide: int
    warps: int = 4
    stages: int = 3

    def fixed(self) -> dict[str, Any]:
        precision = "ieee" if _is_exact() else "tf32"
        return {
            "ROWS": self.rows,
            "INNER": self.inner,
            "WIDE": self.wide,
            "PRECISION": precision,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def _is_exact() -> bool:
    return not torch.backends.cudnn.allow_tf32


def tile(outputs: int, pixels: int) -> Tile:
    """The fastest, by `benchmarks/kernels.py --tune` on an H200; in float32, where most are compiled for one check, one that is compiled soon."""
    if _is_exact():
        return Tile(64, 16, 32, stages=1)
    wide = 32 if outputs <= 32 else 128 if 64 < outputs <= 128 else 64
    if -(-pixels // 128) * -(-outputs // wide) < 64:
        return Tile(64, 64, 32)
    return Tile(128, 32, 32, warps=8, stages=1) if wide == 32 else Tile(128, 32, wide)


def weight_tile(outputs: int, pixels: int) -> Tile:
    """The same for gradients by the weights; `rows` are summed over."""
    if _is_exact():
        return Tile(32, 64, 32, stages=1)
    if outputs <= 32 or pixels * outputs**2 < 2**26:
        return Tile(64, 64, 32, stages=1)
    return Tile(32, 64, 64, stages=1) if outputs <= 64 else Tile(32, 128, 128, warps=8, stages=1)


@torch.library.custom_op(
    "onepass::convolve",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int stride, int padding) -> Tensor",
)
def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of `x` with square weights `[K, C, side, side]`."""
    if not gpu.by_kernels(x, math.prod(_shape(x, weight, stride, padding))):
        return torch.conv2d(x, weight, stride=stride, padding=padding).contiguous(
            memory_format=LAST
        )
    return _launch(x, weight, stride, padding)


@torch.library.custom_op(
    "onepass::convolve_inputs",
    mutates_args=(),
    schema="(Tensor g, Tensor weight, int stride, int padding, int height, int width) -> Tensor",
)
def convolve_inputs(
    g: Tensor, weight: Tensor, stride: int, padding: int, height: int, width: int
) -> Tensor:
    """The gradient by the inputs, images of this height and width, which are multiples of the stride; `g` is that by the output."""
    shape = (len(g), weight.shape[1], height, width)
    if not gpu.by_kernels(g, math.prod(shape)):
        found: Tensor = conv2d_input(shape, weight, g, stride, padding)  # type: ignore[no-untyped-call]
        return found.contiguous(memory_format=LAST)
    outputs, inputs, side, _ = weight.shape
    turned = torch.empty(
        (inputs, outputs, side, side), device=g.device, dtype=g.dtype, memory_format=LAST
    )
    with gpu.device_of(g):
        _kernels().turn[(-(-turned.numel() // 1024),)](
            weight.contiguous(memory_format=LAST), turned, outputs, inputs, side * side, SIZE=1024
        )
    if stride == 1:
        return _launch(g, turned, 1, side - 1 - padding)
    g = g.contiguous(memory_format=LAST)
    found = torch.empty(shape, device=g.device, dtype=g.dtype, memory_format=LAST)
    pixels = len(g) * (height // stride) * (width // stride)
    how = tile(inputs, pixels)
    with gpu.device_of(g):
        _kernels().inputs[(-(-pixels // how.rows), -(-inputs // how.wide), stride * stride)](
            g,
            turned,
            found,
            pixels,
            **_sizes(g, found),
            SIDE=side,
            STRIDE=stride,
            PAD=padding,
            **how.fixed(),
        )
    return found


@torch.library.custom_op(
    "onepass::convolve_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int stride, int padding, Tensor gamma, Tensor beta, Tensor mean, Tensor variance, float eps, Tensor? shortcut,"
    " bool relu) -> Tensor",
)
def convolve_norm(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    shortcut: Tensor | None,
    relu: bool,
) -> Tensor:
    """A convolution, batch-norm by running statistics behind it, the sum with a shortcut and ReLU, as in evaluation."""
    if not gpu.by_kernels(x, math.prod(_shape(x, weight, stride, padding))):
        out = batch_norm(
            torch.conv2d(x, weight, stride=stride, padding=padding),
            mean,
            variance,
            gamma,
            beta,
            False,
            0.0,
            eps,
        )
        out = out if shortcut is None else out + shortcut
        return (out.relu() if relu else out).contiguous(memory_format=LAST)
    return _launch(x, weight, stride, padding, (gamma, beta, mean, variance, eps, shortcut), relu)


def _launch(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    behind: tuple[Any, ...] = (None,) * 6,
    relu: bool = False,
) -> Tensor:
    x, weight = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
    *statistics, shortcut = (
        part.contiguous() if isinstance(part, Tensor) and part.dim() == 1 else part
        for part in behind
    )
    shortcut = None if shortcut is None else shortcut.contiguous(memory_format=LAST)
    outputs, _, side, _ = weight.shape
    out = torch.empty(
        _shape(x, weight, stride, padding), device=x.device, dtype=x.dtype, memory_format=LAST
    )
    pixels = out.numel() // outputs
    how = tile(outputs, pixels)
    with gpu.device_of(x):
        _kernels().convolve[(-(-pixels // how.rows), -(-outputs // how.wide))](
            x, weight, out, pixels, *statistics, shortcut, **_sizes(x, out), SIDE=side, STRIDE=stride, PAD=padding,
            NORM=statistics[0] is not None, ADDS=shortcut is not None, RELU=relu, **how.fixed(),
        )  # fmt: skip
    return out


@torch.library.custom_op(
    "onepass::convolve_weights",
    mutates_args=(),
    schema="(Tensor g, Tensor x, int side, int stride, int padding) -> Tensor",
)
def convolve_weights(g: Tensor, x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """The gradient by the weights, `[K, C, side, side]`, where `g` is that by the output."""
    if not gpu.by_kernels(x, g.numel()):
        shape = (g.shape[1], x.shape[1], side, side)
        found: Tensor = conv2d_weight(x, shape, g, stride, padding)  # type: ignore[no-untyped-call]
        return found.contiguous(memory_format=LAST)
    g, x = g.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    inputs, outputs, pixels = x.shape[1], g.shape[1], g.numel() // g.shape[1]
    how = weight_tile(outputs, pixels)
    blocks = -(-side * side * inputs // how.inner), -(-outputs // how.wide)
    programs = min(max(1, PROGRAMS // (blocks[0] * blocks[1])), -(-pixels // how.rows))
    parts = torch.empty((programs, outputs, side, side, inputs), device=x.device, dtype=x.dtype)
    with gpu.device_of(x):
        _kernels().weights[(programs, *blocks)](
            x,
            g,
            parts,
            pixels,
            **_sizes(x, g),
            SIDE=side,
            STRIDE=stride,
            PAD=padding,
            **how.fixed(),
        )
    return parts.sum(0).permute(0, 3, 1, 2)


def _shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, ...]:
    """Of the result of a convolution."""
    return (
        len(x),
        len(weight),
        *((n + 2 * padding - weight.shape[2]) // stride + 1 for n in x.shape[2:]),
    )


def _sizes(x: Tensor, out: Tensor) -> dict[str, int]:
    return {
        "C": x.shape[1],
        "H": x.shape[2],
        "W": x.shape[3],
        "K": out.shape[1],
        "HEIGHT": out.shape[2],
        "WIDTH": out.shape[3],
    }


def _kernels() -> Any:
    from onepass.engine.gpu import convolution_kernels

    return convolution_kernels
