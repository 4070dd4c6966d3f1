"""The kernels of `convolution`: products of matrices whose left one, pixels by (tap, channel), is never made. Imported only where there is Triton."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def corners(m, pixels, H: tl.constexpr, W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr):
    """Where the window of each output pixel begins in its image: row, column, and pixel of all images."""
    y, x = (m // WIDTH) % HEIGHT * STRIDE - PAD, m % WIDTH * STRIDE - PAD
    return tl.where(m < pixels, y, -H - 8), x, (m // (WIDTH * HEIGHT) * H + y) * W + x


@triton.jit
def windows(
    x, y0, x0, first, t,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Numbers `t` (tap by tap, channel by channel) of the windows that begin there; zero beyond the image's edges."""
    tap, c = t // C, t % C
    dy, dx = tap // SIDE, tap % SIDE
    row, column = y0[:, None] + dy[None, :], x0[:, None] + dx[None, :]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (t < SIDE * SIDE * C)[None, :]
    return tl.load(x + first[:, None] * C + (dy * W + dx)[None, :] * C + c[None, :], mask=inside, other=0.0)


@triton.jit
def convolve(
    x, w, out, pixels, gamma, beta, mean, variance, eps, shortcut,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    TURNED: tl.constexpr, NORM: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With `TURNED`, of weights `[C, taps, K]` that are turned round: the gradient by the input of a convolution from K to C channels. With
    `NORM`, what comes behind is done too."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    y0, x0, first = corners(m, pixels, H, W, HEIGHT, WIDTH, STRIDE, PAD)
    taps: tl.constexpr = SIDE * SIDE
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, taps * C, INNER):
        t = start + tl.arange(0, INNER)
        if TURNED:
            at = (t % C)[:, None] * (taps * K) + (taps - 1 - t // C)[:, None] * K + k[None, :]
        else:
            at = t[:, None] + k[None, :] * (taps * C)
        weights = tl.load(w + at, mask=(t < taps * C)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(windows(x, y0, x0, first, t, H, W, C, SIDE), weights, total, input_precision=PRECISION)
    at, mask = m[:, None] * K + k[None, :], (m < pixels)[:, None] & (k < K)[None, :]
    if NORM:
        mine = k < K
        scale = tl.load(gamma + k, mask=mine, other=0.0) * tl.rsqrt(tl.load(variance + k, mask=mine, other=1.0) + eps)
        total = (total - tl.load(mean + k, mask=mine, other=0.0)[None, :]) * scale[None, :] + tl.load(beta + k, mask=mine, other=0.0)[None, :]
        if ADDS:
            total += tl.load(shortcut + at, mask=mask, other=0.0)
        if RELU:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, total, mask=mask)


@triton.jit
def weights(
    x, g, parts, pixels,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient by the weights, `[K, taps, C]`, of the pixels of this program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    taps: tl.constexpr = SIDE * SIDE
    t = tl.program_id(1) * INNER + tl.arange(0, INNER)
    k = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros([INNER, WIDE], tl.float32)
    for start in range(program * ROWS, pixels, programs * ROWS):
        m = start + tl.arange(0, ROWS)
        y0, x0, first = corners(m, pixels, H, W, HEIGHT, WIDTH, STRIDE, PAD)
        right = tl.load(g + m[:, None] * K + k[None, :], mask=(m < pixels)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(tl.trans(windows(x, y0, x0, first, t, H, W, C, SIDE)), right, total, input_precision=PRECISION)
    at = program * (K * taps * C) + k[None, :] * (taps * C) + t[:, None]
    tl.store(parts + at, total, mask=(t < taps * C)[:, None] & (k < K)[None, :])
