"""Residual networks, with the parameter names of torchvision."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from onepass.models.stages import Stage, identity, lateral_of


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch-norm and a shortcut; the ReLU behind their sum is left to the caller where `last` says so."""

    def __init__(self, inputs: int, outputs: int, stride: int, last: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        out = out + (x if self.downsample is None else self.downsample(x))
        return out if self.last else torch.relu(out)


class ResNet(nn.Module):
    """Four layers of basic blocks behind a 3×3 stem, global average pooling and one linear head; `width` feature maps in the first layer.

    `ResNet(20, 100)` is the reduced ResNet-18 of the paper.

    >>> sum(p.numel() for p in ResNet(20, 100).parameters())
    1109240
    """

    def __init__(self, width: int, outputs: int, blocks: tuple[int, ...] = (2, 2, 2, 2), channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self._names: list[str] = []
        inputs = width
        for level, count in enumerate(blocks):
            size, stride = width * 2**level, 1 if level == 0 else 2
            layer = [BasicBlock(inputs if b == 0 else size, size, stride if b == 0 else 1, last=b == count - 1) for b in range(count)]
            self._names.append(f"layer{level + 1}")
            self.add_module(self._names[-1], nn.Sequential(*layer))
            inputs = size
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages():
            x = stage.then(stage.body(x))
        return x

    def stages(self) -> list[Stage]:
        """Stem, layers and head. Lateral connections between layers are 1×1 convolutions, added before the ReLU."""
        made = [Stage(nn.Sequential(self.conv1, self.bn1), torch.relu, partial(_lateral, self.conv1, 1))]
        for name in self._names:
            layer = self.get_submodule(name)
            assert isinstance(layer, nn.Sequential)
            first = layer[0]
            assert isinstance(first, BasicBlock)
            then = _pooled if name == self._names[-1] else torch.relu
            made.append(Stage(layer, then, partial(_lateral, first.conv1, first.conv1.stride[0])))
        return [*made, Stage(self.fc, identity, lateral_of(self.fc))]


def _pooled(x: Tensor) -> Tensor:
    return torch.relu(x).mean((2, 3))


def _lateral(like: nn.Conv2d, stride: int, columns: int) -> nn.Module:
    return nn.Conv2d(columns * like.in_channels, like.out_channels, 1, stride, bias=False)
