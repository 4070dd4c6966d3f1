"""Convolutions of many images with few channels, channels last, and their gradients.

As a product of matrices a convolution has rows for pixels and as many columns as there are channels. Few channels make a narrow product, of which
bytes are the most; `benchmarks/kernels.py` compares what cuDNN and these kernels take. Sums are added in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.grad import conv2d_weight

from onepass.engine import gpu

LAST = torch.channels_last
PROGRAMS = 264  # that share the pixels of a gradient by the weights


class Tile(NamedTuple):
    """What a program has at a time: pixels, of each so many numbers of its window, and output channels; and how it is compiled."""

    rows: int
    inner: int
    wide: int
    warps: int = 4
    stages: int = 3

    def fixed(self) -> dict[str, Any]:
        precision = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
        return {"ROWS": self.rows, "INNER": self.inner, "WIDE": self.wide, "PRECISION": precision, "num_warps": self.warps, "num_stages": self.stages}


def tile(outputs: int) -> Tile:
    return Tile(128, 32, gpu.tile_width(outputs))


def weight_tile(outputs: int) -> Tile:
    return Tile(64, 64, gpu.tile_width(outputs), stages=1)  # pixels are what is summed over, and to copy them turned round goes number by number


@torch.library.custom_op("onepass::convolve", mutates_args=(), schema="(Tensor x, Tensor weight, int stride, int padding, bool turned) -> Tensor")
def convolve(x: Tensor, weight: Tensor, stride: int, padding: int, turned: bool) -> Tensor:
    """The convolution of `x` with square weights `[K, C, side, side]`.

    With `turned`, its weights are turned round, and their first two dimensions exchanged: with padding `side − 1 − p` that is the gradient by the
    inputs of a convolution with padding `p` and stride 1.
    """
    if not gpu.by_kernels(x):
        weight = weight.flip(2, 3).transpose(0, 1) if turned else weight
        return torch.conv2d(x, weight, stride=stride, padding=padding).contiguous(memory_format=LAST)
    return _launch(x, weight, stride, padding, turned)


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
    if not gpu.by_kernels(x):
        out = batch_norm(torch.conv2d(x, weight, stride=stride, padding=padding), mean, variance, gamma, beta, False, 0.0, eps)
        out = out if shortcut is None else out + shortcut
        return (out.relu() if relu else out).contiguous(memory_format=LAST)
    return _launch(x, weight, stride, padding, False, (gamma, beta, mean, variance, eps, shortcut), relu)


def _launch(x: Tensor, weight: Tensor, stride: int, padding: int, turned: bool, behind: tuple[Any, ...] = (None,) * 6, relu: bool = False) -> Tensor:
    x, weight = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
    *statistics, shortcut = (part.contiguous() if isinstance(part, Tensor) and part.dim() == 1 else part for part in behind)
    shortcut = None if shortcut is None else shortcut.contiguous(memory_format=LAST)
    side, outputs = weight.shape[2], weight.shape[1 if turned else 0]
    height, width = ((n + 2 * padding - side) // stride + 1 for n in x.shape[2:])
    out = torch.empty((len(x), outputs, height, width), device=x.device, dtype=x.dtype, memory_format=LAST)
    pixels, how = len(x) * height * width, tile(outputs)
    with gpu.device_of(x):
        _kernels().convolve[(-(-pixels // how.rows), -(-outputs // how.wide))](
            x, weight, out, pixels, *statistics, shortcut, **_sizes(x, out), SIDE=side, STRIDE=stride, PAD=padding,
            TURNED=turned, NORM=statistics[0] is not None, ADDS=shortcut is not None, RELU=relu, **how.fixed(),
        )  # fmt: skip
    return out


@torch.library.custom_op("onepass::convolve_weights", mutates_args=(), schema="(Tensor g, Tensor x, int side, int stride, int padding) -> Tensor")
def convolve_weights(g: Tensor, x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """The gradient by the weights, `[K, C, side, side]`, where `g` is that by the output."""
    if not gpu.by_kernels(x):
        shape = (g.shape[1], x.shape[1], side, side)
        found: Tensor = conv2d_weight(x, shape, g, stride, padding)  # type: ignore[no-untyped-call]
        return found.contiguous(memory_format=LAST)
    g, x = g.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    inputs, outputs, pixels = x.shape[1], g.shape[1], g.numel() // g.shape[1]
    how = weight_tile(outputs)
    programs = min(PROGRAMS, -(-pixels // how.rows))
    parts = torch.empty((programs, outputs, side, side, inputs), device=x.device, dtype=x.dtype)
    with gpu.device_of(x):
        _kernels().weights[(programs, -(-side * side * inputs // how.inner), -(-outputs // how.wide))](
            x, g, parts, pixels, **_sizes(x, g), SIDE=side, STRIDE=stride, PAD=padding, **how.fixed()
        )
    return parts.sum(0).permute(0, 3, 1, 2)


def _sizes(x: Tensor, out: Tensor) -> dict[str, int]:
    return {"C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "K": out.shape[1], "HEIGHT": out.shape[2], "WIDTH": out.shape[3]}


def _kernels() -> Any:
    from onepass.engine.gpu import convolution_kernels

    return convolution_kernels
