"""Where a gradient of the reduced ResNet-18 spends its time on a GPU, layer by layer: torch's operations against ours.

    python benchmarks/kernels.py [--images 10,65,256,1040] [--tune] [--device cuda] [--markdown FILE]

For every kind of layer, µs of one call inside a CUDA graph: convolutions forward, by the inputs and by the weights, by the fastest of the ten ways
that cuDNN proposes and by the kernels in `engine/gpu`; batch-norm with the sum and the ReLU behind it, forward and backward, the
same way; an evaluation's convolution with all of that. `bytes` is what reading inputs and writing results would take at the speed of a copy. At the
end how much each kind of layer takes in all, and the whole gradient as a program. With `--tune`, our kernels alone with other tiles, the fastest
first, and the one that is used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy

from onepass.engine import gpu, tracing
from onepass.engine.architecture import Architecture
from onepass.engine.gpu import convolution, fusing
from onepass.engine.gpu import norm as norms
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.engine.gradients import _Row
from onepass.engine.precision import products
from onepass.errors import first_line
from onepass.models import Network
from onepass.protocol import TRIED

REPEAT, ROUNDS, EPS = 10, 5, 1e-3
LAST = torch.channels_last
aten = torch.ops.aten

# Inputs, outputs, size of the input images, stride, side of the window, and how many such convolutions there are.
CONVOLUTIONS = [
    (3, 20, 32, 1, 3, 1), (20, 20, 32, 1, 3, 4), (20, 40, 32, 2, 3, 1), (20, 40, 32, 2, 1, 1), (40, 40, 16, 1, 3, 3), (40, 80, 16, 2, 3, 1),
    (40, 80, 16, 2, 1, 1), (80, 80, 8, 1, 3, 3), (80, 160, 8, 2, 3, 1), (80, 160, 8, 2, 1, 1), (160, 160, 4, 1, 3, 3),
]  # fmt: skip
# Channels, size of the images, with ReLU, with a sum, and how many such batch-norms there are.
NORMS = [(20, 32, True, False, 3), (20, 32, True, True, 2)] + [
    (channels, size, relu, adds, count)
    for channels, size in ((40, 16), (80, 8), (160, 4))
    for relu, adds, count in ((True, False, 2), (True, True, 2), (False, False, 1))
]


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, the least of some rounds; on a GPU inside a graph, so that the host does not count."""
    for _ in range(3):
        call()
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEAT):
            call()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end) / REPEAT)
    return min(found)


def ways(
    theirs: Callable[[], object], ours: Callable[[], object], device: torch.device
) -> list[float]:
    """µs of cuDNN's best and of ours."""
    with products(device, tf32=True, tried=TRIED):
        return [microseconds(theirs, device), microseconds(ours, device)]


def images(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).contiguous(memory_format=LAST)


