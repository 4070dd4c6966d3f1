"""GEM's dual for many runs at once; on a GPU the host is asked nothing.

Each run has a small problem of its own: with its Gram matrix `A = G Gᵀ [n, n]` and its products `b = G g [n]`,

    v = argmin ½ vᵀ (A + ridge I) v + bᵀ v   subject to   v ≥ margin.

With `v = u + margin` that is a linear complementarity problem: `w = A u + q`, `q = b + A margin`, `u ≥ 0`, `w ≥ 0`, `uᵀ w = 0`. It is solved by
principal pivoting (Murty: Note on a Bard-type scheme for solving the complementarity problem, Opsearch 1974): start with `u = 0`; as long as one
of the values (`w_k`, or `u_k` where the two were exchanged) is negative, exchange `w_k` and `u_k`. Taking the most negative value needs few
exchanges but may go round in circles; Murty's rule, the least index, ends for every positive definite matrix.

`A` is often singular (two tasks with the same gradient), and known only to rounding. So `noise · I` is added to the matrix that is pivoted, and
proximal steps take its effect away again (Rockafellar: Monotone operators and the proximal point algorithm, SIAM J. Control Optim. 1976):
`u ← argmin ½ uᵀ A u + qᵀ u + ½ noise ‖u − u_before‖²`, `u ≥ 0`. Another step changes only `q`, so it goes on from the tableau of the last one. Two
or three are enough where `A` is well above the noise, and where `A` is zero `u` stays small: equal gradients share their multiplier. In between,
along an eigenvector of `A` with the value `λ`, a step leaves `noise / (noise + λ)` of what was missing. `STEPS` are enough from `noise / 2` on; many
more would find `u` for values of `A` that are nothing but its errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.engine import gpu

Array = NDArray[np.float64]

# Powers of two, which a kernel has as they are: it rounds its constants to float32.
NOISE = (
    2.0**-16
)  # above the norm of the errors of a scaled Gram matrix of 100 constraints, each an error of 1e-6, as of sums in float32
SLACK = 2.0**-33  # relative; a value above −SLACK is not negative
TINY = 1e-30  # the square of a gradient that is no constraint
STEPS = 32  # proximal ones; 2e-6 is left along an eigenvalue of noise / 2
PATIENCE, MOST = 3, 50  # exchanges a constraint: before the least index is taken, and in all
WARPS = {
    16: 1,
    32: 2,
    64: 8,
    128: 16,
}  # by the side of the tableau, whose float64 then fit into their registers


def solve(
    gram: Tensor, products: Tensor, margin: Tensor, ridge: float = 0.0, noise: float = NOISE
) -> tuple[Tensor, Tensor]:
    """`v [R, n]` of the Gram matrices `[R, n, n]` and products `[R, n]` (float64) and margins `[R]`, and which runs are solved `[R]`.

    Everything is scaled to a unit diagonal. A gradient of zero is no constraint: its `v` is the margin. Not solved, and the margin too, is a run
    with a number that is not finite, with too many exchanges, or with a matrix that is no Gram matrix up to `noise`, its relative error.
    Gradients that are dependent but for less than `√(noise / 2)`, a singular value of them at length 1, have constraints that are met to about
    `√noise ‖g‖` only, and the result need not be the closest. The kernel is compiled when it first meets a size (up to 16, 32, 64 or 128), so use
    it once before a CUDA graph is captured.

    >>> gram, products = torch.eye(3, dtype=torch.float64)[None], torch.tensor([[-1.0, 2.0, 1.0]], dtype=torch.float64)
    >>> solve(gram, products, torch.tensor([0.5]))
    (tensor([[1.0000, 0.5000, 0.5000]], dtype=torch.float64), tensor([True]))
    """
    diagonal, least = gram.diagonal(dim1=1, dim2=2), margin.to(gram)[:, None]
    finite = gram.isfinite().flatten(1).all(1) & products.isfinite().all(1)
    absent = ~((diagonal > TINY) & finite[:, None])
    lengths = (diagonal + ridge).masked_fill(absent, 1).sqrt()
    matrix = (gram / lengths[:, :, None] / lengths[:, None, :]).masked_fill(
        absent[:, :, None] | absent[:, None, :], 0
    )
    matrix.diagonal(dim1=1, dim2=2).fill_(1 + noise)
    q = ((products + (gram.sum(2) + ridge) * least) / lengths).masked_fill(absent, 0)
    size = q.abs().amax(1, keepdim=True)
    size = size.masked_fill(size == 0, 1)
    pivot = _on_device if gram.is_cuda and available(gram.shape[1]) else _on_host
    u, ended = pivot(matrix, q / size, noise)
    solved = ended & finite
    return least + (u * size / lengths).masked_fill(~solved[:, None], 0), solved


def available(n: int = 1) -> bool:
    """Whether the problems of `n` constraints that are on a GPU are solved there."""
    return n <= max(WARPS) and gpu.has_triton()


def _on_host(matrices: Tensor, starts: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    found = [
        _pivoted(s.copy(), c.copy(), noise)
        for s, c in zip(matrices.cpu().numpy(), starts.cpu().numpy(), strict=True)
    ]
    u = torch.from_numpy(np.stack([u for u, _ in found]))
    return u.to(matrices.device), torch.tensor(
        [ended for _, ended in found], device=matrices.device
    )


def _pivoted(s: Array, c: Array, noise: float) -> tuple[Array, bool]:
    """`u`, and whether it was found, of the scaled matrix `s` and `q = c`, both of which are overwritten.

    `s` is swept (Goodnight: A tutorial on the sweep operator, American Statistician 1979): with the exchanged indices `F` (`sign` −1) and the others
    `N` (`sign` 1), `s_FF = −A_FF⁻¹`, `s_NF = A_NF A_FF⁻¹` and `s_NN = A_NN − A_NF A_FF⁻¹ A_FN`, symmetric as `A` is. `c` is one more column of it:
    `u_F = −c_F` and `w_N = c_N`, so the values are `sign · c`.
    """
    n, exchanges, steps, size, least, going = len(c), 0, 0, np.inf, 0.0, True
    sign, before = np.ones(n), np.zeros(n)
    while going:
        diagonal = s.diagonal()
        # A large u, of almost dependent constraints, has a large rounding error too. And a matrix that is positive semidefinite up to noise / 2
        # has no pivot below that: such an index is left out.
        values = np.where((sign > 0) & (diagonal < noise / 2), 0, sign * c) / np.sqrt(
            np.maximum(np.abs(diagonal), 1)
        )
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
            before = (
                u if size <= last else before
            )  # steps never grow; but for rounding, which another one would multiply
            c += np.where(sign > 0, change, 0) - s @ np.where(sign < 0, change, 0)
            steps += 1
            going = SLACK < size <= last and steps < STEPS
    return before, exchanges < MOST * n and least >= -np.sqrt(noise)


# As an operation of its own, so that whoever watches the operations of a step sees what it reads and what it makes.
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
