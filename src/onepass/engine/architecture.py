"""An `nn.Module` as a function of one flat row of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Prepare = Callable[[Tensor], Tensor]


class Architecture:
    """The shape of a fleet's network: where each parameter lives in a row of theta, and how a row is called.

    Frozen parameters (`requires_grad=False`) come first, so that the trainable ones are one slice at the end of the row. Tied weights have
    one place. Buffers are updated in place, as torch's own layers do (one that is assigned anew in `forward` is lost). `prepare` turns
    stored inputs into what the module expects (bytes into floats, say).
    """

    def __init__(self, module: nn.Module, prepare: Prepare, head: str | None = None) -> None:
        parameters = sorted(module.named_parameters(), key=lambda item: item[1].requires_grad)  # stable: frozen first, then in order
        self.module = module
        self.prepare = prepare
        self.names = [name for name, _ in parameters]
        self.shapes = [p.shape for _, p in parameters]
        self.lengths = [p.numel() for _, p in parameters]
        self.size = sum(self.lengths)
        self.frozen = sum(not p.requires_grad for _, p in parameters)
        self.trainable = slice(sum(self.lengths[: self.frozen]), self.size)
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
        self._features: Tensor | None = None
        self._listening = False  # the user may call the module too; those activations are none of our business
        last = self._find_head(head)
        if last is not None:
            last.register_forward_pre_hook(self._keep_features)

    def _find_head(self, name: str | None) -> nn.Module | None:
        if name is not None:
            return self.module.get_submodule(name)
        linear = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        return linear[-1] if linear else None

    def _keep_features(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._listening:
            self._features = inputs[0]

    def views(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of `theta` `[…, P]`, in the order of `names`."""
        lead = theta.shape[:-1]
        return [part.view(*lead, *shape) for part, shape in zip(torch.split_with_sizes(theta, self.lengths, dim=-1), self.shapes, strict=True)]

    def flatten(self, module: nn.Module) -> Tensor:
        """The parameters of a module of this architecture as one row."""
        values = dict(module.named_parameters())
        return torch.cat([values[name].detach().reshape(-1) for name in self.names]) if self.names else torch.empty(0)

    def call(self, parameters: list[Tensor], buffers: dict[str, Tensor], x: Tensor, descriptors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits, and the features that enter the last linear layer (the logits themselves where there is none)."""
        inputs = (self.prepare(x),) if descriptors is None else (self.prepare(x), descriptors)
        values = dict(zip(self.names, parameters, strict=True)) | buffers
        self._listening = True
        try:
            logits: Tensor = functional_call(self.module, values, inputs)
        finally:
            self._listening = False
        features, self._features = self._features, None
        return logits, logits if features is None else features

    def bind(self, row: Tensor, buffers: dict[str, Tensor]) -> None:
        """Make the module's own parameters and buffers views of a run's, so that the user's module *is* the run."""
        values = dict(self.module.named_parameters())
        for name, view in zip(self.names, self.views(row), strict=True):
            values[name].data = view
        for name, buffer in self.module.named_buffers():
            buffer.data = buffers[name][0]