def rows(
    count: int, device: torch.device, speed: float
) -> Iterable[tuple[str, str, int, float, list[float]]]:
    """Kind, layer, how many there are, µs that its bytes take, and µs of each way."""

    def floor(*tensors: Tensor) -> float:
        return sum(t.nbytes for t in tensors) / speed * 1e6

    for inputs, outputs, size, stride, side, number in CONVOLUTIONS:
        x, w, padding = (
            images(device, count, inputs, size, size),
            images(device, outputs, inputs, side, side),
            side // 2,
        )
        y = torch.conv2d(x, w, stride=stride, padding=padding)
        name = f"{inputs} → {outputs}, {size}×{size}, {side}×{side}" + (
            ", stride 2" if stride == 2 else ""
        )

        def back(
            by_inputs: bool,
            x: Tensor = x,
            w: Tensor = w,
            y: Tensor = y,
            stride: int = stride,
            padding: int = padding,
        ) -> object:
            mask = [by_inputs, not by_inputs, False]
            return aten.convolution_backward(
                y, x, w, [0], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask
            )

        a = x, w, stride, padding
        forward = ways(
            lambda a=a: torch.conv2d(a[0], a[1], stride=a[2], padding=a[3]),
            lambda a=a: convolve(*a),
            device,
        )  # type: ignore[misc]
        yield "convolution", name, number, floor(x, y), forward
        if inputs > 3:
            b = y, w, stride, padding, size, size
            yield (
                "by inputs",
                name,
                number,
                floor(x, y),
                ways(lambda back=back: back(True), lambda b=b: convolve_inputs(*b), device),
            )  # type: ignore[misc]
        c = y, x, side, stride, padding
        yield (
            "by weights",
            name,
            number,
            floor(x, y),
            ways(lambda back=back: back(False), lambda c=c: convolve_weights(*c), device),
        )  # type: ignore[misc]
        columns = torch.rand(4, outputs, device=device)

        def answer(a: tuple[Tensor, Tensor, int, int] = a, columns: Tensor = columns) -> Tensor:
            x, w, stride, padding = a
            y = torch.conv2d(x, w, stride=stride, padding=padding)
            return batch_norm(
                y, columns[2], columns[3], columns[0], columns[1], False, 0.1, EPS
            ).relu_()

        d = *a, *columns.unbind(0), EPS, None, True
        yield (
            "evaluation",
            name,
            number,
            floor(x, y),
            ways(answer, lambda d=d: convolve_norm(*d), device),
        )  # type: ignore[misc]
    for channels, size, relu, adds, number in NORMS:
        x, s, g = (images(device, count, channels, size, size) for _ in range(3))
        w, b = torch.rand(2, channels, device=device)
        name = f"{channels}, {size}×{size}" + (", sum" if adds else "") + (", ReLU" if relu else "")
        out, mean, inverse, *rest = torch._batch_norm_impl_index(
            x, w, b, None, None, True, 0.1, EPS, True
        )
        out = out + s if adds else out
        out = out.relu() if relu else out

        def theirs(
            x: Tensor = x,
            s: Tensor = s,
            w: Tensor = w,
            b: Tensor = b,
            relu: bool = relu,
            adds: bool = adds,
        ) -> Tensor:
            y = torch._batch_norm_impl_index(x, w, b, None, None, True, 0.1, EPS, True)[0]
            y = y + s if adds else y
            return y.relu() if relu else y

        def theirs_back(
            x: Tensor = x,
            g: Tensor = g,
            w: Tensor = w,
            out: Tensor = out,
            relu: bool = relu,
            found: tuple[object, ...] = (mean, inverse, *rest),
        ) -> object:
            mean, inverse, reserve, index = found
            z = aten.threshold_backward(g, out, 0) if relu else g
            return torch.ops.aten._batch_norm_impl_index_backward(
                index, x, z, w, None, None, mean, inverse, True, EPS, [True] * 3, reserve
            )

        e = x, w, b, s if adds else None, None, None, 0.1, EPS, relu
        yield (
            "norm",
            name,
            number,
            floor(x, x, *([s] if adds else [])),
            ways(theirs, lambda e=e: norm(*e), device),
        )  # type: ignore[misc]
        f = g, None, x, w, b, mean, inverse, out if adds else None, relu, adds
        yield (
            "norm backward",
            name,
            number,
            floor(x, x, x),
            ways(theirs_back, lambda f=f: norm_backward(*f), device),
        )  # type: ignore[misc]


def gradient(count: int, device: torch.device, with_norms: bool, with_convolutions: bool) -> float:
    """µs of a whole gradient as a program."""
    module = (
        Network("resnet18-reduced", batch_norm="authors", initialisation="uniform")
        .build((32, 32, 3), 85)
        .to(device)
        .train()
    )
    architecture, buffers = (
        Architecture(module, lambda x: x, align=32, channels_last=True),
        dict(module.named_buffers()),
    )
    row = _Row(
        architecture,
        lambda outputs, slots, _: cross_entropy(outputs, slots),
        tuple(buffers),
        False,
        (),
    )
    theta, space = architecture.flatten(module), torch.zeros(architecture.width, device=device)
    arguments = [
        *architecture.views(theta),
        *buffers.values(),
        images(device, count, 3, 32, 32),
        torch.arange(count, device=device) % 85,
    ]
    fused = (
        patch.object(fusing, "NARROW", fusing.NARROW if with_convolutions else 0)
        if with_norms
        else patch.object(tracing, "fuse", lambda _: None)
    )
    with fused, products(device, tf32=True, tried=TRIED), torch.no_grad():
        made = tracing.trace(row, row.safe(arguments), architecture.views(space), on_gpu=True)
        return microseconds(lambda: made(*arguments, *architecture.views(space)), device)


