"""Checks of a module before it is wrapped, and of the loss that it is trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    """Return the device of a module that can be wrapped; raise for another one."""
    for path, part in module.named_modules():
        _check_part(part, f"layer '{path}'" if path else "the module")
    for name, buffer in module.named_buffers():
        _check_buffer(f"buffer '{name}'", buffer)
    parameters = list(module.parameters())
    for name, parameter in module.named_parameters():
        _check_parameter(f"parameter '{name}'", parameter)
    if not any(p.requires_grad and p.numel() for p in parameters):
        raise InputError("the module has no trainable parameters: there is nothing to learn")
    kinds = {p.dtype for p in parameters}
    if len(kinds) > 1:
        raise InputError(
            f"the module mixes parameters of {_named(kinds)}: convert it to one of them; "
            "for mixed precision use precision="
        )
    if any(p.is_meta for p in parameters):
        raise InputError(
            "the module is on the meta device and has no values: "
            "move it to a real one with to_empty() and initialise it"
        )
    places = {p.device for p in parameters}
    if len(places) > 1:
        raise InputError(f"the module is spread over {_named(places)}: move it to one device")
    return places.pop()


def _named(several: set[torch.dtype] | set[torch.device]) -> str:
    return " and ".join(sorted(map(str, several)))


def _check_part(part: nn.Module, what: str) -> None:
    for kind in PARALLEL & {kind.__name__ for kind in type(part).__mro__}:
        raise InputError(
            f"{what} is a {kind}, whose processes or devices would drift apart: "
            "wrap the module inside it, on one process"
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise InputError(
            f"{what} is a TorchScript module, which cannot be trained in place: "
            "wrap the nn.Module it was made from"
        )
    if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        return
    if part.sparse and part.weight.requires_grad:
        raise InputError(
            f"{what} has sparse gradients, and a direction is dense: make it with sparse=False"
        )
    if part.max_norm is not None:
        raise InputError(
            f"{what} changes its weights whenever it is asked: "
            "make it without max_norm, and scale what it returns"
        )


def _check_buffer(what: str, buffer: Tensor) -> None:
    if isinstance(buffer, nn.parameter.UninitializedBuffer):
        raise InputError(f"{what} has no shape yet: show the module one batch before you wrap it")
    if buffer.is_meta:
        raise InputError(
            f"{what} is on the meta device and has no values: "
            "move the module to a real one and initialise it"
        )
    dense = buffer.layout == torch.strided and not buffer.is_nested and not buffer.is_quantized
    if not dense or _computes_itself(buffer):
        raise InputError(
            f"{what} is no plain dense tensor, and could not be saved: "
            "make it one, or a plain attribute of the module"
        )
    strides = zip(buffer.stride(), buffer.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        raise InputError(
            f"{what} is expanded, so its values cannot be set one by one: register a clone() of it"
        )


def _check_parameter(what: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise InputError(f"{what} has no shape yet: show the module one batch before you wrap it")
    if _computes_itself(parameter):
        raise InputError(
            f"{what} is a {type(parameter).__name__}: "
            "make the module with plain tensors, on one process"
        )
    if parameter.dtype not in DTYPES:
        raise InputError(
            f"{what} is {parameter.dtype}: "
            "parameters must be real floating-point numbers of 16 to 64 bits"
        )
    if parameter.layout != torch.strided or parameter.is_nested:
        raise InputError(f"{what} is sparse or nested: parameters must be dense")
    if parameter.is_inference():
        raise InputError(
            f"{what} was made in inference mode, where nothing can learn: "
            "make the module outside of it"
        )
    if parameter.numel() and not parameter.is_meta and not bool(parameter.isfinite().all()):
        raise InputError(f"{what} is not finite: initialise the module before you wrap it")


def _computes_itself(tensor: Tensor) -> bool:
    """Whether the tensor's class decides what is computed; it may be a shard, or hold no numbers.

    A DTensor is of such a class.
    """
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_scalar(value: object) -> None:
    """Raise unless a loss is one number."""
    found = type(value).__name__
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return
        found = f"a tensor of shape {list(value.shape)}"
    raise InputError(f"the loss must be one number a batch, and is {found}: take its mean")
