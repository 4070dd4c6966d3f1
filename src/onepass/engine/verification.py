"""Verification of a traced program: it must find what plain autograd does.

Units next to zero are on in one way of rounding and off in another, and some gradients are nothing
but rounding (that of a bias in front of batch-norm). So a mismatch does not prove the program
wrong. In float64, where there is next to no rounding, it must then find the same, and each kernel
of ours must compute what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from onepass.engine.architecture import Architecture
from onepass.engine.gpu.kernel_checks import check_kernels
from onepass.errors import first_line, is_out_of_memory

WITHIN = 1e-3  # of the length of a gradient


class Traced(Protocol):
    """What a program was traced from: `engine.gradients` has it."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...
    def autograd(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]: ...
    def safe(self, arguments: Sequence[Tensor]) -> list[Tensor]: ...


def verify_trace(
    row: Traced,
    made: GraphModule,
    arguments: Sequence[Tensor],
    outputs: Sequence[Tensor],
    stacked: bool,
) -> bool:
    """Raise unless the program computes what plain autograd does.

    False if no run can tell, because all have diverged or have nothing to learn.
    """
    try:
        return _compare(row, made, arguments, outputs, stacked, WITHIN, 0.0)
    except ArithmeticError as off:
        reason = str(off)
    try:
        with _in_double():
            if not _compare(row, made, _doubled(arguments), _doubled(outputs), stacked, 1e-6, 1e-9):
                raise ArithmeticError("nothing is finite")
        check_kernels(made, [*row.safe(arguments), *(torch.empty_like(place) for place in outputs)])
        return True
    except Exception as failure:
        # Float64 takes more memory than the program itself: no reason for a smaller fleet.
        what = f"in float64 {first_line(failure)}"
        if is_out_of_memory(failure):
            what = "there is no room for float64"
    raise ArithmeticError(f"{reason}, and {what}")


def _compare(
    row: Traced,
    made: GraphModule,
    arguments: Sequence[Tensor],
    outputs: Sequence[Tensor],
    stacked: bool,
    within: float,
    floor: float,
) -> bool:
    """Raise if a gradient or buffer is off by more than `within` of its length.

    Being off by `floor` of the longest one is allowed too. False if no run can tell.
    """
    result, changed = [torch.empty_like(place) for place in outputs], row.safe(arguments)
    made.forward(*changed, *result)
    samples: list[tuple[Sequence[Tensor], ...]] = [(arguments, changed, result)]
    if stacked:
        samples = list(zip(rows_of(arguments), rows_of(changed), rows_of(result), strict=True))
    start = len(row.architecture.names)
    buffers = slice(start, start + len(row.buffers))
    compared = 0
    for original, after, found in samples:
        truth = row.safe(original)
        gradients, _ = row.autograd(truth)
        _compare_lengths(gradients, found, within, floor)
        _compare_lengths(truth[buffers], after[buffers], within, floor)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        compared += finite and any(bool(gradient.any()) for gradient in gradients)
        if compared == 2:  # runs are enough
            break
    return compared > 0


def _compare_lengths(
    expected: Sequence[Tensor], found: Sequence[Tensor], within: float, floor: float
) -> None:
    scales = [float(value.double().norm()) for value in expected]
    least = 1e-12 + floor * max(filter(math.isfinite, scales), default=0.0)
    for one, other, scale in zip(expected, found, scales, strict=True):
        error = float((one.double() - other.double()).norm())
        if math.isfinite(scale) and not error <= within * scale + least:
            off = error / max(scale, 1e-12)
            raise ArithmeticError(f"its gradient is off by {off:.2g} of its length")


@contextmanager
def _in_double() -> Iterator[None]:
    """Inside, everything that would be float32 is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class _Doubling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes float64 of every float tensor and dtype that an operation is given.

    These include constants (the mean image), floats made of bytes, and what a traced program holds.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_double, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_double(tensor) for tensor in tensors]


def rows_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Tensors `[R, …]` run by run."""
    return list(zip(*(t.unbind(0) for t in tensors), strict=True))
