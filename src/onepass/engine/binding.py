"""The binding of a user's module to a row of theta: its parameters are views of the row."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepass.engine.architecture import Architecture
from onepass.errors import InputError


class _Entry(NamedTuple):
    """A parameter where the module has it."""

    owner: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter | None
    address: int
    trainable: bool


class Binding:
    """Makes the parameters of a module views of `row [P]`, and notices what the user changes later.

    Trainable parameters are numbered from 0, in the order of the architecture. `trained` are those
    that the optimizer has, or all without an optimizer: the others have no gradient.
    """

    def __init__(
        self, architecture: Architecture, row: Tensor, optimizer: torch.optim.Optimizer | None
    ) -> None:
        own = dict(architecture.module.named_parameters())
        self._architecture, self._row, self._optimizer = architecture, row, optimizer
        self._parameters = [own[name] for name in architecture.names]
        self._views = [_apart(view) for view in architecture.views(row)]
        self.trainable = range(len(self._parameters) - architecture.frozen)
        self.bind()
        self._remember()

    def bind(self) -> None:
        """Make the parameters the views, again after a rollback."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def _remember(self) -> None:
        """Note how the module and the optimizer are now, so that a change is noticed cheaply."""
        groups = _in_groups(self._optimizer)
        self.trained = _trained(groups, self._parameters, self._architecture.frozen)
        self._groups = groups  # only now: parameters of another module are refused every time
        self.parts = list(self._architecture.module.modules())
        self._children = [list(part._modules.values()) for part in self.parts]
        trainable = {
            id(parameter): place >= self._architecture.frozen
            for place, parameter in enumerate(self._parameters)
        }
        self._entries = [
            _Entry(part._parameters, name, p, p.data_ptr(), trainable[id(p)])
            if p is not None
            else _Entry(part._parameters, name, None, 0, False)
            for part in self.parts
            for name, p in part._parameters.items()
        ]

    def has_changed(self) -> bool:
        """Whether parts of the module, or parameters of the optimizer, are others than before.

        Raises if the module's parameters no longer are the views.
        """
        if self._same_parts() and self._same_parameters():
            if _in_groups(self._optimizer) == self._groups:
                return False
        else:
            self._refuse_new_parameters()
        self._remember()
        return True

    def _same_parts(self) -> bool:
        return all(
            list(part._modules.values()) == children
            for part, children in zip(self.parts, self._children, strict=True)
        )

    def _same_parameters(self) -> bool:
        count = sum(len(part._parameters) for part in self.parts)
        return len(self._entries) == count and all(
            owner.get(name) is parameter
            and (
                parameter is None
                or (parameter.data_ptr() == address and parameter.requires_grad == trainable)
            )
            for owner, name, parameter, address, trainable in self._entries
        )

    def _refuse_new_parameters(self) -> None:
        found = dict(self._architecture.module.named_parameters())
        views = self._architecture.views(self._row)  # those we noted may have moved along
        named = zip(self._architecture.names, self._parameters, views, strict=True)
        for place, (name, parameter, view) in enumerate(named):
            here = found.pop(name, None)
            if here is None:
                raise InputError(
                    f"parameter '{name}' is gone from the module: "
                    "put it back, or wrap the module anew"
                )
            if here.device != view.device:
                raise InputError(
                    f"the module was moved from {view.device} to {here.device}: "
                    "move it back, or save, and load with the moved module"
                )
            if (
                here is not parameter
                or here.data_ptr() != view.data_ptr()
                or here.shape != view.shape
                or here.dtype != view.dtype
            ):
                raise InputError(
                    f"parameter '{name}' was created anew since the module was wrapped: "
                    "write into it in place, or wrap the module anew"
                )
            if here.requires_grad != (place >= self._architecture.frozen):
                raise InputError(
                    f"requires_grad of '{name}' was changed since the module was wrapped: "
                    "change it back, or wrap the module anew"
                )
        for name in found:
            raise InputError(
                f"parameter '{name}' was added since the module was wrapped: wrap the module anew"
            )

    def step(self, direction: Tensor, idle: Collection[int]) -> None:
        """Let the optimizer take a step with a direction as gradient.

        As in a plain loop, it passes over `idle` parameters, which had no gradient, unless the
        method pulls at them.
        """
        assert self._optimizer is not None
        places = self._architecture.views(direction)[self._architecture.frozen :]
        for number, parameter in self.trained.items():
            place = places[number]
            parameter.grad = place if number not in idle or bool(place.any()) else None
        try:
            self._optimizer.step()
        finally:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.grad = None
                # Some optimizers put new tensors in place of the old ones.
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.data)
                    parameter.data = view


def _in_groups(optimizer: torch.optim.Optimizer | None) -> list[list[int]] | None:
    """Which parameters an optimizer has, by their identity."""
    if optimizer is None:
        return None
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _trained(
    groups: list[list[int]] | None, parameters: list[nn.Parameter], frozen: int
) -> dict[int, nn.Parameter]:
    """The trainable parameters that the optimizer has, by their number."""
    trainable = dict(enumerate(parameters[frozen:]))
    if groups is None:
        return trainable
    given = {one for group in groups for one in group}
    make = "make it from module.parameters()"
    if given - set(map(id, parameters)):
        raise InputError(f"the optimizer has parameters that are not the module's: {make}")
    found = {number: parameter for number, parameter in trainable.items() if id(parameter) in given}
    if not found:
        raise InputError(f"the optimizer has none of the module's trainable parameters: {make}")
    return found


def _apart(view: Tensor) -> Tensor:
    """The same memory as a storage of its own: saving or sharing a parameter takes that alone."""
    return torch.utils.dlpack.from_dlpack(view) if view.numel() else view
