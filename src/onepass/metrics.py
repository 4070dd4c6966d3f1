"""Metrics: pure functions of the raw record, each with the formula it computes.

`a[k, j]` is the accuracy on the test set of task `j` after the last batch of task `k`;
`curve[k, b]` is the accuracy on task `k` after `b` batches of it (`b = 0`: before the first; NaN
where the task had fewer batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from onepass.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """What is recorded of one run, raw. Metrics are functions of it."""

    seed: int
    hyperparameters: dict[str, float]
    accuracy: Array  # a[k, j] at task ends, [T, T]; [1, T] for a joined pass
    initial: Array  # accuracy on each task before any training, [T]
    curve: Array  # [T, β + 1]; empty for a joined pass
    memory_accuracy: (
        Array | None
    )  # m[k, j] on the episodic memory of task j ≤ k, NaN above; None without a memory
    violations: (
        list[int] | None
    )  # steps whose constraint was violated, a task; None without a constraint
    seconds: float  # of training, without evaluation: this run's share of its fleet's time
    state_bytes: int  # parameters, buffers, the method's state and its memory
    diverged: bool
    state_by_task: list[int] | None = None  # the same bytes at the end of each task: what grows

    def same_as(self, other: Record) -> bool:
        """Bit by bit the same result; what it cost (seconds, bytes) does not count."""
        return all(
            _same(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if f.name not in ("seconds", "state_bytes", "state_by_task")
        )


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    return type(one) is type(other) and one == other


def average_accuracy(a: Array, k: int | None = None) -> float:
    """`A_k = 1/k Σ_{j≤k} a[k, j]`; `k` counts from 1 and is the last task by default.

    >>> average_accuracy(np.array([[0.9, 0.1], [0.5, 0.7]]))
    0.6
    """
    k = len(a) if k is None else k
    last = a[k - 1, :k] if len(a) == a.shape[1] else a[-1]
    return float(np.mean(last))


def forgetting_by_task(a: Array, k: int | None = None) -> Array:
    """`f_j^k = max_{l<k} a[l, j] − a[k, j]` for tasks `j < k`; negative where later tasks helped.

    >>> forgetting_by_task(np.array([[0.9, 0.1], [0.5, 0.7]]))
    array([0.4])
    """
    k = len(a) if k is None else k
    return np.asarray(np.max(a[: k - 1, : k - 1], axis=0) - a[k - 1, : k - 1], dtype=np.float64)


def forgetting(a: Array, k: int | None = None) -> float:
    """`F_k = 1/(k−1) Σ_{j<k} f_j^k`."""
    return float(np.mean(forgetting_by_task(a, k)))


def worst_forgetting(a: Array) -> float:
    """`max_{j<T} f_j^T`."""
    return float(np.max(forgetting_by_task(a)))


def few_shot(curve: Array) -> Array:
    """`Z_b = 1/T Σ_k a[k, b, k]`, the average accuracy after `b` batches.

    A task with fewer batches counts with its last value.
    """
    filled = curve.copy()
    for b in range(1, filled.shape[1]):
        missing = np.isnan(filled[:, b])
        filled[missing, b] = filled[missing, b - 1]
    return np.asarray(filled.mean(axis=0), dtype=np.float64)


def learning_curve_area(curve: Array, beta: int = 10) -> float:
    """`LCA_β = 1/(β+1) Σ_{b=0}^{β} Z_b`, the paper's formula.

    >>> learning_curve_area(np.array([[0.0, 0.5, 1.0]]), beta=2)
    0.5
    """
    return float(few_shot(curve)[: beta + 1].mean())


def learning_curve_area_trapezoid(curve: Array, beta: int = 10) -> float:
    """`1/β ∫_0^β Z_b db` by the trapezoidal rule.

    The authors' notebook computes this, so it is behind the published numbers.
    """
    z = few_shot(curve)[: beta + 1]
    return float((z[1:] + z[:-1]).sum() / 2 / beta)


def backward_transfer(a: Array) -> float:
    """`BWT = 1/(T−1) Σ_{j<T} (a[T, j] − a[j, j])` (Lopez-Paz and Ranzato, NIPS 2017)."""
    return float(np.mean(a[-1, :-1] - np.diag(a)[:-1]))


def forward_transfer(a: Array, initial: Array) -> float:
    """`FWT = 1/(T−1) Σ_{j>1} (a[j−1, j] − initial[j])` (Lopez-Paz and Ranzato, NIPS 2017)."""
    return float(np.mean(np.diag(a, k=1) - initial[1:]))


def select(records: Sequence[Record]) -> dict[str, float]:
    """The hyper-parameters with the best average accuracy `A_T` on the test sets of `D^CV`.

    It is averaged over the seeds of a grid point. A grid point of which any run diverged has lost;
    of equals, the one written first in the grid wins.
    """
    scores: dict[tuple[tuple[str, float], ...], list[float]] = {}
    for record in records:
        score = (
            -np.inf
            if record.diverged
            else np.nan_to_num(average_accuracy(record.accuracy), nan=-np.inf)
        )
        scores.setdefault(tuple(sorted(record.hyperparameters.items())), []).append(score)
    means = {point: float(np.mean(values)) for point, values in scores.items()}
    best = max(means, key=lambda point: means[point])
    if means[best] == -np.inf:
        raise InputError(
            "every grid point diverged in cross-validation: add smaller learning rates or"
            " strengths to the grid"
        )
    return next(
        dict(r.hyperparameters) for r in records if tuple(sorted(r.hyperparameters.items())) == best
    )


@dataclass(frozen=True)
class Metrics:
    """All metrics of one run; None where the run diverged or a metric has no meaning.

    A joined pass has no forgetting, for example.
    """

    A_T: float | None
    """Average accuracy `1/T Σ_j a[T, j]`."""
    F_T: float | None
    """Average forgetting `1/(T−1) Σ_{j<T} (max_{l<T} a[l, j] − a[T, j])`."""
    worst_forgetting: float | None
    """`max_{j<T} (max_{l<T} a[l, j] − a[T, j])`."""
    LCA_10: float | None
    """Learning curve area `1/11 Σ_{b=0}^{10} Z_b`, the paper's formula."""
    LCA_10_trapezoid: float | None
    """`1/10 ∫_0^{10} Z_b db` by the trapezoidal rule, as behind the published numbers."""
    backward_transfer: float | None
    """`1/(T−1) Σ_{j<T} (a[T, j] − a[j, j])`."""
    forward_transfer: float | None
    """`1/(T−1) Σ_{j>1} (a[j−1, j] − initial[j])`."""
    memory_accuracy: float | None
    """`1/T Σ_j m[T, j]` on the episodic memories."""
    memory_worst_forgetting: float | None
    """Worst-case forgetting of the accuracies on the episodic memories."""
    violations: float | None
    """Steps in which the constraint was violated, over all tasks."""
    seconds: float | None
    """Seconds of training, evaluation not counted."""


