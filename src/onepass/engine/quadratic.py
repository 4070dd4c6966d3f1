"""GEM's dual problem for many runs at once, on a GPU without synchronising with the host.

Each run has a small problem of its own: with its Gram matrix `A = G Gᵀ [n, n]` and its products
`b = G g [n]`,

    v = argmin ½ vᵀ (A + ridge I) v + bᵀ v   subject to   v ≥ margin.

With `v = u + margin` that is a linear complementarity problem: `w = A u + q`, `q = b + A margin`,
`u ≥ 0`, `w ≥ 0`, `uᵀ w = 0`. It is solved by principal pivoting (Murty: Note on a Bard-type scheme
for solving the complementarity problem, Opsearch 1974). Start with `u = 0`; as long as one of the
values (`w_k`, or `u_k` where the two were exchanged) is negative, exchange `w_k` and `u_k`. Taking
the most negative value needs few exchanges but may go round in circles; Murty's rule, the least
index, ends for every positive definite matrix.

`A` is often singular (two tasks with the same gradient), and known only to rounding. So `noise · I`
is added to the matrix that is pivoted, and proximal steps take its effect away again (Rockafellar:
Monotone operators and the proximal point algorithm, SIAM J. Control Optim. 1976):
`u ← argmin ½ uᵀ A u + qᵀ u + ½ noise ‖u − u_before‖²`, `u ≥ 0`. Another step changes only `q`, so
it goes on from the tableau of the last one. Two or three are enough where `A` is well above the
noise, and where `A` is zero `u` stays small: equal gradients share their multiplier. In between,
along an eigenvector of `A` with the value `λ`, a step leaves `noise / (noise + λ)` of what was
missing. `STEPS` are enough from `noise / 2` on; many more would find `u` for values of `A` that are
nothing but its errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.engine import gpu

Array = NDArray[np.float64]

# Powers of two, which a kernel represents exactly: it rounds its constants to float32. The noise is
# above the norm of the errors of a scaled Gram matrix of 100 constraints, each an error of 1e-6, as
# of sums in float32.
NOISE = 2.0**-16
SLACK = 2.0**-33  # relative; a value above −SLACK is not negative
TINY = 1e-30  # the square of a gradient that is no constraint
STEPS = 32  # proximal ones; 2e-6 is left along an eigenvalue of noise / 2
# Exchanges per constraint: before the least index is taken, and in all.
PATIENCE = 3
MOST = 50
# By the side of the tableau, whose float64 then fit into their registers.
WARPS = {16: 1, 32: 2, 64: 8, 128: 16}


def solve(
    gram: Tensor, products: Tensor, margin: Tensor, ridge: float = 0.0, noise: float = NOISE
) -> tuple[Tensor, Tensor]:
    """`v [R, n]` of every run, and which runs are solved `[R]`.

    Gram matrices are `[R, n, n]` and products `[R, n]`, both in float64; margins are `[R]`.
    Everything is scaled to a unit diagonal. A gradient of zero is no constraint: its `v` is the
    margin. A run is not solved, and its `v` is the margin too, if it has a number that is not
    finite, if it needs too many exchanges, or if its matrix is no Gram matrix up to `noise`, its
    relative error. Gradients may be almost dependent: at length 1, their least singular value may
    be below `√(noise / 2)`. Then constraints are met to about `√noise ‖g‖` only, and the result
    need not be the closest. The kernel is compiled when it first meets a size (up to 16, 32, 64 or
    128), so use it once before a CUDA graph is captured.

    >>> gram = torch.eye(3, dtype=torch.float64)[None]
    >>> solve(gram, torch.tensor([[-1.0, 2.0, 1.0]]).double(), torch.tensor([0.5]))
    (tensor([[1.0000, 0.5000, 0.5000]], dtype=torch.float64), tensor([True]))
    """
    diagonal, least = gram.diagonal(dim1=1, dim2=2), margin.to(gram)[:, None]
    finite = gram.isfinite().flatten(1).all(1) & products.isfinite().all(1)
    absent = ~((diagonal > TINY) & finite[:, None])
    lengths = (diagonal + ridge).masked_fill(absent, 1).sqrt()
    either = absent[:, :, None] | absent[:, None, :]
    matrix = (gram / lengths[:, :, None] / lengths[:, None, :]).masked_fill(either, 0)
    matrix.diagonal(dim1=1, dim2=2).fill_(1 + noise)
    q = ((products + (gram.sum(2) + ridge) * least) / lengths).masked_fill(absent, 0)
    size = q.abs().amax(1, keepdim=True)
    size = size.masked_fill(size == 0, 1)
    pivot = _on_device if gram.is_cuda and available(gram.shape[1]) else _on_host
    u, ended = pivot(matrix, q / size, noise)
    solved = ended & finite
    return least + (u * size / lengths).masked_fill(~solved[:, None], 0), solved


def available(n: int = 1) -> bool:
    """Whether problems of `n` constraints that are on a GPU are solved there."""
    return n <= max(WARPS) and gpu.has_triton()


def _on_host(matrices: Tensor, starts: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    problems = zip(matrices.cpu().numpy(), starts.cpu().numpy(), strict=True)
    found = [_pivoted(s.copy(), c.copy(), noise) for s, c in problems]
    u = torch.from_numpy(np.stack([u for u, _ in found])).to(matrices.device)
    return u, torch.tensor([ended for _, ended in found], device=matrices.device)


def _pivoted(s: Array, c: Array, noise: float) -> tuple[Array, bool]:
    """`u`, and whether it was found, of the scaled matrix `s` and `q = c`; overwrites both.

    `s` is swept (Goodnight: A tutorial on the sweep operator, American Statistician 1979): with the
    exchanged indices `F` (`sign` −1) and the others `N` (`sign` 1), `s_FF = −A_FF⁻¹`,
    `s_NF = A_NF A_FF⁻¹` and `s_NN = A_NN − A_NF A_FF⁻¹ A_FN`, symmetric as `A` is. `c` is one more
    column of it: `u_F = −c_F` and `w_N = c_N`, so the values are `sign · c`.
    """
    n, sign = len(c), np.ones(len(c))
    before, size = np.zeros(n), np.inf
    exchanges, steps, least, going = 0, 0, 0.0, True
    while going:
        diagonal = s.diagonal()
        # A matrix that is positive semidefinite up to noise / 2 has no pivot below that: such an
        # index is left out. A large u, of almost dependent constraints, has a large rounding error.
        values = np.where((sign > 0) & (diagonal < noise / 2), 0, sign * c)
        values /= np.sqrt(np.maximum(np.abs(diagonal), 1))
        if values.min() < -SLACK and exchanges < MOST * n:
            k = int(np.argmin(values) if exchanges < PATIENCE * n else np.argmax(values < -SLACK))
            y, pivot, value = s[k].copy(), s[k, k], c[k]
            y[k], s[k], s[:, k], c[k] = -sign[k], 0, 0, 0
            s -= y[:, None] * (y / pivot)
            c -= y * (value / pivot)
            sign[k] = -sign[k]
            exchanges += 1
        else:
            u = np.where(sign < 0, np.maximum(-c, 0), 0)
            change, least = noise * (before - u), float((sign * c).min())
            last, size = size, float(np.sqrt((change * change).sum()))
            # Steps never grow but for rounding, which another one would multiply.
            before = u if size <= last else before
            c += np.where(sign > 0, change, 0) - s @ np.where(sign < 0, change, 0)
            steps += 1
            going = SLACK < size <= last and steps < STEPS
    return before, exchanges < MOST * n and least >= -np.sqrt(noise)


# An operation of its own, so that the parallel streams of a captured step see what it reads.
@torch.library.custom_op(
    "onepass::pivot",
    mutates_args=(),
    schema="(Tensor matrices, Tensor starts, float noise) -> (Tensor, Tensor)",
)
def _on_device(matrices: Tensor, starts: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    matrices, starts = matrices.contiguous(), starts.contiguous()
    runs, n = starts.shape
    side = min(side for side in WARPS if side >= n)
    u, ended = torch.empty_like(starts), torch.empty(runs, dtype=torch.bool, device=starts.device)
    constants = noise, SLACK, PATIENCE, MOST, STEPS
    with gpu.device_of(starts):
        _kernels().pivot[(runs,)](
            matrices, starts, u, ended, n, side, *constants, num_warps=WARPS[side]
        )
    return u, ended


def _kernels() -> Any:
    from onepass.engine.gpu import pivot_kernels

    return pivot_kernels
