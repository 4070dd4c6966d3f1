"""A mini-batch for every run of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """`x [R, B, …]` as stored (bytes for images) and `slots [R, B]`.

    `sizes` are the true batch sizes of rows that have fewer than B examples, known to the host: row `r` counts only its first `sizes[r]`
    examples, a row of size 0 sits this step out. `extra` are further tensors `[R, B, …]` that a loss may ask for (targets of a teacher,
    say).
    """

    x: Tensor
    slots: Tensor
    sizes: tuple[int, ...] | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sizes is not None and all(n == self.x.shape[1] for n in self.sizes):
            object.__setattr__(self, "sizes", None)