def metrics(record: Record) -> Metrics:
    """The metrics of a run."""
    if record.diverged:
        return Metrics(*(None,) * 11)
    a, m = record.accuracy, record.memory_accuracy
    sequential = len(a) == a.shape[1] and len(a) > 1
    remembered = (
        m is not None and sequential and not np.isnan(m[-1]).any()
    )  # NaN: a budget too small for any example of a task
    return Metrics(
        A_T=average_accuracy(a),
        F_T=forgetting(a) if sequential else None,
        worst_forgetting=worst_forgetting(a) if sequential else None,
        LCA_10=learning_curve_area(record.curve) if record.curve.size else None,
        LCA_10_trapezoid=learning_curve_area_trapezoid(record.curve) if record.curve.size else None,
        backward_transfer=backward_transfer(a) if sequential else None,
        forward_transfer=forward_transfer(a, record.initial) if sequential else None,
        memory_accuracy=average_accuracy(m) if m is not None and remembered else None,
        memory_worst_forgetting=_worst_on_memory(m) if m is not None and remembered else None,
        violations=None if record.violations is None else float(sum(record.violations)),
        seconds=record.seconds,
    )


def _worst_on_memory(m: Array) -> float:
    # A task has no memory before it was learnt, so the maximum runs over j ≤ l < T.
    return float(np.max(np.nanmax(m[:-1, :-1], axis=0) - m[-1, :-1]))


@dataclass(frozen=True)
class Summary:
    """A metric over runs: mean, population standard deviation (as published), and interval.

    The interval is the 95 % one of the mean, by Student's t.
    """

    mean: float | None
    std: float | None
    interval: tuple[float, float] | None
    values: list[float | None]


def summarise(values: Sequence[float | None]) -> Summary:
    """The summary of one value per run; undefined if any run has none.

    >>> summarise([0.5, 0.7]).mean
    0.6
    """
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return Summary(None, None, None, list(values))
    mean = float(np.mean(known))
    if len(known) == 1:
        return Summary(mean, 0.0, None, list(values))
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(known) - 1) * np.std(known, ddof=1) / np.sqrt(len(known)))
    return Summary(mean, float(np.std(known)), (mean - half, mean + half), list(values))
