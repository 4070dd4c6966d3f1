"""Reading what the user gives, and refusing what cannot be right with one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onepass.errors import InputError, first_line

# A tensor or array; several as a tuple or list; or a mapping from names of `forward` to them.
X = Any
Kind = tuple[torch.dtype, tuple[int, ...]]
_KEPT = "uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64"
KEPT = {getattr(torch, name) for name in _KEPT.split()}
LABELS = KEPT | {torch.uint16, torch.uint32, torch.uint64}  # which become int64
_DTYPES = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)]
KINDS = {str(kind).removeprefix("torch."): kind for kind in _DTYPES}


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
            found = f"x has the inputs {_names(x)}"
            before = f"this stream's examples have {_names(keywords)}"
            raise InputError(f"{found}, and {before}: give the same ones every time")
        try:
            values = [x[name] for name in keywords]
        except Exception as reason:
            what = f"the inputs of x cannot be read ({first_line(reason)})"
            raise InputError(f"{what}: give a dictionary of tensors") from reason
    else:
        values = list(x) if isinstance(x, (tuple, list)) else [x]
    if not values:
        raise InputError("x has no inputs: give a tensor, a tuple of them, or a dictionary")
    places: Sequence[object] = keywords or range(len(values))
    called = [f"x[{place!r}]" for place in places] if keywords or len(values) > 1 else ["x"]
    tensors = [read(value, name) for value, name in zip(values, called, strict=True)]
    if like is not None and (keywords != like.keywords or len(tensors) != len(like.inputs)):
        before = f"{len(like.inputs)} inputs"
        if like.keywords:
            before = f"the inputs {_names(like.keywords)}"
        found = f"{len(tensors)} inputs{' with names' if keywords else ''}"
        what = f"x has {found}, and this stream's examples have {before}"
        raise InputError(f"{what}: give the same every time")
    for i, (tensor, name) in enumerate(zip(tensors, called, strict=True)):
        if len(tensor) != len(tensors[0]):
            what = f"{called[0]} has {len(tensors[0])} examples and {name} has {len(tensor)}"
            raise InputError(f"{what}: give the same examples to all inputs")
        if like is not None:
            check(tensor, like.inputs[i], name)
    return tensors, keywords


def read(value: object, name: str, dtypes: Collection[torch.dtype] = KEPT) -> Tensor:
    """A tensor that can be a batch."""
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            what = f"{name} is a masked array, and its mask would be lost"
            raise InputError(f"{what}: fill in or drop what is masked")
        try:
            value = torch.from_numpy(np.ascontiguousarray(value))
        except (TypeError, ValueError):
            what = f"{name} is an array of {value.dtype}"
            raise InputError(f"{what}: convert it to numbers that torch knows") from None
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor or a NumPy array, got {type(value).__name__}")
    if type(value) is not Tensor:
        value = _plain(value, name)
    if value.is_meta:
        raise InputError(f"{name} is on the meta device and has no values: give real ones")
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_complex():
        raise InputError(f"{name} is {_kind(value)}: convert it to a dense tensor of real numbers")
    if value.dtype not in dtypes:
        what = f"{name} is {value.dtype}, which torch can hardly compute with"
        raise InputError(f"{what}: convert it, to float32 or int64 say")
    if value.dim() == 0:
        what = f"{name} is a single number"
        raise InputError(f"{what}: the first dimension must be the examples of the batch")
    if len(value) == 0:
        raise InputError(f"{name} is an empty batch: there is nothing to learn from it")
    if value.is_floating_point() and not _finite(value):
        what = f"{name} has values that are not finite (NaN or infinity)"
        raise InputError(f"{what}: clean or drop these examples")
    # Autograd cannot keep what was made in inference mode.
    return (value.clone() if value.is_inference() else value).detach()


def _plain(value: Tensor, name: str) -> Tensor:
    """A tensor of a class of its own as a plain one, if it holds its values itself."""
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InputError(f"{name} is a {type(value).__name__}: convert it to a plain tensor")
    return value.detach().as_subclass(Tensor)


def _kind(value: Tensor) -> str:
    if value.is_nested or value.is_quantized or value.is_complex():
        return "nested" if value.is_nested else "quantized" if value.is_quantized else "complex"
    return "sparse" if "sparse" in str(value.layout) else str(value.layout)


def check(tensor: Tensor, kind: Kind, name: str) -> None:
    dtype, shape = kind
    if tuple(tensor.shape[1:]) != shape:
        found = f"{name} has the shape {list(tensor.shape)}"
        before = f"this stream's examples have {['batch', *shape]}"
        raise InputError(f"{found}, and {before}: pad or reshape them")
    if tensor.dtype != dtype:
        what = f"{name} is {tensor.dtype}, and this stream's examples are {dtype}"
        raise InputError(f"{what}: convert it")


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
    target = read(y, "y", LABELS)
    if target.is_floating_point() or target.dtype == torch.bool or target.dim() != 1:
        what = "y must be one whole number a class, from 0, for each example"
        got = f"{target.dtype} of shape {list(target.shape)}"
        raise InputError(f"{what}, got {got}: for other targets give a loss of your own")
    if len(target) != examples:
        what = f"x has {examples} examples and y has {len(target)}"
        raise InputError(f"{what}: give one label for each")
    labels: list[int] = target.tolist()
    if min(labels) < 0:
        raise InputError(f"label {min(labels)} is out of range: classes are counted from 0")
    return labels, target.to(torch.int64)


def count_outputs(found: object, examples: int) -> int:
    """How many classes a module tells apart, by its outputs for some examples."""
    shape = tuple(found.shape) if isinstance(found, Tensor) else ()
    if len(shape) == 2 and shape[0] == examples and shape[1] > 1:
        return shape[1]
    got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    what = "a module that classifies must give one output a class for each example"
    raise InputError(f"{what}, [batch, classes], and gave {got}")


def _finite(value: Tensor) -> bool:
    # A sum is one pass and cheap; only where it overflows is every value looked at.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
