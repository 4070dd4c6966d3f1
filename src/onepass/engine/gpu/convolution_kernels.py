"""The kernels of `convolution`: products of matrices whose left one, pixels by (tap, channel), is never made. Imported only where there is Triton."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def corners(
    m,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
):
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
    return tl.load(
        x + first[:, None] * C + (dy * W + dx)[None, :] * C + c[None, :], mask=inside, other=0.0
    )


@triton.jit
def convolve(
    x, w, out, pixels, gamma, beta, mean, variance, eps, shortcut,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    NORM: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With `NORM`, what comes behind is done too."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    y0, x0, first = corners(m, pixels, H, W, HEIGHT, WIDTH, STRIDE, PAD)
    taps: tl.constexpr = SIDE * SIDE
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, taps * C, INNER):
        t = start + tl.arange(0, INNER)
        at = t[:, None] + k[None, :] * (taps * C)
        weights = tl.load(w + at, mask=(t < taps * C)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(
            windows(x, y0, x0, first, t, H, W, C, SIDE), weights, total, input_precision=PRECISION
        )
    at, mask = m[:, None] * K + k[None, :], (m < pixels)[:, None] & (k < K)[None, :]
    if NORM:
        mine = k < K
        scale = tl.load(gamma + k, mask=mine, other=0.0) * tl.rsqrt(
            tl.load(variance + k, mask=mine, other=1.0) + eps
        )
        total = (total - tl.load(mean + k, mask=mine, other=0.0)[None, :]) * scale[
            None, :
        ] + tl.load(beta + k, mask=mine, other=0.0)[None, :]
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
    tl.store(
        turned + at, tl.load(w + (o * taps + taps - 1 - tap) * inputs + i, mask=mask), mask=mask
    )


@triton.jit
def inputs(
    g, w, out, pixels,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient by the inputs of a convolution whose stride is more than 1, with turned weights `[K, taps, C]`. Input pixels that leave the
    same remainder by the stride, down and across, are reached by the same taps; a program has pixels of one kind."""
    down, across = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    top, left = (down + PAD) % STRIDE, (across + PAD) % STRIDE  # the first tap that reaches them
    many, wide = (
        (SIDE - top + STRIDE - 1) // STRIDE,
        (SIDE - left + STRIDE - 1) // STRIDE,
    )  # how many do, maybe none
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
        inside = (
            (row >= 0) & (row < H) & (column >= 0) & (column < W) & (t < many * wide * C)[None, :]
        )
        seen = tl.load(
            g + (first[:, None] - (dy * W + dx)[None, :]) * C + c[None, :], mask=inside, other=0.0
        )
        tap = taps - 1 - (top + dy * STRIDE) * SIDE - (left + dx * STRIDE)
        at = (tap * C + c)[:, None] + k[None, :] * (taps * C)
        right = tl.load(w + at, mask=(t < many * wide * C)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(seen, right, total, input_precision=PRECISION)
    at = ((image * HEIGHT + y * STRIDE + down) * WIDTH + x * STRIDE + across)[:, None] * K + k[
        None, :
    ]
    tl.store(out + at, total, mask=(m < pixels)[:, None] & (k < K)[None, :])


@triton.jit
def split(v):
    large = v.to(tl.bfloat16)
    return large, (v - large.to(tl.float32)).to(tl.bfloat16)


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
        right = tl.load(
            g + m[:, None] * K + k[None, :],
            mask=(m < pixels)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        left = windows(x, y0, x0, first, t, H, W, C, SIDE)
        if PRECISION == "ieee":
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        else:
            # Matrix units take factors of 32 bits only if the dimension that is summed over comes last in memory; here it comes first. So each number
            # is the sum of two of bfloat16, and three of the four products are as exact as one of factors of 16 bits.
            a, a_rest = split(left)
            b, b_rest = split(right)
            total = tl.dot(tl.trans(a_rest), b, total)
            total = tl.dot(tl.trans(a), b_rest, total)
            total = tl.dot(tl.trans(a), b, total)
    at = program * (K * taps * C) + k[None, :] * (taps * C) + t[:, None]
    tl.store(parts + at, total, mask=(t < taps * C)[:, None] & (k < K)[None, :])
