"""What must be finite before a step is taken, read from the device as rarely as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onepass.errors import InputError

BatchNorm = nn.modules.batchnorm._BatchNorm


def square(row: Tensor) -> Tensor:
    """The squared length of `row [1, P]`, `[1]`, at least in float32.

    The square of a half-precision number overflows early.
    """
    whole = row[0] if row.element_size() >= 4 else row[0].float()
    return torch.dot(whole, whole)[None]


def check_step(notes: Sequence[tuple[bool, Tensor]], direction: Tensor) -> tuple[float, float]:
    """Raise unless a direction and the losses behind it are finite: the one read of a step.

    `notes` are losses and squares of reference gradients, and whether they are of the batch itself.
    Returns the loss of the batch, and the length of the direction.
    """
    # What is not finite in a gradient is not finite in the direction. A direction whose square
    # overflows counts as infinite. A pass may be over the batch and examples of the memory.
    ordered = sorted(notes, key=lambda note: not note[0])
    *values, last = torch.cat([*(value for _, value in ordered), square(direction)]).tolist()
    advice = "look at the batch, or take smaller steps; nothing was learnt"
    for number, found in enumerate(values):
        if not math.isfinite(found):
            what = (
                f"or its gradient on the episodic memory is not finite ({found})"
                if number
                else f"of this batch is {found}"
            )
            raise InputError(f"the loss {what}: {advice}")
    if not math.isfinite(last):
        raise InputError(f"the gradient of this step is not finite: {advice}")
    return values[0], math.sqrt(last)


def check_statistics(parts: Sequence[BatchNorm]) -> None:
    """Raise unless batch-norm's running statistics are finite.

    Steps use a batch's own statistics, but predictions use these.
    """
    moved = [part for part in parts if part.training and part.track_running_stats]
    found = [
        one for part in moved for one in (part.running_mean, part.running_var) if one is not None
    ]
    if found and not bool(torch.cat(found).isfinite().all()):
        what = "the running statistics of batch-norm are not finite after this batch"
        raise InputError(f"{what}: scale the data; nothing was learnt")


def check_parameters(theta: Tensor) -> None:
    """Raise unless parameters `[1, P]` are finite. Their square is quicker, but may overflow."""
    if not math.isfinite(float(square(theta))) and not bool(theta.isfinite().all()):
        raise InputError(
            "this step leads to parameters that are not finite: take smaller steps; "
            "nothing was learnt"
        )


class Reach:
    """No parameter is larger than this, as far as is known.

    No parameter moves by more than the whole step is long, so plain SGD need not read the
    parameters in every step.
    """

    def __init__(self, theta: Tensor) -> None:
        self._theta, self._largest = theta, math.inf

    def covers(self, step: float) -> bool:
        """Whether parameters certainly stay finite in a step of this length; then it is counted."""
        most = torch.finfo(self._theta.dtype).max / 2  # half of it is room for rounding
        if not self._largest + step < most:
            self._largest = float(self._theta.abs().max())  # read from the device, but rarely
        if self._largest + step < most:
            self._largest += step
            return True
        self._largest = math.inf
        return False