def tuned(count: int, device: torch.device) -> Iterable[str]:
    """For every kind of kernel and some layers the fastest tiles."""
    yield f"{count} images"
    many = count > 100
    for channels, size in ((20, 32), (40, 16), (80, 8), (160, 4)):
        x, w = images(device, count, channels, size, size), images(device, channels, channels, 3, 3)
        y, v = (
            images(device, count, 2 * channels, size // 2, size // 2),
            images(device, 2 * channels, channels, 3, 3),
        )
        rows, inner = ((64, 128, 256), (32, 64)) if many else ((32, 64), (64, 128))
        widths = [
            width for width in (16, 32, 64, 128) if width < 2 * channels and (many or width < 64)
        ]
        tiles = list(product(rows, inner, widths, (4, 8) if many else (4,), (1, 3)))
        weight_tiles = list(
            product(
                (32, 64, 128) if many else (32, 64),
                (64, 128) if many else (64,),
                widths,
                (4, 8),
                (1, 2),
            )
        )
        few_tiles = [
            how
            for how in tiles
            if how[0] in (64, 128) and how[1] in (32, 64) and how[3:] in ((8, 1), (4, 3), (4, 1))
        ]
        kinds: dict[str, tuple[str, Callable[[], object], list[tuple[int, ...]]]] = {
            "convolution": ("tile", lambda x=x, w=w: convolve(x, w, 1, 1), tiles),  # type: ignore[misc]
            "by weights": (
                "weight_tile",
                lambda x=x: convolve_weights(x, x, 3, 1, 1),
                weight_tiles,
            ),  # type: ignore[misc]
        }
        if channels < 160:
            kinds["by inputs, stride 2"] = (
                "tile",
                lambda y=y, v=v, size=size: convolve_inputs(y, v, 2, 1, size, size),
                few_tiles,
            )  # type: ignore[misc]
        for kind, (name, call, shapes) in kinds.items():
            found = []
            used = getattr(convolution, name)(channels, count * size * size)
            for shape in shapes:
                how = convolution.Tile(*shape)
                with (
                    patch.object(convolution, name, lambda *_, how=how: how),
                    products(device, tf32=True),
                ):
                    try:
                        found.append((microseconds(call, device), how))
                    except Exception as reason:  # more shared memory than there is
                        yield f"{kind}, {channels}: {tuple(how)} fails: {first_line(reason)}"
            yield from best(
                f"{kind}, {channels} → {channels}, {size}×{size}",
                [(µs, tuple(how), how == used) for µs, how in found],
            )
    for channels, size, adds in (
        (20, 32, False),
        (20, 32, True),
        (40, 16, False),
        (80, 8, False),
        (160, 4, False),
    ):
        x, s, g = (images(device, count, channels, size, size) for _ in range(3))
        w, b, mean, inverse = torch.rand(4, channels, device=device)
        e = x, w, b, s if adds else None, None, None, 0.1, EPS, True
        f = g, None, x, w, b, mean, inverse, g if adds else None, True, adds
        timed = []
        for numbers, warps, most, wide in product(
            (2048, 4096, 8192), (4, 8), (264, 528), (16, 32, 64, 128)
        ):
            used = (numbers, warps, most, wide) == (norms.TILE, norms.WARPS, norms.MOST, norms.WIDE)
            if wide >= 4 * channels or (wide == 16 and channels > 40):
                continue
            with patch.multiple(norms, TILE=numbers, WARPS=warps, MOST=most, WIDE=wide):
                norms._Plan.cache_clear()
                µs = microseconds(lambda e=e: norm(*e), device) + microseconds(
                    lambda f=f: norm_backward(*f), device
                )  # type: ignore[misc]
                timed.append((µs, (numbers, warps, most, wide), used))
        norms._Plan.cache_clear()
        yield from best(
            f"norm and back, {channels}, {size}×{size}" + (", sum" if adds else ""), timed
        )


def best(name: str, found: list[tuple[float, tuple[int, ...], bool]]) -> Iterable[str]:
    for place, (µs, how, used) in enumerate(sorted(found)):
        if place < 5 or used:
            yield f"{name}: {how} {µs:.1f}{' (used)' if used else ''}"


def measured(count: int, device: torch.device) -> Iterable[str]:
    """The tables for so many images."""
    block, target = torch.rand(2, 2**28 if device.type == "cuda" else 2**22, device=device)
    speed = 2 * block.nbytes / microseconds(lambda: torch.neg(block, out=target), device) * 1e6
    yield from ("", f"### {count} images", "", f"A copy moves {speed / 1e12:.2f} TB/s.", "")
    yield from ("| | layer | × | bytes | torch | ours |", "|---|---|---|---|---|---|")
    totals: dict[str, list[float]] = {}
    for kind, name, number, least, times in rows(count, device, speed):
        yield (
            f"| {kind} | {name} | {number} | {least:.0f} | "
            + " | ".join(f"{µs:.1f}" for µs in times)
            + " |"
        )
        totals[kind] = [
            total + number * µs
            for total, µs in zip(totals.get(kind, [0.0] * 3), [least, *times], strict=True)
        ]
    yield from ("", "| all of a kind | bytes | torch | ours |", "|---|---|---|---|")
    for kind, sums in totals.items():
        yield f"| {kind} | " + " | ".join(f"{µs:.0f}" for µs in sums) + " |"
    plain, norms_, all_ = (
        gradient(count, device, *given) for given in ((False, False), (True, False), (True, True))
    )
    yield from (
        "",
        f"A whole gradient: {plain:.0f} µs by torch, {norms_:.0f} with our batch-norm, {all_:.0f} with our convolutions too.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", default="10,65,256,1040")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if not all(number.isdecimal() and int(number) for number in arguments.images.split(",")):
        parser.error("--images takes positive numbers with commas between, such as 10,256")
    if arguments.markdown and not arguments.markdown.parent.is_dir():
        parser.error(
            f"{arguments.markdown.parent} is no folder: make it, or choose another place for --markdown"
        )
    device = torch.device(arguments.device)
    if device.type == "cuda" and not (torch.cuda.is_available() and gpu.has_triton()):
        parser.error("this needs a GPU and Triton; --device cpu tries the program without them")
    lines = [
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, TF32, µs"
    ]
    print(lines[0], flush=True)
    for count in map(int, arguments.images.split(",")):
        for line in tuned(count, device) if arguments.tune else measured(count, device):
            lines.append(line)
            print(line, flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
