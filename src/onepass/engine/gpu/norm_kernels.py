"""The kernels of `norm`. Imported only where there is Triton.

A program has some rows (pixels) and `WIDE` columns (channels) at a time.
"""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def summed(sums, parts, c, mine, C: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    first, second = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & mine[None, :]
        at = sums + part[:, None] * (2 * C) + c[None, :]
        first += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
        second += tl.sum(tl.load(at + C, mask=mask, other=0.0), 0)
    return first, second


@triton.jit
def columns(block, C: tl.constexpr, WIDE: tl.constexpr):
    c = block * WIDE + tl.arange(0, WIDE)
    return c, c < C


@triton.jit
def normed(v, mean, scale, shift, shortcut, at, mask, RELU: tl.constexpr, ADDS: tl.constexpr):
    """A tile, normalised, with the sum and ReLU behind it."""
    v = (v - mean[None, :]) * scale[None, :] + shift[None, :]
    if ADDS:
        v += tl.load(shortcut + at, mask=mask, other=0.0)
    if RELU:
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return v


@triton.jit
def about(x, rows, c, mine, C: tl.constexpr, ROWS: tl.constexpr):
    """The mean of the first rows of each column."""
    row = tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & mine[None, :]
    total = tl.sum(tl.load(x + row[:, None] * C + c[None, :], mask=mask, other=0.0), 0)
    return total / tl.minimum(rows, ROWS)


@triton.jit
def moments(x, sums, rows, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Σ (x − p) and Σ (x − p)² of every column; p is near its mean, so that little cancels."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c, mine = columns(tl.program_id(1), C, WIDE)
    pivot = about(x, rows, c, mine, C, ROWS)
    first, second = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & mine[None, :]
        v = tl.load(x + row[:, None] * C + c[None, :], mask=mask, other=0.0)
        v = tl.where(mask, v - pivot[None, :], 0.0)
        first += v
        second += v * v
    tl.store(sums + program * (2 * C) + c, tl.sum(first, 0), mask=mine)
    tl.store(sums + program * (2 * C) + C + c, tl.sum(second, 0), mask=mine)


@triton.jit
def total(sums, parts, C: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """The sums of all parts in the place of the first."""
    c, mine = columns(tl.program_id(0), C, WIDE)
    first, second = summed(sums, parts, c, mine, C, WIDE, PARTS)
    tl.store(sums + c, first, mask=mine)
    tl.store(sums + C + c, second, mask=mine)


@triton.jit
def note(
    c, mine, mean, inverse, variance, means, inverses, running_mean, running_var, share, rows,
    MOVES: tl.constexpr,
):  # fmt: skip
    """Store the statistics of a batch, and move the running ones."""
    tl.store(means + c, mean, mask=mine)
    tl.store(inverses + c, inverse, mask=mine)
    if MOVES:
        before = tl.load(running_mean + c, mask=mine, other=0.0)
        spread = tl.load(running_var + c, mask=mine, other=0.0)
        tl.store(running_mean + c, before + share * (mean - before), mask=mine)
        to = running_var + c
        tl.store(to, spread + share * (variance * (rows / (rows - 1.0)) - spread), mask=mine)


@triton.jit
def normalise(
    x, shortcut, weight, bias, out, means, inverses, running_mean, running_var, share, eps, rows,
    sums, parts, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    RELU: tl.constexpr, ADDS: tl.constexpr, MOVES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    c, mine = columns(tl.program_id(1), C, WIDE)
    first, second = summed(sums, parts, c, mine, C, WIDE, PARTS)
    first = first / rows
    mean = about(x, rows, c, mine, C, ROWS) + first
    variance = tl.maximum(second / rows - first * first, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.rsqrt(variance + eps)
    if program == 0:
        note(
            c, mine, mean, inverse, variance, means, inverses, running_mean, running_var,
            share, rows, MOVES,
        )  # fmt: skip
    scale = tl.load(weight + c, mask=mine, other=0.0) * inverse
    shift = tl.load(bias + c, mask=mine, other=0.0)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask, at = (row < rows)[:, None] & mine[None, :], row[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0)
        tl.store(out + at, normed(v, mean, scale, shift, shortcut, at, mask, RELU, ADDS), mask=mask)


@triton.jit
def alone(
    x, shortcut, weight, bias, out, means, inverses, running_mean, running_var, share, eps, rows,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    RELU: tl.constexpr, ADDS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    c, mine = columns(tl.program_id(0), C, WIDE)
    row = tl.arange(0, ROWS)
    mask, at = (row < rows)[:, None] & mine[None, :], row[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=mask, other=0.0)
    mean = tl.sum(v, 0) / rows
    far = tl.where(mask, v - mean[None, :], 0.0)
    variance = tl.sum(far * far, 0) / rows
    inverse = tl.rsqrt(variance + eps)
    note(
        c, mine, mean, inverse, variance, means, inverses, running_mean, running_var, share, rows,
        MOVES,
    )  # fmt: skip
    scale = tl.load(weight + c, mask=mine, other=0.0) * inverse
    shift = tl.load(bias + c, mask=mine, other=0.0)
    tl.store(out + at, normed(v, mean, scale, shift, shortcut, at, mask, RELU, ADDS), mask=mask)


@triton.jit
def derived(
    g, more, x, out, at, mask, mean, inverse, scale, shift,
    RELU: tl.constexpr, BY_OUT: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """`z` and `x̂` of a tile."""
    z = tl.load(g + at, mask=mask, other=0.0)
    far = tl.load(x + at, mask=mask, other=0.0) - mean[None, :]
    if MORE:
        z += tl.load(more + at, mask=mask, other=0.0)
    if RELU:
        if BY_OUT:
            # What is not a number lets a gradient through, as torch does.
            z = tl.where(tl.load(out + at, mask=mask, other=0.0) <= 0, 0.0, z)
        else:
            z = tl.where(far * scale[None, :] + shift[None, :] <= 0, 0.0, z)
    return z, far * inverse[None, :]


@triton.jit
def constants(weight, bias, means, inverses, c, mine):
    inverse = tl.load(inverses + c, mask=mine, other=0.0)
    scale = tl.load(weight + c, mask=mine, other=0.0) * inverse
    shift = tl.load(bias + c, mask=mine, other=0.0)
    return tl.load(means + c, mask=mine, other=0.0), inverse, scale, shift


@triton.jit
def products(
    g, more, x, weight, bias, means, inverses, out, kept, sums, rows,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    RELU: tl.constexpr, BY_OUT: tl.constexpr, MORE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Σ z x̂ and Σ z."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c, mine = columns(tl.program_id(1), C, WIDE)
    mean, inverse, scale, shift = constants(weight, bias, means, inverses, c, mine)
    first, second = tl.zeros([ROWS, WIDE], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask, at = (row < rows)[:, None] & mine[None, :], row[:, None] * C + c[None, :]
        z, hat = derived(g, more, x, out, at, mask, mean, inverse, scale, shift, RELU, BY_OUT, MORE)
        if KEEP:
            tl.store(kept + at, z, mask=mask)
        first += z * hat
        second += z
    tl.store(sums + program * (2 * C) + c, tl.sum(first, 0), mask=mine)
    tl.store(sums + program * (2 * C) + C + c, tl.sum(second, 0), mask=mine)


@triton.jit
def spread(
    g, more, x, weight, bias, means, inverses, out, sums, gx, gw, gb, rows, parts,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    RELU: tl.constexpr, BY_OUT: tl.constexpr, MORE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    c, mine = columns(tl.program_id(1), C, WIDE)
    mean, inverse, scale, shift = constants(weight, bias, means, inverses, c, mine)
    first, second = summed(sums, parts, c, mine, C, WIDE, PARTS)
    if program == 0:
        tl.store(gw + c, first, mask=mine)
        tl.store(gb + c, second, mask=mine)
    first, second = first / rows, second / rows
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        mask, at = (row < rows)[:, None] & mine[None, :], row[:, None] * C + c[None, :]
        z, hat = derived(g, more, x, out, at, mask, mean, inverse, scale, shift, RELU, BY_OUT, MORE)
        tl.store(gx + at, scale[None, :] * (z - second[None, :] - hat * first[None, :]), mask=mask)


@triton.jit
def alone_backward(
    g, more, x, weight, bias, means, inverses, out, gx, gw, gb, kept, rows,
    C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    RELU: tl.constexpr, BY_OUT: tl.constexpr, MORE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    c, mine = columns(tl.program_id(0), C, WIDE)
    mean, inverse, scale, shift = constants(weight, bias, means, inverses, c, mine)
    row = tl.arange(0, ROWS)
    mask, at = (row < rows)[:, None] & mine[None, :], row[:, None] * C + c[None, :]
    z, hat = derived(g, more, x, out, at, mask, mean, inverse, scale, shift, RELU, BY_OUT, MORE)
    if KEEP:
        tl.store(kept + at, z, mask=mask)
    first, second = tl.sum(z * hat, 0), tl.sum(z, 0)
    tl.store(gw + c, first, mask=mine)
    tl.store(gb + c, second, mask=mine)
    first, second = first / rows, second / rows
    tl.store(gx + at, scale[None, :] * (z - second[None, :] - hat * first[None, :]), mask=mask)
