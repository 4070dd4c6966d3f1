"""Which modules are nothing but a function of tensors, so that a traced program may replace them.

A program does what the module did when it was traced. That is right for every later pass only where
none of the user's own Python runs in the module: torch's own layers in a row, without hooks, random
numbers, buffers, or settings that may change.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

TRACEABLE = frozenset(
    {nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh}
)


def is_traceable(parts: Iterable[nn.Module]) -> bool:
    """Whether training passes through these parts depend on parameters and inputs alone, for good.

    >>> is_traceable(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).modules())
    True
    >>> is_traceable(nn.Sequential(nn.Linear(3, 4), nn.Dropout()).modules())
    False
    """
    return all(
        type(part) in TRACEABLE
        and part.training
        and not getattr(part, "inplace", False)  # which may write into its inputs
        and not (
            part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or "forward" in part.__dict__
        )
        for part in parts
    )
