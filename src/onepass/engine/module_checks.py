"""What is done with a module that is somebody else's: looking at it, and leaving no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.errors import InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARALLEL = {
    "DistributedDataParallel",
    "DDP",
    "ReplicateModule",
    "DataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}


def check(module: nn.Module) -> torch.device:
    """The device of a module that can be wrapped."""
    for path, part in module.named_modules():
        _check_part(part, f"layer '{path}'" if path else "the module")
    for name, buffer in module.named_buffers():
        _check_buffer(name, buffer)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InputError(
                f"parameter '{name}' has no shape yet: show the module one batch before you wrap it"
            )
        if computes_itself(parameter):
            raise InputError(
                f"parameter '{name}' is a {type(parameter).__name__}: make the module with plain tensors, on one process"
            )
        if parameter.dtype not in DTYPES:
            raise InputError(
                f"parameter '{name}' is {parameter.dtype}: parameters must be real floating-point numbers of 16 to 64 bits"
            )
        if parameter.layout != torch.strided or parameter.is_nested:
            raise InputError(f"parameter '{name}' is sparse or nested: parameters must be dense")
        if parameter.is_inference():
            raise InputError(
                f"parameter '{name}' was made in inference mode, where nothing can learn: make the module outside of it"
            )
        if parameter.numel() and not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise InputError(
                f"parameter '{name}' is not finite: initialise the module before you wrap it"
            )
    if not any(p.requires_grad and p.numel() for p in parameters.values()):
        raise InputError("the module has no trainable parameters: there is nothing to learn")
    kinds = {p.dtype for p in parameters.values()}
    if len(kinds) > 1:
        raise InputError(
            f"the module mixes parameters of {' and '.join(sorted(map(str, kinds)))}: convert it to one of them; for mixed precision use precision="
        )
    if any(p.is_meta for p in parameters.values()):
        raise InputError(
            "the module is on the meta device and has no values: move it to a real one with to_empty() and initialise it"
        )
    places = {p.device for p in parameters.values()}
    if len(places) > 1:
        raise InputError(
            f"the module is spread over {' and '.join(sorted(map(str, places)))}: move it to one device"
        )
    return places.pop()


def computes_itself(tensor: Tensor) -> bool:
    """Whether it is of a class that decides itself what is computed, such as a DTensor: it may be a shard, or no numbers at all."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _check_part(part: nn.Module, what: str) -> None:
    kinds = PARALLEL & {kind.__name__ for kind in type(part).__mro__}
    for kind in kinds:
        raise InputError(
            f"{what} is a {kind}, whose processes or devices would drift apart: wrap the module inside it, on one process"
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise InputError(
            f"{what} is a TorchScript module, which cannot be trained in place: wrap the nn.Module it was made from"
        )
    if (
        isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        and part.sparse
        and part.weight.requires_grad
    ):
        raise InputError(
            f"{what} has sparse gradients, and a direction is dense: make it with sparse=False"
        )
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
        raise InputError(
            f"{what} changes its weights whenever it is asked: make it without max_norm, and scale what it returns"
        )


def _check_buffer(name: str, buffer: Tensor) -> None:
    if isinstance(buffer, nn.parameter.UninitializedBuffer):
        raise InputError(
            f"buffer '{name}' has no shape yet: show the module one batch before you wrap it"
        )
    if buffer.is_meta:
        raise InputError(
            f"buffer '{name}' is on the meta device and has no values: move the module to a real one and initialise it"
        )
    if (
        buffer.layout != torch.strided
        or buffer.is_nested
        or buffer.is_quantized
        or computes_itself(buffer)
    ):
        raise InputError(
            f"buffer '{name}' is no plain dense tensor, and could not be saved: make it one, or a plain attribute of the module"
        )
    if any(
        step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        raise InputError(
            f"buffer '{name}' is expanded, so its values cannot be set one by one: register a clone() of it"
        )


def in_groups(optimizer: torch.optim.Optimizer | None) -> list[list[int]] | None:
    """Which parameters an optimizer has, by their identity."""
    return (
        None
        if optimizer is None
        else [list(map(id, group["params"])) for group in optimizer.param_groups]
    )


def driven(
    groups: list[list[int]] | None, parameters: Sequence[nn.Parameter], frozen: int
) -> list[int]:
    """Which of the trainable parameters the optimizer has. The others are not trained, so they have no gradient."""
    if groups is None:
        return list(range(len(parameters) - frozen))
    given = {one for group in groups for one in group}
    if given - {id(p) for p in parameters}:
        raise InputError(
            "the optimizer has parameters that are not the module's: make it from module.parameters()"
        )
    found = [number for number, p in enumerate(parameters[frozen:]) if id(p) in given]
    if not found:
        raise InputError(
            "the optimizer has none of the module's trainable parameters: make it from module.parameters()"
        )
    return found


def as_now(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What brings an optimizer back to where it is now, settings and state."""
    groups, state = optimizer.param_groups, optimizer.state
    settings = [{**group, "params": list(group["params"])} for group in groups]
    states = {parameter: dict(own) for parameter, own in state.items()}
    tensors = [
        value for own in states.values() for value in own.values() if isinstance(value, Tensor)
    ]
    values = [tensor.clone() for tensor in tensors]

    def back() -> None:
        for group, before in zip(groups, settings, strict=True):
            group.clear()
            group.update(before)
        state.clear()
        state.update(states)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        optimizer.param_groups, optimizer.state = groups, state

    return back


def apart(view: Tensor) -> Tensor:
    """The same memory as a storage of its own: whoever saves or shares a parameter has that alone, and not all parameters."""
    return torch.utils.dlpack.from_dlpack(view) if view.numel() else view


def copied(batch: Batch) -> Batch:
    """For a look that must leave no trace: a module may write into its inputs."""
    return replace(
        batch,
        x=batch.x.clone(),
        extra={name: tensor.clone() for name, tensor in batch.extra.items()},
    )


def square(row: Tensor) -> Tensor:
    whole = (
        row[0] if row.element_size() >= 4 else row[0].float()
    )  # the square of a half-precision number overflows early
    return torch.dot(whole, whole)[None].to(row.dtype if row.element_size() >= 4 else torch.float32)


def check_scalar(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = (
            f"a tensor of shape {list(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
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
        self._places = [
            (owner, name, buffer)
            for owner in owners
            for name, buffer in owner.items()
            if buffer is not None
        ]
        self._members: dict[torch.dtype, list[Tensor]] = {}
        for _, _, buffer in self._places:
            self._members.setdefault(buffer.dtype, []).append(buffer)
        self._shapes = {kind: [b.shape for b in buffers] for kind, buffers in self._members.items()}
        # One operation a kind: there are dozens of small buffers.
        self._copies = {
            kind: torch.cat([b.detach().reshape(-1) for b in buffers])
            for kind, buffers in self._members.items()
        }

    def restore(self) -> None:
        for owner, name, buffer in self._places:
            owner[name] = buffer
        for kind, buffers in self._members.items():
            shapes = self._shapes[kind]
            copies = torch.split_with_sizes(self._copies[kind], [shape.numel() for shape in shapes])
            for buffer, copy, shape in zip(buffers, copies, shapes, strict=True):
                if (
                    buffer.shape != shape
                ):  # an observer of ranges, say, learns the shape of its statistics from the first batch
                    buffer.resize_(shape)
                buffer.detach().copy_(copy.view(shape))
