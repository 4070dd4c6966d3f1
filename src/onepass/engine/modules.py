"""What is done with a module that is somebody else's: looking at it, and leaving no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from onepass.errors import InputError
from onepass.streams.batch import Batch


def check(module: nn.Module) -> torch.device:
    """The device of a module that can be wrapped."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(f"parameter '{name}' has no shape yet: show the module one batch before you wrap it")
        if not parameter.is_floating_point():
            raise InputError(f"parameter '{name}' is {parameter.dtype}: parameters must be real floating-point numbers")
        if parameter.numel() and not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise InputError(f"parameter '{name}' is not finite: initialise the module before you wrap it")
    if not any(p.requires_grad and p.numel() for p in parameters.values()):
        raise InputError("the module has no trainable parameters: there is nothing to learn")
    kinds = {p.dtype for p in parameters.values()}
    if len(kinds) > 1:
        raise InputError(
            f"the module mixes parameters of {' and '.join(sorted(map(str, kinds)))}: convert it to one of them; for mixed precision use precision="
        )
    if any(p.is_meta for p in parameters.values()):
        raise InputError("the module is on the meta device and has no values: move it to a real one with to_empty() and initialise it")
    places = {p.device for p in parameters.values()}
    if len(places) > 1:
        raise InputError(f"the module is spread over {' and '.join(sorted(map(str, places)))}: move it to one device")
    return places.pop()


def apart(view: Tensor) -> Tensor:
    """The same memory as a storage of its own: whoever saves or shares a parameter has that alone, and not all parameters."""
    return torch.utils.dlpack.from_dlpack(view) if view.numel() else view


def copied(batch: Batch) -> Batch:
    """For a look that must leave no trace: a module may write into its inputs."""
    return replace(batch, x=batch.x.clone(), extra={name: tensor.clone() for name, tensor in batch.extra.items()})


def square(row: Tensor) -> Tensor:
    whole = row[0] if row.element_size() >= 4 else row[0].float()  # the square of a half-precision number overflows early
    return torch.dot(whole, whole)[None].to(row.dtype if row.element_size() >= 4 else torch.float32)


def check_scalar(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss must be one number a batch, and is {found}: take its mean")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation, and after that every part of it as it was."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


class Buffers:
    """The buffers of a module as they are now; `restore` brings them back, even those that were assigned anew."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        owners = [part._buffers for part in parts if part._buffers]
        self._places = [(owner, name, buffer) for owner in owners for name, buffer in owner.items() if buffer is not None]
        self._members: dict[torch.dtype, list[Tensor]] = {}
        for _, _, buffer in self._places:
            self._members.setdefault(buffer.dtype, []).append(buffer)
        # One operation a kind: there are dozens of small buffers.
        self._copies = {kind: torch.cat([b.detach().reshape(-1) for b in buffers]) for kind, buffers in self._members.items()}

    def restore(self) -> None:
        for owner, name, buffer in self._places:
            owner[name] = buffer
        for kind, buffers in self._members.items():
            copies = torch.split_with_sizes(self._copies[kind], [b.numel() for b in buffers])
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.detach().copy_(copy.view(buffer.shape))
