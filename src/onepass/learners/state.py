"""The state of a learner as named fields, each with its kind.

A field is declared in the class body (`anchor: Tensor = point()`) and made when a learner is. Its
kind says how it is saved, resized with the network, and taken back after a refused step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from onepass.learners.base import Learner

Kind = Literal["sum", "point", "counter", "tensor", "workspace"]


@dataclass(frozen=True)
class Field:
    """One attribute of a learner: its kind, and how it begins."""

    kind: Kind
    make: Callable[[Learner], Any]


def over_theta(needed: Callable[[Any], bool] = lambda _: True) -> Any:
    """A sum over the parameters, `[R, P]`, zero at first and for new parameters.

    It is `[R, 0]` with options that do not need it.
    """

    def make(learner: Learner) -> Any:
        theta = learner.fleet.theta
        return torch.zeros_like(theta if needed(learner.option) else theta[:, :0])

    return Field("sum", make)


def point() -> Any:
    """A point in parameter space, `[R, P]`, where theta is at first; so are new parameters."""
    return Field("point", lambda learner: learner.fleet.theta.clone())


def counter(start: int = 0) -> Any:
    """A whole number, or a truth value, that the host counts with."""
    return Field("counter", lambda _: start)


def tensor(make: Callable[[Any], Any]) -> Any:
    """A tensor of any other shape, `[R, …]`, made from the learner."""
    return Field("tensor", make)


def per_run(*shape: int) -> Any:
    """Whole numbers that the device counts with, `[R, *shape]`."""

    def make(learner: Learner) -> Any:
        fleet = learner.fleet
        return torch.zeros(fleet.runs, *shape, dtype=torch.int64, device=fleet.device)

    return tensor(make)


def workspace(make: Callable[[Any], Any] | None = None) -> Any:
    """Room that every step or second pass fills anew, by default `[R, P]`: no state, not saved."""
    return Field("workspace", make or (lambda learner: torch.empty_like(learner.fleet.theta)))
