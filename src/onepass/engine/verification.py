"""Is a traced program right? It must find what plain autograd does.

Units next to zero are on in one way of rounding and off in another, and some gradients are nothing but rounding (that of a bias in front of
batch-norm). So a program that is off may be right. In float64, where there is next to no rounding, it must then find the same, and each kernel of
ours what it stands for.
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
    within: float,
) -> bool:
    """Raise unless the program is right, or off by no more than `within`; False if all runs have diverged or nothing to learn, so that none can tell.

    Float64 takes a GPU long: `within` is wide for programs that were made from judged ones.
    """
    try:
        return _compare(row, made, arguments, outputs, stacked, within, 0.0)
    except ArithmeticError as off:
        reason = str(off)
    try:
        with _in_double():
            if not _compare(
                row,
                made,
                [_double(t) for t in arguments],
                [_double(t) for t in outputs],
                stacked,
                1e-6,
                1e-9,
            ):
                raise ArithmeticError("nothing is finite")
        check_kernels(made, [*row.safe(arguments), *(torch.empty_like(place) for place in outputs)])
        return True
    except Exception as failure:
        # Float64 takes more memory than the program that is judged: no reason for a smaller fleet.
        reason += f", and {'there is no room for float64' if is_out_of_memory(failure) else f'in float64 {first_line(failure)}'}"
    raise ArithmeticError(reason)


def _compare(
    row: Traced,
    made: GraphModule,
    arguments: Sequence[Tensor],
    outputs: Sequence[Tensor],
    stacked: bool,
    within: float,
    floor: float,
) -> bool:
    """Raise if gradients or buffers are further off than `within` of their length, and than `floor` of the longest; False if no run's tell."""
    result, changed = [torch.empty_like(place) for place in outputs], row.safe(arguments)
    made.forward(*changed, *result)
    samples = (
        list(zip(rows_of(arguments), rows_of(changed), rows_of(result), strict=True))
        if stacked
        else [(arguments, changed, result)]
    )
    buffers = slice(len(row.architecture.names), len(row.architecture.names) + len(row.buffers))
    judged = 0
    for original, after, found in samples:
        truth = row.safe(original)
        gradients, _ = row.autograd(truth)
        for expected, values in ((gradients, found), (truth[buffers], after[buffers])):
            scales = [float(value.double().norm()) for value in expected]
            least = 1e-12 + floor * max(filter(math.isfinite, scales), default=0.0)
            for one, other, scale in zip(expected, values, scales, strict=True):
                error = float((one.double() - other.double()).norm())
                if math.isfinite(scale) and not error <= within * scale + least:
                    raise ArithmeticError(
                        f"its gradient is off by {error / max(scale, 1e-12):.2g} of its length"
                    )
        judged += all(bool(gradient.isfinite().all()) for gradient in gradients) and any(
            bool(gradient.any()) for gradient in gradients
        )
        if judged == 2:  # runs are enough
            break
    return judged > 0


@contextmanager
def _in_double() -> Iterator[None]:
    """Inside, whatever would be float32 is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubling():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class _Doubling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Constants (the mean image), what bytes turn into, and what a traced program has written into it become float64 wherever they are read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_double, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def rows_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Tensors `[R, …]` run by run."""
    return list(zip(*(t.unbind(0) for t in tensors), strict=True))
