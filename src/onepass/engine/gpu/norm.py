"""Batch-norm with what surrounds it in one operation, for images that lie channels last.

That is the sum with a shortcut, ReLU, and their derivatives. On a GPU batch-norm, sum and ReLU do
little with every number that they read, so bytes are what counts. With `x` `[M, C]`, one row per
pixel:

    out = f(γ (x − m) / √(v + ε) + β + shortcut)
    z = (g + more) f'(out),   ∂γ = Σ z x̂,   ∂β = Σ z,   x̂ = (x − m) / √(v + ε)
    ∂x = γ / √(v + ε) (z − Σz / M − x̂ Σ(z x̂) / M)

where f is ReLU or nothing, and m and v are the mean and variance of the columns. Each way takes two
kernels, one that sums and one that writes, or a single one where a few columns fit into the
registers of one multiprocessor. Sums are added in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from onepass.engine import gpu

SMALL = 2048  # rows that one kernel does alone
TILE = 4096  # elements of a tile
WIDE = 32  # channels of a tile
WARPS = 4  # per tile
MOST = 528  # programs
PARTS = 128  # partial sums that a kernel adds up itself; a kernel of its own adds up more
LAST = torch.channels_last


@torch.library.custom_op(
    "onepass::norm",
    mutates_args=("running_mean", "running_var"),
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor? shortcut, Tensor(a!)? running_mean,"
    " Tensor(b!)? running_var, float share, float eps, bool relu) -> (Tensor, Tensor, Tensor)",
)
def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    share: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `m` and `1 / √(v + ε)`.

    Running statistics, if given, move: `r ← (1 − share) r + share b`, where `b` is `m` or
    `v M / (M − 1)`.
    """
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    if not gpu.by_kernels(x):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        inverse = (variance + eps).rsqrt()
        out = _wide(inverse * weight) * (x - _wide(mean)) + _wide(bias)
        out = out + (0 if shortcut is None else shortcut)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean, share)
            running_var.lerp_(variance * rows / (rows - 1), share)
        return _dense(out.relu() if relu else out), mean, inverse
    x, shortcut = _dense(x), None if shortcut is None else _dense(shortcut)
    weight, bias = weight.contiguous(), bias.contiguous()
    out, mean, inverse = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    plan, kernels = _Plan(rows, channels), _kernels()
    how = {"RELU": relu, "ADDS": shortcut is not None, "MOVES": running_mean is not None}
    rest = out, mean, inverse, running_mean, running_var, share, eps, rows
    with gpu.device_of(x):
        if plan.alone:
            kernels.alone[(plan.blocks,)](x, shortcut, weight, bias, *rest, **plan.fixed, **how)
            return out, mean, inverse
        sums = x.new_empty(plan.parts, 2, channels)
        kernels.moments[(plan.parts, plan.blocks)](x, sums, rows, **plan.fixed)
        parts = _total(sums, plan)
        kernels.normalise[(plan.parts, plan.blocks)](
            x, shortcut, weight, bias, *rest, sums, parts, PARTS=PARTS, **plan.fixed, **how
        )
    return out, mean, inverse


@torch.library.custom_op(
    "onepass::norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor? more, Tensor x, Tensor weight, Tensor bias, Tensor mean,"
    " Tensor inverse, Tensor? out, bool relu, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
)
def norm_backward(
    g: Tensor,
    more: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse: Tensor,
    out: Tensor | None,
    relu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`∂x`, `∂γ`, `∂β` and, with `keep`, `z`.

    The derivative of `relu` comes from `out`, or from `x` if there was no shortcut.
    """
    if not gpu.by_kernels(x):
        hat = (x - _wide(mean)) * _wide(inverse)
        z = g if more is None else g + more
        if relu:
            out = _wide(weight) * hat + _wide(bias) if out is None else out
            z = torch.where(out <= 0, 0.0, z)
        ones, products = z.sum((0, 2, 3)), (z * hat).sum((0, 2, 3))
        count = x.numel() // x.shape[1]
        gx = _wide(weight * inverse) * (z - _wide(ones / count) - hat * _wide(products / count))
        return _dense(gx), products, ones, _dense(z).clone() if keep else z.new_empty(0)
    g, x = _dense(g), _dense(x)
    weight, bias, mean, inverse = (t.contiguous() for t in (weight, bias, mean, inverse))
    more, out = (None if t is None else _dense(t) for t in (more, out))
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    z = torch.empty_like(x) if keep else x.new_empty(0)
    gradients = gx, gw, gb = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    columns = weight, bias, mean, inverse
    plan, kernels = _Plan(rows, channels), _kernels()
    how = {"RELU": relu, "BY_OUT": out is not None, "MORE": more is not None}
    with gpu.device_of(x):
        if plan.alone:
            kernels.alone_backward[(plan.blocks,)](
                *(g, more, x, *columns, out, *gradients, z, rows), KEEP=keep, **plan.fixed, **how
            )
            return gx, gw, gb, z
        sums = x.new_empty(plan.parts, 2, channels)
        kernels.products[(plan.parts, plan.blocks)](
            *(g, more, x, *columns, out, z, sums, rows), KEEP=keep, **plan.fixed, **how
        )
        parts = _total(sums, plan)
        if keep:
            g, more, out, how = z, None, None, dict.fromkeys(how, False)
        kernels.spread[(plan.parts, plan.blocks)](
            *(g, more, x, *columns, out, sums, *gradients, rows, parts),
            PARTS=PARTS,
            **plan.fixed,
            **how,
        )
    return gx, gw, gb, z


@cache
class _Plan:
    """How the kernels share the work: tiles of `rows` by `wide`, and `parts` programs."""

    def __init__(self, rows: int, channels: int) -> None:
        self.alone = rows <= SMALL
        if self.alone:
            self.rows = max(16, _power(rows))
            self.wide = max(4, min(2**14 // self.rows, _power(channels), 32))
            self.warps = max(4, min(16, self.rows * self.wide // 1024))
        else:
            self.wide = WIDE
            self.rows, self.warps = TILE // self.wide, WARPS
        self.blocks, tiles = -(-channels // self.wide), -(-rows // self.rows)
        self.parts = min(tiles, max(1, MOST // self.blocks))
        self.fixed = {"C": channels, "ROWS": self.rows, "WIDE": self.wide, "num_warps": self.warps}


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _wide(column: Tensor) -> Tensor:
    return column[:, None, None]


def _dense(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=LAST)


def _total(sums: Tensor, plan: _Plan) -> int:
    """How many parts of the sums are left, after many are added up."""
    if plan.parts <= PARTS:
        return plan.parts
    _kernels().total[(-(-sums.shape[2] // 4),)](
        sums, plan.parts, C=sums.shape[2], WIDE=4, PARTS=512
    )
    return 1


def _kernels() -> Any:
    from onepass.engine.gpu import norm_kernels

    return norm_kernels
