"""Torch optimizers: which ones can be driven, and their state as plain tensors and numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.errors import InputError
from onepass.live.container import AlteredError
from onepass.live.inputs import KINDS

# How a step is computed, not what: that depends on the device, so it is as in the given optimizer.
SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
# The shape of each tensor of a parameter's state, and whether it holds real numbers.
Expected = dict[str, tuple[torch.Size, bool]]

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
        raise InputError(
            f"the optimizer must be a torch.optim.Optimizer over the module's parameters, got {type(optimizer).__name__}"
        )
    if type(optimizer).__name__ in UNABLE:
        raise InputError(
            f"{type(optimizer).__name__} {UNABLE[type(optimizer).__name__]}: choose another optimizer"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, and a stream shows a batch once: choose another optimizer"
        )
    own = {id(p) for p in module.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer has parameters that are not the module's: make it from module.parameters()"
        )


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors by name, and the rest as JSON."""
    saved = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = _plain(
                    value, f"the state '{key}' of {type(optimizer).__name__}"
                )
    groups = [
        {
            key: _plain(value, f"the setting '{key}' of {type(optimizer).__name__}")
            for key, value in group.items()
        }
        for group in saved["param_groups"]
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def check_saved(optimizer: Optimizer, kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless what was saved fits an optimizer."""
    if type(optimizer).__name__ != kind:
        raise InputError(
            f"the file was saved with {ascii(kind)[1:60]}, and this optimizer is {type(optimizer).__name__}: give one of the same kind"
        )
    now = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [len(places) for places in now] != [
        len(group["params"]) if isinstance(group.get("params"), list) else -1 for group in groups
    ]:
        raise InputError(
            "the optimizer groups the module's parameters otherwise than the saved one: make it as it was"
        )
    if now != [group["params"] for group in groups]:
        raise AlteredError("the parameters of its optimizer")


def restore_optimizer(
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Any],
) -> None:
    """Go on from a saved `optimizer_state`, if it can be one of this optimizer."""
    own = optimizer.state_dict()["param_groups"]
    wanted = [_settings(saved, mine) for saved, mine in zip(groups, own, strict=True)]
    state: dict[int, dict[str, Any]] = {}
    places = {str(place): place for group in own for place in group["params"]}
    for name, value in {
        **tensors,
        **{name: _given(value, None) for name, value in numbers.items()},
    }.items():
        place, _, key = name.partition(".")
        if place not in places or not key:
            raise AlteredError("the state of its optimizer")
        state.setdefault(places[place], {})[key] = value
    if getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for group in wanted:
            _check_state(type(optimizer), group, parameters, state)
    try:
        optimizer.load_state_dict({"state": state, "param_groups": wanted})
    except Exception as reason:  # an optimizer of the user's own may do anything here
        raise AlteredError(f"the state of its optimizer: {type(reason).__name__}") from reason


def _settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group as they were, each like that of this optimizer.

    What a scheduler put there is plain data.
    """
    found = {}
    for key, value in saved.items():
        found[key] = _given(value, mine.get(key))
        if key != "params" and key in mine and not _alike(found[key], mine[key]):
            raise AlteredError(f"the setting {ascii(key)[:40]} of its optimizer")
    return {**mine, **found, **{key: mine[key] for key in SWITCHES & mine.keys()}}


def _alike(value: Any, mine: Any) -> bool:
    if isinstance(value, (list, tuple)) or isinstance(mine, (list, tuple)):
        both = (
            isinstance(value, (list, tuple))
            and isinstance(mine, (list, tuple))
            and len(value) == len(mine)
        )
        return both and all(_alike(a, b) for a, b in zip(value, mine, strict=True))
    if isinstance(value, bool) or isinstance(mine, bool):
        return isinstance(value, bool | None) and isinstance(mine, bool | None)
    if isinstance(value, str) or isinstance(mine, str):
        return isinstance(value, str | None) and isinstance(mine, str | None)
    return True  # numbers, one as a tensor, or nothing


def _check_state(
    kind: type[Optimizer],
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    state: Mapping[int, Mapping[str, Any]],
) -> None:
    """Raise unless one of torch's own optimizers takes these settings and would have such a state."""
    known: dict[tuple[torch.Size, torch.dtype], Expected] = {}
    for place in group["params"]:
        shape, dtype = parameters[place].shape, parameters[place].dtype
        if (shape, dtype) not in known:
            known[shape, dtype] = _after_a_step(kind, group, shape, dtype)
        found = state.get(place, {})
        if not found:
            continue
        # Half precision overflows in a sound state, too.
        if any(
            not isinstance(found.get(key), Tensor)
            or found[key].shape != size
            or found[key].is_floating_point() != real
            for key, (size, real) in known[shape, dtype].items()
        ) or any(
            isinstance(t, Tensor) and t.element_size() >= 4 and not bool(t.isfinite().all())
            for t in found.values()
        ):
            raise AlteredError("the state of its optimizer")
        step = found.get("step", 0)
        if (
            not 0
            <= float(step if not isinstance(step, Tensor) or step.numel() == 1 else math.nan)
            < 2**53
        ):
            raise AlteredError("the steps of its optimizer")


def _after_a_step(
    kind: type[Optimizer], group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> Expected:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    takes = inspect.signature(kind).parameters
    try:
        make: Any = kind
        optimizer: Optimizer = make(
            [parameter],
            **{
                key: value
                for key, value in group.items()
                if key in takes and key not in {"params", *SWITCHES}
            },
        )
        optimizer.step()
    except Exception as reason:
        raise AlteredError(f"the settings of its optimizer: {ascii(str(reason))[1:60]}") from None
    return {
        key: (value.shape, value.is_floating_point())
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {
            "tensor": _plain(value.item(), what),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    if isinstance(value, (list, tuple)):
        return [_plain(part, what) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{what} cannot be saved: it is {value}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"{what} cannot be saved: it is a {type(value).__name__}")


def _number(tensor: float, dtype: str) -> Tensor:
    if not isinstance(tensor, (int, float)):
        raise TypeError("not a number")
    return torch.tensor(tensor, dtype=KINDS[dtype])


def _given(value: Any, mine: Any) -> Any:
    """A setting as it was: a tuple where this optimizer has one."""
    try:
        if isinstance(value, dict):
            return _number(**value)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        raise AlteredError("a setting of its optimizer") from None
    if isinstance(value, list):
        parts = [_given(part, None) for part in value]
        return tuple(parts) if isinstance(mine, tuple) else parts
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise AlteredError("a number of its optimizer")
    return value
