"""Convolutions of many images with few channels, channels last, and their gradients.

As a product of matrices a convolution has one row per pixel and one column per channel. Few
channels make a narrow product, which is bound by bytes; `benchmarks/kernels.py` compares these
kernels with cuDNN. Sums are added in a fixed order.
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
PROGRAMS = 528  # of a gradient by the weights: they share the weights first, then the pixels


class Tile(NamedTuple):
    """How a kernel is compiled: `rows` pixels, `inner` window elements of each, `wide` outputs."""

    rows: int
    inner: int
    wide: int
    warps: int = 4
    stages: int = 3

    def fixed(self) -> dict[str, Any]:
        precision = "ieee" if _is_exact() else "tf32"
        tile = {"ROWS": self.rows, "INNER": self.inner, "WIDE": self.wide, "PRECISION": precision}
        return tile | {"num_warps": self.warps, "num_stages": self.stages}


def _is_exact() -> bool:
    return not torch.backends.cudnn.allow_tf32


def tile(outputs: int, pixels: int) -> Tile:
    """The fastest tile, by `benchmarks/kernels.py --tune` on an H200.

    In float32, where most kernels are compiled for one check, the tile compiles quickly instead.
    """
    if _is_exact():
        return Tile(64, 16, 32, stages=1)
    wide = 128 if 64 < outputs <= 128 else 64
    if outputs <= 32:
        wide = 32
    if -(-pixels // 128) * -(-outputs // wide) < 64:
        return Tile(64, 64, 32)
    return Tile(128, 32, 32, warps=8, stages=1) if wide == 32 else Tile(128, 32, wide)


def weight_tile(outputs: int, pixels: int) -> Tile:
    """The same for gradients by the weights, which sum over `rows`."""
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
        return _dense(torch.conv2d(x, weight, stride=stride, padding=padding))
    return _launch(x, weight, stride, padding)


@torch.library.custom_op(
    "onepass::convolve_inputs",
    mutates_args=(),
    schema="(Tensor g, Tensor weight, int stride, int padding, int height, int width) -> Tensor",
)
def convolve_inputs(
    g: Tensor, weight: Tensor, stride: int, padding: int, height: int, width: int
) -> Tensor:
    """The gradient by the inputs, given that by the outputs.

    The inputs have this height and width, which are multiples of the stride.
    """
    shape = (len(g), weight.shape[1], height, width)
    if not gpu.by_kernels(g, math.prod(shape)):
        found: Tensor = conv2d_input(shape, weight, g, stride, padding)  # type: ignore[no-untyped-call]
        return _dense(found)
    outputs, inputs, side, _ = weight.shape
    turned = _empty((inputs, outputs, side, side), g)
    with gpu.device_of(g):
        _kernels().turn[(-(-turned.numel() // 1024),)](
            _dense(weight), turned, outputs, inputs, side * side, SIZE=1024
        )
    if stride == 1:
        return _launch(g, turned, 1, side - 1 - padding)
    g = _dense(g)
    found = _empty(shape, g)
    pixels = len(g) * (height // stride) * (width // stride)
    how = tile(inputs, pixels)
    with gpu.device_of(g):
        _kernels().inputs[(-(-pixels // how.rows), -(-inputs // how.wide), stride * stride)](
            *(g, turned, found, pixels), **_sizes(g, found, side, stride, padding), **how.fixed()
        )
    return found


@torch.library.custom_op(
    "onepass::convolve_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int stride, int padding, Tensor gamma, Tensor beta,"
    " Tensor mean, Tensor variance, float eps, Tensor? shortcut, bool relu) -> Tensor",
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
    """A convolution, batch-norm by running statistics, the sum with a shortcut, and ReLU."""
    if not gpu.by_kernels(x, math.prod(_shape(x, weight, stride, padding))):
        out = torch.conv2d(x, weight, stride=stride, padding=padding)
        out = batch_norm(out, mean, variance, gamma, beta, False, 0.0, eps)
        out = out if shortcut is None else out + shortcut
        return _dense(out.relu() if relu else out)
    return _launch(x, weight, stride, padding, (gamma, beta, mean, variance, eps, shortcut), relu)


def _launch(
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    behind: tuple[Any, ...] = (None,) * 6,
    relu: bool = False,
) -> Tensor:
    x, weight = _dense(x), _dense(weight)
    *statistics, shortcut = (
        part.contiguous() if isinstance(part, Tensor) and part.dim() == 1 else part
        for part in behind
    )
    shortcut = None if shortcut is None else _dense(shortcut)
    outputs, _, side, _ = weight.shape
    out = _empty(_shape(x, weight, stride, padding), x)
    pixels = out.numel() // outputs
    how = tile(outputs, pixels)
    with gpu.device_of(x):
        _kernels().convolve[(-(-pixels // how.rows), -(-outputs // how.wide))](
            *(x, weight, out, pixels, *statistics, shortcut),
            **_sizes(x, out, side, stride, padding),
            NORM=statistics[0] is not None,
            ADDS=shortcut is not None,
            RELU=relu,
            **how.fixed(),
        )
    return out


@torch.library.custom_op(
    "onepass::convolve_weights",
    mutates_args=(),
    schema="(Tensor g, Tensor x, int side, int stride, int padding) -> Tensor",
)
def convolve_weights(g: Tensor, x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """The gradient by the weights, `[K, C, side, side]`, given that by the outputs."""
    if not gpu.by_kernels(x, g.numel()):
        shape = (g.shape[1], x.shape[1], side, side)
        found: Tensor = conv2d_weight(x, shape, g, stride, padding)  # type: ignore[no-untyped-call]
        return _dense(found)
    g, x = _dense(g), _dense(x)
    inputs, outputs, pixels = x.shape[1], g.shape[1], g.numel() // g.shape[1]
    how = weight_tile(outputs, pixels)
    blocks = -(-side * side * inputs // how.inner), -(-outputs // how.wide)
    programs = min(max(1, PROGRAMS // (blocks[0] * blocks[1])), -(-pixels // how.rows))
    parts = torch.empty((programs, outputs, side, side, inputs), device=x.device, dtype=x.dtype)
    with gpu.device_of(x):
        _kernels().weights[(programs, *blocks)](
            *(x, g, parts, pixels), **_sizes(x, g, side, stride, padding), **how.fixed()
        )
    return parts.sum(0).permute(0, 3, 1, 2)


def _dense(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=LAST)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=LAST)


def _shape(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, ...]:
    """The shape of the result of a convolution."""
    size = ((n + 2 * padding - weight.shape[2]) // stride + 1 for n in x.shape[2:])
    return (len(x), len(weight), *size)


def _sizes(x: Tensor, out: Tensor, side: int, stride: int, padding: int) -> dict[str, int]:
    _, inputs, height, width = x.shape
    images = {"C": inputs, "H": height, "W": width}
    images |= {"K": out.shape[1], "HEIGHT": out.shape[2], "WIDTH": out.shape[3]}
    return images | {"SIDE": side, "STRIDE": stride, "PAD": padding}


def _kernels() -> Any:
    from onepass.engine.gpu import convolution_kernels

    return convolution_kernels
