"""Residual networks, with the parameter names of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onepass.models.initial import Initialisation, initialise
from onepass.models.norm import BatchNorm, Constants
from onepass.models.stages import Stage, identity, lateral_of

Stem = Literal["3x3", "7x7", "7x7-pool"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch-norm and a shortcut.

    The caller applies the ReLU behind the sum of the `last` block.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, last: bool, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        out = out + (x if self.downsample is None else self.downsample(x))
        return out if self.last else torch.relu(out)


class ResNet(nn.Module):
    """Four layers of basic blocks behind a stem, global average pooling and one linear head.

    The first layer has `width` feature maps. `ResNet(20, 100)` is the reduced ResNet-18 of the
    paper, and `ResNet(64, 100, stem="7x7")` its larger network, whose stem does not pool.
    Torchvision's ResNet-18 is `ResNet(64, 1000, stem="7x7-pool")`.

    >>> nets = ResNet(20, 100), ResNet(64, 1000, stem="7x7-pool")
    >>> [sum(p.numel() for p in net.parameters()) for net in nets]
    [1109240, 11689512]
    """

    def __init__(
        self,
        width: int,
        outputs: int,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        channels: int = 3,
        *,
        stem: Stem = "3x3",
        batch_norm: Constants = "torch",
        initialisation: Initialisation = "torch",
    ) -> None:
        super().__init__()
        norm = partial(BatchNorm, constants=batch_norm)
        size, stride = (3, 1) if stem == "3x3" else (7, 2)
        self.conv1 = nn.Conv2d(channels, width, size, stride, size // 2, bias=False)
        self.bn1 = norm(width)
        self._pools = stem == "7x7-pool"
        self._names: list[str] = []
        inputs = width
        for level, count in enumerate(blocks):
            outer, stride = width * 2**level, 1 if level == 0 else 2
            layer = [BasicBlock(inputs, outer, stride, count == 1, norm)]
            layer += [BasicBlock(outer, outer, 1, b == count - 1, norm) for b in range(1, count)]
            self._names.append(f"layer{level + 1}")
            self.add_module(self._names[-1], nn.Sequential(*layer))
            inputs = outer
        self.fc = nn.Linear(inputs, outputs)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                initialise(part, initialisation)
        initialise(self.fc, initialisation)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages():
            x = stage.then(stage.body(x))
        return x

    def stages(self) -> list[Stage]:
        """Stem, layers and head.

        Lateral connections between layers are 1×1 convolutions, added before the ReLU. They are
        initialised as linear layers are, from a normal distribution, as in the A-GEM authors' code.
        """
        stem = nn.Sequential(self.conv1, self.bn1)
        then = _stem_pooled if self._pools else torch.relu
        made = [Stage(stem, then, partial(_lateral, self.conv1))]
        for name in self._names:
            layer = self.get_submodule(name)
            assert isinstance(layer, nn.Sequential)
            first = layer[0]
            assert isinstance(first, BasicBlock)
            then = _pooled if name == self._names[-1] else torch.relu
            made.append(Stage(layer, then, partial(_lateral, first.conv1)))
        return [*made, Stage(self.fc, identity, lateral_of(self.fc))]


def _lateral(like: nn.Conv2d, columns: int) -> nn.Module:
    return initialise(
        nn.Conv2d(columns * like.in_channels, like.out_channels, 1, like.stride[0], bias=False)
    )


def _pooled(x: Tensor) -> Tensor:
    return torch.relu(x).mean((2, 3))


def _stem_pooled(x: Tensor) -> Tensor:
    return functional.max_pool2d(torch.relu(x), 3, 2, 1)
