"""A head that grows when new classes appear."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.engine.bound import Bound
from onepass.engine.fleet import Carry
from onepass.errors import InputError


def check_head(module: nn.Module, grow: bool | str) -> str:
    """The name of the linear layer that is to grow: the given one, or the last."""
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    if not linear:
        raise InputError("the module has no nn.Linear layer that could grow: classes can only appear where the last layer is one")
    name = list(linear)[-1] if grow is True else str(grow)
    if name not in linear:
        raise InputError(f"the module has no nn.Linear layer '{name}' to grow: choose one of {', '.join(linear)}")
    head = linear[name]
    others = [p for part_name, part in module.named_modules() if part_name != name for p in part.parameters(recurse=False)]
    if any(p is mine for p in others for mine in head.parameters()):
        raise InputError(f"layer '{name}' shares its weights with another one, which would grow too: untie them, or leave grow out")
    if not all(p.requires_grad for p in head.parameters()) or set(dict(head.named_parameters())) - {"weight", "bias"}:
        raise InputError(f"layer '{name}' is frozen or parametrised: only a plain, trainable nn.Linear layer can grow")
    return name


def grow(fleet: Bound, name: str, outputs: int) -> Carry:
    """Enlarge a linear layer in place: old outputs keep their values, new ones are initialised as torch would, from the run's seed.

    The module's parameters stay the same objects, so an optimizer goes on with them; its state of them is enlarged by zeros.
    """
    module = fleet.architecture.module
    head = module.get_submodule(name)
    assert isinstance(head, nn.Linear)
    before = {parameter: parameter.shape for parameter in head.parameters()}

    def enlarged() -> nn.Module:
        weight = head.weight
        fresh = nn.Linear(head.in_features, outputs, head.bias is not None, device="cpu", dtype=weight.dtype).to(weight.device)
        for parameter, new in zip(head.parameters(), fresh.parameters(), strict=True):
            parameter.data = new.data
        head.out_features = outputs
        return module

    carry = fleet.rebuild(enlarged)
    if fleet.optimizer is not None:
        for parameter, shape in before.items():
            state = fleet.optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if isinstance(value, Tensor) and value.shape == shape:
                    state[key] = _enlarged(value, parameter.shape)
    return carry


def _enlarged(old: Tensor, shape: torch.Size) -> Tensor:
    new = old.new_zeros(shape)
    new[: len(old)] = old
    return new
