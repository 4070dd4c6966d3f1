"""A mini-batch for every run of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """`x [R, B, …]` as stored (bytes for images) and `slots [R, B]`.

    `sizes` are the true batch sizes of rows that have fewer than B examples, known to the host: row
    `r` counts only its first `sizes[r]` examples, a row of size 0 sits this step out. `extra` are
    further tensors `[R, B, …]`: what a loss needs (targets of a teacher, for example), or what else
    the network takes. `task` is the task of all these examples, where they have one task.
    """

    x: Tensor
    slots: Tensor
    sizes: tuple[int, ...] | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    task: int | None = None

    def __post_init__(self) -> None:
        width = self.x.shape[1]
        if self.sizes is not None and width and all(n == width for n in self.sizes):
            object.__setattr__(self, "sizes", None)

    def lengths(self) -> tuple[int, ...]:
        """The true size of every row."""
        return self.sizes or (self.x.shape[1],) * len(self.x)

    def piece(self, start: int, end: int) -> Batch:
        """Examples `start` to `end` of every row."""
        return Batch(
            self.x[:, start:end],
            self.slots[:, start:end],
            None,
            {name: t[:, start:end] for name, t in self.extra.items()},
            self.task,
        )


def joined(one: Batch, other: Batch) -> Batch:
    """The examples of two batches in one, row by row; a row without any in `one` sits out.

    >>> one = Batch(torch.tensor([[1, 2], [3, 9]]), torch.zeros(2, 2), (2, 1))
    >>> both = joined(one, Batch(torch.tensor([[5], [6]]), torch.ones(2, 1)))
    >>> both.x.tolist(), both.sizes
    ([[1, 2, 5], [3, 6, 9]], (3, 2))
    """
    x, slots = torch.cat([one.x, other.x], 1), torch.cat([one.slots, other.slots], 1)
    extra = {name: torch.cat([tensor, other.extra[name]], 1) for name, tensor in one.extra.items()}
    if one.sizes is None and other.sizes is None:
        return Batch(x, slots, extra=extra)
    width, sizes, order = one.x.shape[1], [], []
    for first, second in zip(one.lengths(), other.lengths(), strict=True):
        real = [*range(first), *(range(width, width + second) if first else ())]
        padding = sorted(set(range(x.shape[1])) - set(real))
        sizes.append(len(real))
        order.append(real + padding)
    index = torch.tensor(order, device=x.device)
    rows = torch.arange(len(x), device=x.device)[:, None]
    extra = {name: tensor[rows, index] for name, tensor in extra.items()}
    return Batch(x[rows, index], slots[rows, index], tuple(sizes), extra)
