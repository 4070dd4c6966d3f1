"""Reading what the user gives, and refusing what cannot be right with one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onepass.errors import InputError

X = Any  # a tensor or array; several as a tuple or list; or a mapping from names of `forward` to them
Kind = tuple[torch.dtype, tuple[int, ...]]
KINDS = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
THOUSANDS = 10_000  # outputs more at once are a label that was not meant as one


@dataclass(frozen=True)
class Examples:
    """What the examples of a stream look like: the first batch decides."""

    inputs: tuple[Kind, ...]
    keywords: tuple[str, ...]
    target: Kind


def read_inputs(x: X, like: Examples | None) -> tuple[list[Tensor], tuple[str, ...]]:
    """The tensors of `x`, and their names if they have some."""
    keywords: tuple[str, ...] = ()
    if isinstance(x, Mapping):
        keywords = like.keywords if like is not None and like.keywords else tuple(x)
        if set(keywords) != set(x) or not all(isinstance(name, str) for name in x):
            raise InputError(f"x has the inputs {_names(x)}, and this stream's examples have {_names(keywords)}: give the same ones every time")
        values = [x[name] for name in keywords]
    else:
        values = list(x) if isinstance(x, (tuple, list)) else [x]
    if not values:
        raise InputError("x has no inputs: give a tensor, a tuple of them, or a dictionary")
    called = [f"x[{name!r}]" for name in keywords] or (["x"] if len(values) == 1 else [f"x[{i}]" for i in range(len(values))])
    tensors = [read(value, name) for value, name in zip(values, called, strict=True)]
    if like is not None and (keywords != like.keywords or len(tensors) != len(like.inputs)):
        before = f"the inputs {_names(like.keywords)}" if like.keywords else f"{len(like.inputs)} inputs"
        raise InputError(
            f"x has {len(tensors)} inputs{' with names' if keywords else ''}, and this stream's examples have {before}: give the same every time"
        )
    for i, (tensor, name) in enumerate(zip(tensors, called, strict=True)):
        _same_length(tensors[0], tensor, called[0], name)
        if like is not None:
            check(tensor, like.inputs[i], name)
    return tensors, keywords


def read(value: object, name: str) -> Tensor:
    """A tensor that can be a batch."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except (TypeError, ValueError):
            raise InputError(f"{name} is an array of {value.dtype}: convert it to numbers that torch knows") from None
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor or a NumPy array, got {type(value).__name__}")
    if value.is_meta:
        raise InputError(f"{name} is on the meta device and has no values: give real ones")
    if value.layout != torch.strided or value.is_complex():
        raise InputError(f"{name} is {'complex' if value.is_complex() else 'sparse'}: convert it to a dense tensor of real numbers")
    if value.dim() == 0:
        raise InputError(f"{name} is a single number: the first dimension must be the examples of the batch")
    if len(value) == 0:
        raise InputError(f"{name} is an empty batch: there is nothing to learn from it")
    if value.is_floating_point() and not _finite(value):
        raise InputError(f"{name} has values that are not finite (NaN or infinity): clean or drop these examples")
    return value.detach()


def check(tensor: Tensor, kind: Kind, name: str) -> None:
    dtype, shape = kind
    if tuple(tensor.shape[1:]) != shape:
        raise InputError(f"{name} has the shape {list(tensor.shape)}, and this stream's examples have {['batch', *shape]}: pad or reshape them")
    if tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype}, and this stream's examples are {dtype}: convert it")


def kind_of(tensor: Tensor) -> Kind:
    return tensor.dtype, tuple(tensor.shape[1:])


def read_target(y: object, examples: int, like: Examples | None) -> Tensor:
    """What a loss of the user's own is given."""
    target = read(y, "y")
    if len(target) != examples:
        raise InputError(f"x has {examples} examples and y has {len(target)}: give one y for each")
    if like is not None:
        check(target, like.target, "y")
    return target


def read_labels(y: object, examples: int) -> tuple[list[int], Tensor]:
    """Class labels as whole numbers from 0, for the host and as a tensor."""
    target = read(y, "y")
    if target.is_floating_point() or target.dtype == torch.bool or target.dim() != 1:
        found = f"{target.dtype} of shape {list(target.shape)}"
        raise InputError(f"y must be one whole number a class, from 0, for each example, got {found}: for other targets give a loss of your own")
    if len(target) != examples:
        raise InputError(f"x has {examples} examples and y has {len(target)}: give one label for each")
    labels: list[int] = target.tolist()
    if min(labels) < 0:
        raise InputError(f"label {min(labels)} is out of range: classes are counted from 0")
    return labels, target.to(torch.int64)


def check_labels(labels: Sequence[int], task: object, classes: Collection[int] | None, outputs: int | None, grows: bool) -> None:
    """Raise unless the labels are possible: those of a task with `classes` of its own, in a module with so many outputs, if that is known."""
    for label in sorted(set(labels) - set(classes)) if classes is not None else ():
        raise InputError(f"label {label} is out of range: the classes of task '{task}' are {', '.join(map(str, classes or ()))}")
    highest = max(labels)
    if outputs is None or highest < outputs:
        return
    if not grows:
        raise InputError(f"label {highest} is out of range: the module has {outputs} outputs; wrap it with grow=True if classes may appear")
    if highest >= outputs + THOUSANDS:
        raise InputError(f"label {highest} is out of range: the module has {outputs} outputs and would need thousands more; number classes densely")


def count_outputs(found: object, examples: int) -> int:
    """How many classes a module tells apart, by what it makes of some examples."""
    if isinstance(found, Tensor) and found.dim() == 2 and len(found) == examples and found.shape[1] > 1:
        return found.shape[1]
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise InputError(f"a module that classifies must give one output a class for each example, [batch, classes], and gave {shape}")


def _same_length(first: Tensor, other: Tensor, name: str, other_name: str) -> None:
    if len(first) != len(other):
        raise InputError(f"{name} has {len(first)} examples and {other_name} has {len(other)}: give the same examples to all inputs")


def _finite(value: Tensor) -> bool:
    # A sum is one pass and cheap; only where it overflows is every value looked at.
    if value.dtype.itemsize == 1:  # eight bits: torch cannot add them up
        value = value.float()
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
