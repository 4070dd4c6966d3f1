"""GEM: gradient episodic memory.

Lopez-Paz, Ranzato: Gradient episodic memory for continual learning, NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import lsq_linear, nnls
from torch import Tensor

from onepass.engine import quadratic
from onepass.engine.algebra import dot, gram
from onepass.engine.batch import Batch
from onepass.engine.precision import products
from onepass.learners.agem import TINY
from onepass.learners.declarations import Capture, Cost, Workload
from onepass.learners.rehearsal import Rehearsal
from onepass.learners.state import per_run

Matrix = NDArray[np.float64]
ROUNDING = 1e-9  # relative; beyond it a solution in float64 is not one
# An eigenvalue of products of unit vectors: float64 rounds its root by a billionth at most.
SINGULAR = 1e-6


def closest(
    g: Tensor, constraints: Tensor, margin: float = 0.0, ridge: float = 0.0, again: int = 3
) -> Tensor:
    """The closest vector to `g [P]` with `G g̃ ≥ 0`, `G [n, P]`.

    `g̃ = Gᵀ v + g`, `v = argmin ½ vᵀ G Gᵀ v + gᵀ Gᵀ v` subject to `v ≥ 0`. That is the least-squares
    problem `min ‖Gᵀ v + g‖`. Only lengths and products of its columns matter, so it is solved for a
    small square root `S` of their products, `Sᵀ S = [Gᵀ g]ᵀ [Gᵀ g]`. Where these are almost
    singular (two tasks have the same gradient), `S` is the triangle of a QR of `[Gᵀ g]`, for which
    they are not formed. Rows of `G` are scaled to length 1, which changes no constraint.

    `margin` asks for `v ≥ margin` and `ridge` adds `ridge · I` to `G Gᵀ`, in the units of GEM's
    code; then constraints need not hold exactly. Almost opposite constraints make multipliers so
    large that their rounding shows: then the result is brought closer `again`.

    >>> closest(torch.tensor([-1.0, 2.0, 1.0]), torch.eye(3)).tolist()
    [0.0, 2.0, 1.0]
    >>> closest(torch.tensor([-1.0, 2.0, 1.0]), torch.eye(3), margin=0.5).tolist()
    [0.0, 2.5, 1.5]
    """
    columns = torch.cat([constraints, g[None]]).double()
    products: Matrix = (columns @ columns.T).cpu().numpy()
    lengths = np.sqrt(products.diagonal())
    lengths[lengths == 0] = 1
    values, vectors = np.linalg.eigh(products / np.outer(lengths, lengths))
    if values[0] > SINGULAR:
        root: Matrix = np.sqrt(values)[:, None] * vectors.T
    else:
        root = torch.linalg.qr(columns.T, mode="r").R.cpu().numpy() / lengths
    scale, length = lengths[:-1], lengths[-1]
    # From here on in units of ‖g‖ and of the rows' lengths: u_k = v_k ‖g_k‖ / ‖g‖.
    least = margin * scale / length
    damping = np.diag(np.sqrt(ridge) / scale) if ridge else np.zeros((0, len(scale)))
    matrix = np.vstack([root[:, :-1], damping])
    target = np.concatenate([-root[:, -1], np.zeros(len(damping))]) - matrix @ least
    multipliers = (nonnegative(matrix, target) + least) * length / scale
    found = columns[-1] + torch.from_numpy(multipliers).to(columns.device) @ columns[:-1]
    left = (columns[:-1] @ found).cpu().numpy() / scale
    if again and not margin and not ridge and left.min() < -ROUNDING * float(found.norm()):
        found = closest(found, columns[:-1], again=again - 1)
    return found.to(g.dtype)


def nonnegative(matrix: Matrix, target: Matrix) -> Matrix:
    """`argmin ‖matrix x − target‖` subject to `x ≥ 0`.

    SciPy's solver can miss the solution where some gradient is zero but for rounding. So its result
    is checked: at an optimum no gradient points uphill, and that of a positive `x` is zero.
    """
    found: Matrix = nnls(matrix, target, maxiter=100 * matrix.shape[1])[0]
    uphill = matrix.T @ (target - matrix @ found)
    size = max(1.0, float(np.abs(target).max()))
    if max(uphill.max(), np.abs(uphill * found).max()) > ROUNDING * size:
        found = lsq_linear(matrix, target, bounds=(0, np.inf), method="bvls", tol=1e-15).x
    return found


@dataclass(frozen=True)
class Options:
    """`ridge` is added to the diagonal of `G Gᵀ` (GEM's code: 0.001).

    `reference_moves_buffers` lets the passes over the memory move batch-norm statistics, as GEM's
    code does.
    """

    ridge: float = 0.0
    reference_moves_buffers: bool = True


class Gem(Rehearsal):
    """`min ½ ‖g − g̃‖²` subject to `g̃ᵀ g_k ≥ 0` for every past task `k`.

    `g_k` is the gradient on the whole memory of task `k`. Solved where a constraint is violated, in
    its dual (`eq:gem_dual_obj` of the A-GEM paper): `v = argmin ½ vᵀ G Gᵀ v + gᵀ Gᵀ v`,
    `v ≥ margin`, `g̃ = Gᵀ v + g`. The paper's margin is 0; GEM's code has 0.5.
    """

    hyperparameters = {"margin": (0, 0.5)}
    options = Options
    violations: Tensor = per_run()

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        examples = (work.tasks - 1) * work.memory_per_task // 2
        double = 2 * 2  # all gradients of a row once more, and scaled, in float64
        gradients = Cost.gradients + (1 + double) * work.tasks
        return replace(super().cost(options, work), examples=examples, gradients=gradients)

    @cached_property
    def _on_device(self) -> bool:
        return self.fleet.device.type == "cuda" and quadratic.available()

    def capture(self) -> Capture | None:
        task, kept = self.episodic.task, self.episodic.form()
        if kept is None or not self._on_device or not quadratic.available(task):
            return None
        return Capture((task, kept), gradients=1 + task, reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        constraints = []
        for task in range(self.episodic.task):
            memory = self.episodic.of([task] * self.fleet.runs)
            moves = self.option.reference_moves_buffers
            constraints.append(self.fleet.grad(memory, update_buffers=moves)[0])
        g, _ = self.fleet.grad(batch)
        if constraints:
            g = self.respect(g, constraints)
        self.episodic.observe(batch)
        return g

    @cached_property
    def _margins(self) -> list[float]:
        margins: list[float] = self.columns["margin"][:, 0].tolist()
        return margins

    def respect(self, g: Tensor, constraints: Sequence[Tensor]) -> Tensor:
        """Project each row of `g` onto its own constraints `n × [R, P]`, and count violations."""
        if self._on_device:
            return self._respect_on_device(torch.stack([*constraints, g], 1))
        along = torch.cat([dot(g, c) for c in constraints], 1)
        norms = [torch.linalg.vector_norm(c, dim=1, keepdim=True) for c in constraints]
        wrong = (along < 0) & (torch.cat([norm.square() for norm in norms], 1) > TINY)
        violated = wrong.any(1) & along.isfinite().all(1) & self.fleet.active[:, 0]
        self.violations += violated
        for r, is_violated in enumerate(violated.tolist()):
            if is_violated:
                own = torch.stack([c[r] for c in constraints])
                g[r] = closest(g[r], own, self._margins[r], self.option.ridge)
        return g

    def _respect_on_device(self, vectors: Tensor) -> Tensor:
        """The same without the host, for `[R, n + 1, P]`: the constraints, then `g`."""
        matrix = gram(vectors)
        constraints, g = vectors[:, :-1], vectors[:, -1:]
        wrong = (matrix[:, :-1, -1] < 0) & (matrix.diagonal(dim1=1, dim2=2)[:, :-1] > TINY)
        violated = wrong.any(1) & matrix.isfinite().all(2).all(1) & self.fleet.active[:, 0]
        self.violations += violated
        margin = self.columns["margin"][:, 0]
        dual = matrix[:, :-1, :-1], matrix[:, :-1, -1]
        multipliers, _ = quadratic.solve(*dual, margin, self.option.ridge)
        with products(g.device, tf32=False):
            projected = torch.baddbmm(g, multipliers.to(g.dtype)[:, None], constraints)
        return torch.where(violated[:, None], projected[:, 0], g[:, 0])
