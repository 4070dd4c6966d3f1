"""Layers of the reduced ResNet-18 by torch's operations and by ours, each timed on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from common import now
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.engine.precision import products
from onepass.protocol import TRIED

REPEAT, ROUNDS = 10, 5
EPS = 1e-3
aten = torch.ops.aten


class Convolution(NamedTuple):
    inputs: int
    outputs: int
    size: int  # of the input images
    stride: int
    side: int  # of the window
    number: int  # of such convolutions in the network

    @property
    def name(self) -> str:
        shape = f"{self.inputs} → {self.outputs}, {self.size}×{self.size}, {self.side}×{self.side}"
        return shape + (", stride 2" if self.stride == 2 else "")


class Norm(NamedTuple):
    channels: int
    size: int  # of the images
    relu: bool
    adds: bool  # a shortcut
    number: int  # of such batch-norms in the network

    @property
    def name(self) -> str:
        shape = f"{self.channels}, {self.size}×{self.size}"
        return shape + (", sum" if self.adds else "") + (", ReLU" if self.relu else "")


CONVOLUTIONS = [
    Convolution(3, 20, 32, 1, 3, 1),
    Convolution(20, 20, 32, 1, 3, 4),
    Convolution(20, 40, 32, 2, 3, 1),
    Convolution(20, 40, 32, 2, 1, 1),
    Convolution(40, 40, 16, 1, 3, 3),
    Convolution(40, 80, 16, 2, 3, 1),
    Convolution(40, 80, 16, 2, 1, 1),
    Convolution(80, 80, 8, 1, 3, 3),
    Convolution(80, 160, 8, 2, 3, 1),
    Convolution(80, 160, 8, 2, 1, 1),
    Convolution(160, 160, 4, 1, 3, 3),
]
NORMS = [Norm(20, 32, True, False, 3), Norm(20, 32, True, True, 2)] + [
    Norm(channels, size, relu, adds, count)
    for channels, size in ((40, 16), (80, 8), (160, 4))
    for relu, adds, count in ((True, False, 2), (True, True, 2), (False, False, 1))
]


class Timed(NamedTuple):
    """A kind of work in a layer."""

    kind: str
    name: str
    number: int  # of such layers in the network
    nbytes: int  # of the inputs that are read and the results that are written
    theirs: float  # µs by torch's operations
    ours: float  # µs by our kernels


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the least of some rounds.

    On a GPU calls are in a CUDA graph, so that the host does not count.
    """
    for _ in range(3):
        call()
    if device.type == "cpu":
        began = now("cpu")
        call()
        return 1e6 * (now("cpu") - began)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEAT):
            call()
    found: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end) / REPEAT)
    return min(found)


def images(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)


def compared(
    kind: str,
    layer: Convolution | Norm,
    moved: tuple[Tensor, ...],
    theirs: Callable[[], object],
    ours: Callable[[], object],
) -> Timed:
    """µs of torch's best way and of ours; `moved` is what is read and written."""
    device = moved[0].device
    with products(device, tf32=True, tried=TRIED):
        times = microseconds(theirs, device), microseconds(ours, device)
    return Timed(kind, layer.name, layer.number, sum(tensor.nbytes for tensor in moved), *times)


def convolution(layer: Convolution, images_: int, device: torch.device) -> Iterator[Timed]:
    inputs, outputs, size, stride, side, _ = layer
    padding = side // 2
    x = images(device, images_, inputs, size, size)
    w = images(device, outputs, inputs, side, side)
    y = torch.conv2d(x, w, stride=stride, padding=padding)

    def forward() -> Tensor:
        return torch.conv2d(x, w, stride=stride, padding=padding)

    def backward(by_inputs: bool) -> object:
        mask = [by_inputs, not by_inputs, False]
        form = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
        return aten.convolution_backward(y, x, w, [0], *form, mask)

    def ours() -> object:
        return convolve(x, w, stride, padding)

    yield compared("convolution", layer, (x, y), forward, ours)

    def by_inputs() -> object:
        return convolve_inputs(y, w, stride, padding, size, size)

    if inputs > 3:
        yield compared("by inputs", layer, (x, y), lambda: backward(True), by_inputs)

    def by_weights() -> object:
        return convolve_weights(y, x, side, stride, padding)

    yield compared("by weights", layer, (x, y), lambda: backward(False), by_weights)
    weight, bias, mean, variance = torch.rand(4, outputs, device=device).unbind(0)

    def evaluated() -> Tensor:
        out = batch_norm(forward(), mean, variance, weight, bias, False, 0.1, EPS)
        return out.relu_()

    def evaluated_by_us() -> object:
        columns = weight, bias, mean, variance
        return convolve_norm(x, w, stride, padding, *columns, EPS, None, True)

    yield compared("evaluation", layer, (x, y), evaluated, evaluated_by_us)


def normalisation(layer: Norm, images_: int, device: torch.device) -> Iterator[Timed]:
    channels, size, relu, adds, _ = layer
    x, shortcut, g = (images(device, images_, channels, size, size) for _ in range(3))
    w, b = torch.rand(2, channels, device=device)

    def theirs() -> Tensor:
        y: Tensor = torch._batch_norm_impl_index(x, w, b, None, None, True, 0.1, EPS, True)[0]
        y = y + shortcut if adds else y
        return y.relu() if relu else y

    def ours() -> object:
        return norm(x, w, b, shortcut if adds else None, None, None, 0.1, EPS, relu)

    read = (x, x, shortcut) if adds else (x, x)
    yield compared("norm", layer, read, theirs, ours)
    _, mean, inverse, reserve, index = torch._batch_norm_impl_index(
        x, w, b, None, None, True, 0.1, EPS, True
    )
    out = theirs()

    def theirs_back() -> object:
        z = aten.threshold_backward(g, out, 0) if relu else g
        found = mean, inverse, True, EPS, [True] * 3, reserve
        return aten._batch_norm_impl_index_backward(index, x, z, w, None, None, *found)

    def ours_back() -> object:
        return norm_backward(g, None, x, w, b, mean, inverse, out if adds else None, relu, adds)

    yield compared("norm backward", layer, (x, x, x), theirs_back, ours_back)


def layers(count: int, device: torch.device) -> Iterator[Timed]:
    """Every layer for a number of images."""
    for layer in CONVOLUTIONS:
        yield from convolution(layer, count, device)
    for norm_layer in NORMS:
        yield from normalisation(norm_layer, count, device)
