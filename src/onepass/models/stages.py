"""Networks in stages: what progressive columns are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from onepass.errors import InputError
from onepass.models.initial import initialise


@dataclass(frozen=True)
class Stage:
    """One level of a network: `h ← then(body(h))`.

    `lateral(columns)` makes a module that maps the inputs of this level in that many other columns,
    side by side, to what can be added to the output of `body`.
    """

    body: nn.Module
    then: Callable[[Tensor], Tensor]
    lateral: Callable[[int], nn.Module]


def stages(module: nn.Module) -> list[Stage]:
    """The stages of an MLP, or of a module with a method `stages()`; the last one is its head."""
    own = getattr(module, "stages", None)
    if own is not None:
        found: list[Stage] = own()
        return found
    layers = list(module) if isinstance(module, nn.Sequential) else []
    linear = [layer for layer in layers[::2] if isinstance(layer, nn.Linear)]
    separated = all(isinstance(layer, nn.ReLU) for layer in layers[1::2])
    if not linear or len(layers) != 2 * len(linear) - 1 or not separated:
        raise InputError(
            "prog-nn needs a network that it can take apart: an MLP, a residual net,"
            " or a module with a method stages() (see onepass.models.stages)"
        )
    return [
        Stage(layer, identity if layer is linear[-1] else nn.functional.relu, lateral_of(layer))
        for layer in linear
    ]


def lateral_of(layer: nn.Linear) -> Callable[[int], nn.Module]:
    """Lateral connections into a linear layer: one matrix per column, initialised as an MLP."""
    return lambda columns: initialise(
        nn.Linear(columns * layer.in_features, layer.out_features, bias=False)
    )


def identity(x: Tensor) -> Tensor:
    return x
