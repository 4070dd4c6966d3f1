"""A head that grows when new classes appear."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.engine.fleet import Carry
from onepass.engine.module_fleet import ModuleFleet
from onepass.errors import InputError, shown


def check_head(module: nn.Module, grow: bool | str) -> str:
    """The name of the linear layer that is to grow: the given one, or the last."""
    if not isinstance(grow, (bool, str)):
        raise InputError(f"grow must be True or the name of a layer, got {shown(grow)}")
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    if not linear:
        raise InputError(
            "the module has no nn.Linear layer that could grow: classes can only appear where the last layer is one"
        )
    name = list(linear)[-1] if grow is True else str(grow)
    if name not in linear:
        raise InputError(
            f"the module has no nn.Linear layer '{name}' to grow: choose one of {', '.join(linear)}"
        )
    head = linear[name]
    if not all(p.requires_grad for p in head.parameters()) or set(dict(head.named_parameters())) - {
        "weight",
        "bias",
    }:
        raise InputError(
            f"layer '{name}' is frozen or parametrised: only a plain, trainable nn.Linear layer can grow"
        )
    others = [
        p
        for part_name, part in module.named_modules()
        if part_name != name
        for p in part.parameters(recurse=False)
    ]
    if any(p is mine for p in others for mine in head.parameters()):
        raise InputError(
            f"layer '{name}' shares its weights with another one, which would grow too: untie them, or leave grow out"
        )
    return name


def check_growth(
    module: nn.Module,
    name: str | None,
    outputs: int | None,
    needed: int,
    optimizer: Optimizer | None,
) -> str:
    """The name of the head, if it is what gives the module its outputs."""
    if name is None:
        raise InputError(
            f"the tasks have classes up to {needed - 1}, and the module {outputs} outputs: give it more, or wrap it with grow=True"
        )
    head = cast(nn.Linear, module.get_submodule(name))
    driven = {
        id(p)
        for group in ([] if optimizer is None else optimizer.param_groups)
        for p in group["params"]
    }
    if optimizer is not None and not all(id(p) in driven for p in head.parameters()):
        raise InputError(
            f"layer '{name}' would grow, and the optimizer does not have it: add the layer's parameters to the optimizer"
        )
    width = head.out_features
    if width != outputs:
        raise InputError(
            f"layer '{name}' has {width} outputs and the module {outputs}, so it is not the last one: name that with grow='…'"
        )
    return name


def grow(fleet: ModuleFleet, name: str, outputs: int) -> tuple[Carry, Callable[[], None]]:
    """Enlarge a linear layer: old outputs keep their values, new ones are initialised as torch would, from the run's seed.

    Its weight and bias become new parameters, since graphs that somebody holds remember the shapes of the old ones; an optimizer is given
    them in the place of the old ones, with its state of them enlarged by zeros. Returns what carries a learner's tensors over, and what
    undoes it all before a step is taken.
    """
    module = fleet.architecture.module
    head = module.get_submodule(name)
    assert isinstance(head, nn.Linear)
    before, width, mark = dict(head._parameters), head.out_features, fleet.marked()
    optimizer = fleet.optimizer
    groups, state = (
        ([list(group["params"]) for group in optimizer.param_groups], dict(optimizer.state))
        if optimizer is not None
        else ([], {})
    )

    def enlarged() -> nn.Module:
        fresh = nn.Linear(
            head.in_features, outputs, head.bias is not None, device="cpu", dtype=head.weight.dtype
        ).to(head.weight.device)
        head.weight, head.bias = fresh.weight, fresh.bias
        head.out_features = outputs
        for key, old in before.items():
            if (
                optimizer is not None and old is not None
            ):  # before the fleet looks which parameters the optimizer has
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
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            k: _enlarged(v, new.shape) if isinstance(v, Tensor) and v.shape == old.shape else v
            for k, v in state.items()
        }


def _enlarged(old: Tensor, shape: torch.Size) -> Tensor:
    new = old.new_zeros(shape)
    new[: len(old)] = old
    return new
