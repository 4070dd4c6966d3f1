"""Snapshots of what a refused step or a pass without a trace must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class BufferSnapshot:
    """The buffers of a module as they are now; `restore` undoes assignments too."""

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
        # One operation per dtype: there are dozens of small buffers.
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
                # An observer of ranges learns the shape of its statistics from the first batch.
                if buffer.shape != shape:
                    buffer.resize_(shape)
                buffer.detach().copy_(copy.view(shape))


class OptimizerSnapshot:
    """The settings and the state of an optimizer as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups, self._state = optimizer.param_groups, optimizer.state
        self._settings = [{**group, "params": list(group["params"])} for group in self._groups]
        self._states = {parameter: dict(own) for parameter, own in self._state.items()}
        values = [value for own in self._states.values() for value in own.values()]
        self._tensors = [(value, value.clone()) for value in values if isinstance(value, Tensor)]

    def restore(self) -> None:
        for group, before in zip(self._groups, self._settings, strict=True):
            group.clear()
            group.update(before)
        self._state.clear()
        self._state.update(self._states)
        for tensor, value in self._tensors:
            tensor.copy_(value)
        self._optimizer.param_groups, self._optimizer.state = self._groups, self._state


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode; afterwards every part of it is in its own mode again."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode
