"""An `nn.Module` as a function of one flat row of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.func import functional_call

Prepare = Callable[[Tensor], Tensor]


class Architecture:
    """The shape of a network: where each parameter lies in a row of theta, and how a row is called.

    Frozen parameters (`requires_grad=False`) come first, so that the trainable ones are one slice
    at the end of the row. Tied weights have one place. Buffers are updated in place, as torch's own
    layers do (one that is assigned anew in `forward` is lost). `prepare` turns stored inputs into
    what the module expects, such as bytes into floats. Each parameter starts at a multiple of
    `align` numbers; what is between them is zero and stays zero. With `channels_last`, the weights
    of convolutions lie in a row as fast kernels want them, so that no step converts them.
    """

    def __init__(
        self,
        module: nn.Module,
        prepare: Prepare,
        head: str | None = None,
        align: int = 1,
        channels_last: bool = False,
    ) -> None:
        # The sort is stable: each group keeps its order.
        parameters = sorted(module.named_parameters(), key=lambda item: item[1].requires_grad)
        self.module = module
        self.prepare = prepare
        self.names = [name for name, _ in parameters]
        self.shapes = [p.shape for _, p in parameters]
        self.lengths = [p.numel() for _, p in parameters]
        self._moved = [channels_last and p.dim() == 4 for _, p in parameters]
        self.size = sum(self.lengths)
        aligned = (-(-length // align) * align for length in self.lengths)
        self.starts = [0, *accumulate(aligned)]
        self.frozen = sum(not p.requires_grad for _, p in parameters)
        self.width = self.starts[-1]  # of a row
        self.trainable = slice(self.starts[self.frozen], self.width)
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self._head: nn.Module | None = linear[-1] if linear else None
        if head is not None:
            self._head = module.get_submodule(head)

    def views(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of `theta` `[…, P]`, in the order of `names`."""
        lead = theta.shape[:-1]
        views = []
        places = zip(self.starts[:-1], self.lengths, self.shapes, self._moved, strict=True)
        for start, length, shape, moved in places:
            part = theta[..., start : start + length]
            if moved:
                part = part.view(*lead, shape[0], *shape[2:], shape[1]).movedim(-1, -3)
            views.append(part if moved else part.view((*lead, *shape)))
        return views

    def named_views(self, theta: Tensor) -> dict[str, Tensor]:
        """The same by name."""
        return dict(zip(self.names, self.views(theta), strict=True))

    def flatten(self, module: nn.Module) -> Tensor:
        """The parameters of a module of this architecture as one row."""
        values = dict(module.named_parameters())
        first = next(iter(values.values()), torch.empty(0)).detach()
        row = first.new_zeros(self.width)
        for name, view in self.named_views(row).items():
            view.copy_(values[name].detach())
        return row

    def gaps(self) -> Tensor | None:
        """Which columns of a row are no parameters, `[P]`; None if all are."""
        if self.width == self.size:
            return None
        ends = zip(self.starts[1:], self.starts, self.lengths, strict=False)
        return torch.cat([torch.arange(end - start) >= length for end, start, length in ends])

    def numbers(self, theta: Tensor) -> Tensor:
        """The parameters of `theta` `[…, P]` alone, one behind the other."""
        return torch.cat([view.reshape(*theta.shape[:-1], -1) for view in self.views(theta)], -1)

    def call(
        self,
        parameters: list[Tensor],
        buffers: dict[str, Tensor],
        x: Tensor,
        descriptors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Logits, and the features that enter the last linear layer (logits if there is none)."""
        inputs = (self.prepare(x),) if descriptors is None else (self.prepare(x), descriptors)
        values = dict(zip(self.names, parameters, strict=True)) | buffers
        with self.listening() as features:
            logits: Tensor = functional_call(self.module, values, inputs)
        return logits, features[-1] if features else logits

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """A list that takes the features of every pass inside; passes outside are not hooked."""
        features: list[Tensor] = []
        if self._head is None:
            yield features
            return
        hook = self._head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            yield features
        finally:
            hook.remove()


def aligned(stack: Tensor, align: int) -> Tensor:
    """The rows of `stack [R, …]`, each at a multiple of `align` numbers in memory."""
    length = stack[0].numel()
    room = stack.new_zeros(len(stack), -(-length // align) * align)
    return room[:, :length].view(stack.shape).copy_(stack)


def fill(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Copy tensors into those of the same names, which may be larger, at the leading corner."""
    for name in old.keys() & new.keys():
        sizes = zip(old[name].shape, new[name].shape, strict=True)
        corner = tuple(slice(min(pair)) for pair in sizes)
        new[name][corner] = old[name][corner]
