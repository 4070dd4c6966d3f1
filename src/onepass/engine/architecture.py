"""An `nn.Module` as a function of one flat row of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    def __init__(self, module: nn.Module, prepare: Prepare, head: str | None = None, align: int = 1) -> None:
        parameters = sorted(module.named_parameters(), key=lambda item: item[1].requires_grad)  # stable: frozen first, then in order
        self.module = module
        self.prepare = prepare
        self.names = [name for name, _ in parameters]
        self.shapes = [p.shape for _, p in parameters]
        self.lengths = [p.numel() for _, p in parameters]
        self.size = sum(self.lengths)
        self.frozen = sum(not p.requires_grad for _, p in parameters)
        self.width = -(-self.size // align) * align  # of a row; what is behind the parameters is zero and stays zero
        self.trainable = slice(sum(self.lengths[: self.frozen]), self.width)
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self._head = module.get_submodule(head) if head is not None else linear[-1] if linear else None

    def views(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of `theta` `[…, P]`, in the order of `names`."""
        lead, parts = theta.shape[:-1], torch.split_with_sizes(theta[..., : self.size], self.lengths, dim=-1)
        return [part.view(*lead, *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def flatten(self, module: nn.Module) -> Tensor:
        """The parameters of a module of this architecture as one row."""
        values = dict(module.named_parameters())
        row = torch.cat([values[name].detach().reshape(-1) for name in self.names]) if self.names else torch.empty(0)
        return row if self.width == self.size else torch.cat([row, row.new_zeros(self.width - self.size)])

    def call(self, parameters: list[Tensor], buffers: dict[str, Tensor], x: Tensor, descriptors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits, and the features that enter the last linear layer (the logits themselves where there is none)."""
        inputs = (self.prepare(x),) if descriptors is None else (self.prepare(x), descriptors)
        values = dict(zip(self.names, parameters, strict=True)) | buffers
        with self.listening() as features:
            logits: Tensor = functional_call(self.module, values, inputs)
        return logits, features[-1] if features else logits

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """A list that takes the features of every pass inside. The user may call the module too: those are none of our business."""
        features: list[Tensor] = []
        if self._head is None:
            yield features
            return
        hook = self._head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            yield features
        finally:
            hook.remove()
