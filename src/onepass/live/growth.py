"""A head that grows when new classes appear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.engine.fleet import Carry
from onepass.engine.module_fleet import ModuleFleet
from onepass.engine.slots import Slots
from onepass.errors import InputError, shown

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass


def read_head(module: nn.Module, grow: bool | str, classifies: bool) -> str | None:
    """The name of the layer that is to grow, if one is."""
    if grow is False:
        return None
    head = check_head(module, grow)
    if not classifies:
        why = "only classes can grow the head"
        raise InputError(f"{why}: leave grow out with a loss of your own")
    return head


def check_head(module: nn.Module, grow: bool | str) -> str:
    """The name of the linear layer that is to grow: the given one, or the last."""
    if not isinstance(grow, (bool, str)):
        raise InputError(f"grow must be True or the name of a layer, got {shown(grow)}")
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    if not linear:
        what = "the module has no nn.Linear layer that could grow"
        raise InputError(f"{what}: classes can only appear where the last layer is one")
    name = list(linear)[-1] if grow is True else str(grow)
    if name not in linear:
        what = f"the module has no nn.Linear layer '{name}' to grow"
        raise InputError(f"{what}: choose one of {', '.join(linear)}")
    head = linear[name]
    own = dict(head.named_parameters())
    if own.keys() - {"weight", "bias"} or not all(p.requires_grad for p in own.values()):
        what = f"layer '{name}' is frozen or parametrised"
        raise InputError(f"{what}: only a plain, trainable nn.Linear layer can grow")
    parts = [part for other, part in module.named_modules() if other != name]
    others = [p for part in parts for p in part.parameters(recurse=False)]
    if any(p is mine for p in others for mine in own.values()):
        what = f"layer '{name}' shares its weights with another one, which would grow too"
        raise InputError(f"{what}: untie them, or leave grow out")
    return name


def enlarge(owner: OnePass, outputs: int) -> None:
    """Give a learner's module, and the method, more outputs."""
    fleet = owner.fleet
    _check_growth(owner, outputs)
    carry, owner.undo = grow(fleet, cast(str, owner.head), outputs)
    owner.learner.resize(carry)
    owner.outputs = outputs
    if not owner._tasks:
        fleet.compete(Slots((tuple(range(outputs)),)))


def _check_growth(owner: OnePass, needed: int) -> None:
    """Raise unless the head is what gives the module its outputs, and is learnt from now on."""
    name, optimizer = owner.head, owner.fleet.optimizer
    if name is None:
        what = f"the tasks have classes up to {needed - 1}, and the module {owner.outputs} outputs"
        raise InputError(f"{what}: give it more, or wrap it with grow=True")
    head = cast(nn.Linear, owner.module.get_submodule(name))
    if optimizer is not None:
        driven = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not all(id(p) in driven for p in head.parameters()):
            what = f"layer '{name}' would grow, and the optimizer does not have it"
            raise InputError(f"{what}: add the layer's parameters to the optimizer")
    if head.out_features != owner.outputs:
        what = f"layer '{name}' has {head.out_features} outputs and the module {owner.outputs}"
        raise InputError(f"{what}, so it is not the last one: name that with grow='…'")


def grow(fleet: ModuleFleet, name: str, outputs: int) -> tuple[Carry, Callable[[], None]]:
    """Enlarge a linear layer: old outputs keep their values, new ones are initialised by torch.

    They are initialised from the run's seed. Weight and bias become new parameters, since autograd
    graphs that a caller holds remember the shapes of the old ones. An optimizer is given them in
    the place of the old ones, with its state of them enlarged by zeros. Returns what carries a
    learner's tensors over, and what undoes it all before a step is taken.
    """
    module = fleet.architecture.module
    head = module.get_submodule(name)
    assert isinstance(head, nn.Linear)
    before, width, mark = dict(head._parameters), head.out_features, fleet.marked()
    optimizer = fleet.optimizer
    groups: list[list[nn.Parameter]] = []
    state: dict[Any, Any] = {}
    if optimizer is not None:
        groups = [list(group["params"]) for group in optimizer.param_groups]
        state = dict(optimizer.state)

    def enlarged() -> nn.Module:
        bias, dtype = head.bias is not None, head.weight.dtype
        fresh = nn.Linear(head.in_features, outputs, bias, device="cpu", dtype=dtype)
        fresh = fresh.to(head.weight.device)
        head.weight, head.bias = fresh.weight, fresh.bias
        head.out_features = outputs
        for key, old in before.items():
            # Before the fleet looks which parameters the optimizer has.
            if optimizer is not None and old is not None:
                _replace(optimizer, old, head._parameters[key])
        return module

    def undo() -> None:
        head._parameters.update(before)
        head.out_features = width
        fleet.go_back(mark)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    return fleet.rebuild(enlarged), undo


def _replace(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter | None) -> None:
    assert new is not None
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = {
            name: _enlarged(value, new.shape)
            if isinstance(value, Tensor) and value.shape == old.shape
            else value
            for name, value in optimizer.state.pop(old).items()
        }


def _enlarged(old: Tensor, shape: torch.Size) -> Tensor:
    new = old.new_zeros(shape)
    new[: len(old)] = old
    return new
