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

DRIFT = "works on several processes, which would drift apart"
UNABLE = {
    "SparseAdam": "takes sparse gradients only, and a direction is dense",
    "ZeroRedundancyOptimizer": DRIFT,
    "DistributedOptimizer": DRIFT,
}


def check_optimizer(optimizer: Optimizer | None, module: nn.Module) -> None:
    """Raise unless it can drive this module."""
    if optimizer is None:
        return
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        what = "the optimizer must be a torch.optim.Optimizer over the module's parameters"
        raise InputError(f"{what}, got {name}")
    if name in UNABLE:
        raise InputError(f"{name} {UNABLE[name]}: choose another optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = f"{name} evaluates the loss several times a step, and a stream shows a batch once"
        raise InputError(f"{what}: choose another optimizer")
    own = {id(p) for p in module.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        what = "the optimizer has parameters that are not the module's"
        raise InputError(f"{what}: make it from module.parameters()")


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors by name, and the rest as JSON."""
    saved, name = optimizer.state_dict(), type(optimizer).__name__
    tensors, numbers = {}, {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = _plain(value, f"the state '{key}' of {name}")
    groups = [
        {key: _plain(value, f"the setting '{key}' of {name}") for key, value in group.items()}
        for group in saved["param_groups"]
    ]
    return tensors, {"kind": name, "groups": groups, "numbers": numbers}


def check_saved(optimizer: Optimizer, kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless what was saved fits an optimizer."""
    name = type(optimizer).__name__
    if name != kind:
        what = f"the file was saved with {ascii(kind)[1:60]}, and this optimizer is {name}"
        raise InputError(f"{what}: give one of the same kind")
    now = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    then = [group.get("params") for group in groups]
    if [len(places) for places in now] != [len(p) if isinstance(p, list) else -1 for p in then]:
        what = "the optimizer groups the module's parameters otherwise than the saved one"
        raise InputError(f"{what}: make it as it was")
    if now != then:
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
    given = {name: _given(value, None) for name, value in numbers.items()}
    for name, value in {**tensors, **given}.items():
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
    sequence = (list, tuple)
    if isinstance(value, sequence) or isinstance(mine, sequence):
        both = isinstance(value, sequence) and isinstance(mine, sequence)
        return both and len(value) == len(mine) and all(map(_alike, value, mine))
    for kind in (bool, str):
        if isinstance(value, kind) or isinstance(mine, kind):
            return isinstance(value, kind | None) and isinstance(mine, kind | None)
    return True  # numbers, one as a tensor, or nothing


def _check_state(
    kind: type[Optimizer],
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    state: Mapping[int, Mapping[str, Any]],
) -> None:
    """Raise unless one of torch's own optimizers takes these settings and has such a state."""
    known: dict[tuple[torch.Size, torch.dtype], Expected] = {}
    for place in group["params"]:
        shape, dtype = parameters[place].shape, parameters[place].dtype
        if (shape, dtype) not in known:
            known[shape, dtype] = _after_a_step(kind, group, shape, dtype)
        found = state.get(place, {})
        if not found:
            continue
        for key, (size, real) in known[shape, dtype].items():
            one = found.get(key)
            if not isinstance(one, Tensor) or (one.shape, one.is_floating_point()) != (size, real):
                raise AlteredError("the state of its optimizer")
        # Half precision overflows in a sound state, too.
        full = [t for t in found.values() if isinstance(t, Tensor) and t.element_size() >= 4]
        if not all(bool(t.isfinite().all()) for t in full):
            raise AlteredError("the state of its optimizer")
        step = found.get("step", 0)
        single = not isinstance(step, Tensor) or step.numel() == 1
        if not 0 <= float(step if single else math.nan) < 2**53:
            raise AlteredError("the steps of its optimizer")


def _after_a_step(
    kind: type[Optimizer], group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> Expected:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    takes = inspect.signature(kind).parameters.keys() - {"params", *SWITCHES}
    make: Any = kind
    try:
        optimizer: Optimizer = make(
            [parameter], **{key: group[key] for key in takes & group.keys()}
        )
        optimizer.step()
    except Exception as reason:
        raise AlteredError(f"the settings of its optimizer: {ascii(str(reason))[1:60]}") from None
    state = optimizer.state[parameter].items()
    return {key: (t.shape, t.is_floating_point()) for key, t in state if isinstance(t, Tensor)}


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": _plain(value.item(), what), "dtype": dtype}
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
