"""The kernels of `convolution`. Imported only where there is Triton.

They are products of matrices, whose left one has a row per pixel and a column per window element
(tap, channel). It is never stored: a program loads its tiles from the images.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def corners(
    m, pixels,
    H: tl.constexpr, W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Where the window of each output pixel begins: row, column, and pixel of all images."""
    y, x = (m // WIDTH) % HEIGHT * STRIDE - PAD, m % WIDTH * STRIDE - PAD
    return tl.where(m < pixels, y, -H - 8), x, (m // (WIDTH * HEIGHT) * H + y) * W + x


@triton.jit
def windows(
    x, y0, x0, first, t,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The elements `t` of the windows that begin there; zero beyond the image's edges."""
    tap, c = t // C, t % C
    dy, dx = tap // SIDE, tap % SIDE
    row, column = y0[:, None] + dy[None, :], x0[:, None] + dx[None, :]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (t < SIDE * SIDE * C)[None, :]
    at = x + first[:, None] * C + (dy * W + dx)[None, :] * C + c[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def convolve(
    x, w, out, pixels, gamma, beta, mean, variance, eps, shortcut,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    NORM: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution; with `NORM`, batch-norm, sum and ReLU behind it too."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    y0, x0, first = corners(m, pixels, H, W, HEIGHT, WIDTH, STRIDE, PAD)
    taps: tl.constexpr = SIDE * SIDE
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, taps * C, INNER):
        t = start + tl.arange(0, INNER)
        at = t[:, None] + k[None, :] * (taps * C)
        right = tl.load(w + at, mask=(t < taps * C)[:, None] & (k < K)[None, :], other=0.0)
        left = windows(x, y0, x0, first, t, H, W, C, SIDE)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at, mask = m[:, None] * K + k[None, :], (m < pixels)[:, None] & (k < K)[None, :]
    if NORM:
        mine = k < K
        scale = tl.load(gamma + k, mask=mine, other=0.0)
        scale = scale * tl.rsqrt(tl.load(variance + k, mask=mine, other=1.0) + eps)
        total = (total - tl.load(mean + k, mask=mine, other=0.0)[None, :]) * scale[None, :]
        total = total + tl.load(beta + k, mask=mine, other=0.0)[None, :]
        if ADDS:
            total += tl.load(shortcut + at, mask=mask, other=0.0)
        if RELU:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, total, mask=mask)


@triton.jit
def turn(w, turned, outputs, inputs, taps, SIZE: tl.constexpr):
    """Weights `[outputs, taps, inputs]` as `[inputs, taps, outputs]`, the last tap first."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < outputs * inputs * taps
    o, tap, i = at % outputs, at // outputs % taps, at // (outputs * taps)
    to = turned + at
    tl.store(to, tl.load(w + (o * taps + taps - 1 - tap) * inputs + i, mask=mask), mask=mask)


@triton.jit
def inputs(
    g, w, out, pixels,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient by the inputs for a stride of more than 1, with turned weights `[K, taps, C]`.

    Input pixels that leave the same remainder by the stride, down and across, are reached by the
    same taps. A program has pixels of one such kind.
    """
    down, across = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    # The first tap that reaches them, and how many do, maybe none.
    top, left = (down + PAD) % STRIDE, (across + PAD) % STRIDE
    many, wide = (SIDE - top + STRIDE - 1) // STRIDE, (SIDE - left + STRIDE - 1) // STRIDE
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    across_image: tl.constexpr = WIDTH // STRIDE
    in_image: tl.constexpr = HEIGHT // STRIDE * across_image
    image, y, x = m // in_image, m // across_image % (HEIGHT // STRIDE), m % across_image
    y0, x0 = tl.where(m < pixels, y + (down + PAD) // STRIDE, -H - 8), x + (across + PAD) // STRIDE
    first = (image * H + y + (down + PAD) // STRIDE) * W + x0
    taps: tl.constexpr = SIDE * SIDE
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, many * wide * C, INNER):
        t = start + tl.arange(0, INNER)
        dy, dx, c = t // C // tl.maximum(wide, 1), t // C % tl.maximum(wide, 1), t % C
        row, column = y0[:, None] - dy[None, :], x0[:, None] - dx[None, :]
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        there = t < many * wide * C
        inside = inside & there[None, :]
        at = g + (first[:, None] - (dy * W + dx)[None, :]) * C + c[None, :]
        seen = tl.load(at, mask=inside, other=0.0)
        tap = taps - 1 - (top + dy * STRIDE) * SIDE - (left + dx * STRIDE)
        at = (tap * C + c)[:, None] + k[None, :] * (taps * C)
        right = tl.load(w + at, mask=there[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(seen, right, total, input_precision=PRECISION)
    pixel = (image * HEIGHT + y * STRIDE + down) * WIDTH + x * STRIDE + across
    at = pixel[:, None] * K + k[None, :]
    tl.store(out + at, total, mask=(m < pixels)[:, None] & (k < K)[None, :])


@triton.jit
def split(v):
    """A number as the sum of two of bfloat16."""
    large = v.to(tl.bfloat16)
    return large, (v - large.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def weights(
    x, g, parts, pixels,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
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
        mask = (m < pixels)[:, None] & (k < K)[None, :]
        right = tl.load(g + m[:, None] * K + k[None, :], mask=mask, other=0.0)
        left = windows(x, y0, x0, first, t, H, W, C, SIDE)
        if PRECISION == "ieee":
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        else:
            # Matrix units take factors of 32 bits only if the dimension that is summed over comes
            # last in memory; here it comes first. So each number is the sum of two of bfloat16.
            # Three of the four products are as exact as one of factors of 16 bits.
            a, a_rest = split(left)
            b, b_rest = split(right)
            total = tl.dot(tl.trans(a_rest), b, total)
            total = tl.dot(tl.trans(a), b_rest, total)
            total = tl.dot(tl.trans(a), b, total)
    at = program * (K * taps * C) + k[None, :] * (taps * C) + t[:, None]
    tl.store(parts + at, total, mask=(t < taps * C)[:, None] & (k < K)[None, :])
