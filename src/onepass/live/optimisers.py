"""Torch optimizers: which ones can be driven, and their state as plain tensors and numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.errors import InputError

UNABLE = {
    "SparseAdam": "takes sparse gradients only, and a direction is dense",
    "ZeroRedundancyOptimizer": "works on several processes, which would drift apart",
    "DistributedOptimizer": "works on several processes, which would drift apart",
}


def check_optimizer(optimizer: Optimizer | None, module: nn.Module) -> None:
    """Raise unless it can drive this module."""
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"the optimizer must be a torch.optim.Optimizer over the module's parameters, got {type(optimizer).__name__}")
    if type(optimizer).__name__ in UNABLE:
        raise InputError(f"{type(optimizer).__name__} {UNABLE[type(optimizer).__name__]}: choose another optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, and a stream shows a batch once: choose another optimizer"
        )
    own = {id(p) for p in module.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise InputError("the optimizer has parameters that are not the module's: make it from module.parameters()")


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors by name, and the rest as JSON."""
    saved = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = _plain(value, f"the state '{key}' of {type(optimizer).__name__}")
    groups = [
        {key: _plain(value, f"the setting '{key}' of {type(optimizer).__name__}") for key, value in group.items()} for group in saved["param_groups"]
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def check_saved(optimizer: Optimizer, about: Mapping[str, Any]) -> None:
    """Raise unless what was saved fits an optimizer."""
    if type(optimizer).__name__ != about["kind"]:
        raise InputError(f"the file was saved with {about['kind']}, and this optimizer is {type(optimizer).__name__}: give one of the same kind")
    now = optimizer.state_dict()["param_groups"]
    if [len(group["params"]) for group in now] != [len(group["params"]) for group in about["groups"]]:
        raise InputError("the optimizer groups the module's parameters otherwise than the saved one: make it as it was")


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    now = optimizer.state_dict()["param_groups"]
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **about["numbers"]}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = [{key: _given(value, mine.get(key)) for key, value in group.items()} for group, mine in zip(about["groups"], now, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [_plain(part, what) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"{what} cannot be saved: it is a {type(value).__name__}")


def _given(value: Any, mine: Any) -> Any:
    """A setting as it was: a tuple where this optimizer has one."""
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, list) and isinstance(mine, tuple):
        return tuple(value)
    return value
