"""The kernel of `engine/quadratic.py`. Imported only where there is Triton."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit(do_not_specialize=["n"])  # or it is compiled again for some of them
def pivot(
    matrices, starts, found, ended, n, SIDE: tl.constexpr, NOISE: tl.constexpr,
    SLACK: tl.constexpr, PATIENCE: tl.constexpr, MOST: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`quadratic._pivoted`, line by line, one run per program.

    Vectors lie along the columns of the tile, of which a thread has few.
    """
    run = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIDE)
    here = i < n
    s = tl.load(
        matrices + run * n * n + i[:, None] * n + i[None, :],
        mask=here[:, None] & here[None, :],
        other=0.0,
    )
    c = tl.load(starts + run * n + i, mask=here, other=0.0)
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], s, 0.0), 0)
    sign = tl.full((SIDE,), 1.0, tl.float64)
    before = tl.zeros((SIDE,), tl.float64)
    size = tl.full((), float("inf"), tl.float64)
    least = tl.full((), 0.0, tl.float64)
    exchanges, step, going = 0, 0, n > 0
    while going:
        values = tl.where((sign > 0) & (diagonal < NOISE / 2), 0.0, sign * c)
        values = values / tl.sqrt(tl.maximum(tl.abs(diagonal), 1.0))
        if (tl.min(values) < -SLACK) & (exchanges < MOST * n):
            k = tl.where(
                exchanges < PATIENCE * n,
                tl.argmin(values, 0),
                tl.min(tl.where(values < -SLACK, i, SIDE)),
            )
            y = tl.where(i == k, -sign, tl.sum(tl.where(i[:, None] == k, s, 0.0), 0))
            pivot = tl.sum(tl.where(i == k, diagonal, 0.0))
            value = tl.sum(tl.where(i == k, c, 0.0))
            rest = tl.where((i[:, None] == k) | (i[None, :] == k), 0.0, s)
            s = rest - (y / pivot)[:, None] * y[None, :]
            c = tl.where(i == k, 0.0, c) - y * (value / pivot)
            diagonal = tl.where(i == k, 0.0, diagonal) - y * (y / pivot)
            sign = tl.where(i == k, -sign, sign)
            exchanges += 1
        else:
            u = tl.where(sign < 0, tl.maximum(-c, 0.0), 0.0)
            change = NOISE * (before - u)
            least = tl.min(sign * c)
            last = size
            size = tl.sqrt(tl.sum(change * change))
            before = tl.where(size <= last, u, before)
            entering = tl.where(sign > 0, change, 0.0)
            c += entering - tl.sum(s * tl.where(sign < 0, change, 0.0)[:, None], 0)
            step += 1
            going = (size > SLACK) & (size <= last) & (step < STEPS)
    tl.store(found + run * n + i, before, mask=here)
    tl.store(ended + run, (exchanges < MOST * n) & (least >= -(NOISE**0.5)))
