"""Where a gradient of the reduced ResNet-18 spends its time on a GPU, by torch and by us.

    python benchmarks/kernels.py [--images 10,65,256,1040] [--tune] [--device cuda]
                                 [--markdown FILE]

For every kind of layer, µs of one call inside a CUDA graph: convolutions forward, by the inputs and
by the weights, by the fastest of the ten ways that cuDNN proposes and by the kernels in
`engine/gpu`; batch-norm with the sum and the ReLU behind it, forward and backward, the same way; an
evaluation's convolution with all of that. `bytes` is what reading inputs and writing results would
take at the speed of a copy. At the end how much each kind of layer takes in all, and the whole
gradient as a program. With `--tune`, our kernels alone with other tiles, the fastest first, and the
one that is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

from common import Lines, heading, machine, parser, row
from kernel_layers import images, layers, microseconds
from kernel_tiles import tuned
from onepass.engine import gpu, tracing
from onepass.engine.architecture import Architecture
from onepass.engine.gpu import fusing
from onepass.engine.gradients import _Row
from onepass.engine.precision import products
from onepass.models import Network
from onepass.protocol import TRIED


def gradient(count: int, device: torch.device, with_norms: bool, with_convolutions: bool) -> float:
    """µs of a whole gradient as a program."""
    network = Network("resnet18-reduced", batch_norm="authors", initialisation="uniform")
    module = network.build((32, 32, 3), 85).to(device).train()
    architecture = Architecture(module, lambda x: x, align=32, channels_last=True)
    buffers = dict(module.named_buffers())

    def loss(outputs: torch.Tensor, slots: torch.Tensor, _: object) -> torch.Tensor:
        return cross_entropy(outputs, slots)

    one = _Row(architecture, loss, tuple(buffers), False, ())
    theta = architecture.flatten(module)
    space = torch.zeros(architecture.width, device=device)
    x = images(device, count, 3, 32, 32)
    y = torch.arange(count, device=device) % 85
    arguments = [*architecture.views(theta), *buffers.values(), x, y]
    fused: AbstractContextManager[Any] = patch.object(tracing, "fuse", lambda _: None)
    if with_norms:
        narrow = fusing.NARROW if with_convolutions else 0
        fused = patch.object(fusing, "NARROW", narrow)
    with fused, products(device, tf32=True, tried=TRIED), torch.no_grad():
        made = tracing.trace(one, one.safe(arguments), architecture.views(space), on_gpu=True)
        return microseconds(lambda: made(*arguments, *architecture.views(space)), device)


def measured(count: int, device: torch.device) -> Iterator[str]:
    """The tables for a number of images."""
    block, target = torch.rand(2, 2**28 if device.type == "cuda" else 2**22, device=device)
    speed = 2 * block.nbytes / microseconds(lambda: torch.neg(block, out=target), device) * 1e6
    yield from ("", f"### {count} images", "", f"A copy moves {speed / 1e12:.2f} TB/s.", "")
    yield from heading("", "layer", "×", "bytes", "torch", "ours")
    totals: dict[str, list[float]] = {}
    for timed in layers(count, device):
        least = timed.nbytes / speed * 1e6
        times = f"{timed.theirs:.1f}", f"{timed.ours:.1f}"
        yield row(timed.kind, timed.name, timed.number, f"{least:.0f}", *times)
        total = totals.setdefault(timed.kind, [0.0] * 3)
        for place, µs in enumerate((least, timed.theirs, timed.ours)):
            total[place] += timed.number * µs
    yield ""
    yield from heading("all of a kind", "bytes", "torch", "ours")
    for kind, sums in totals.items():
        yield row(kind, *(f"{µs:.0f}" for µs in sums))
    plain = gradient(count, device, with_norms=False, with_convolutions=False)
    with_norms = gradient(count, device, with_norms=True, with_convolutions=False)
    with_both = gradient(count, device, with_norms=True, with_convolutions=True)
    by_us = f"{with_norms:.0f} with our batch-norm, {with_both:.0f} with our convolutions too"
    yield from ("", f"A whole gradient: {plain:.0f} µs by torch, {by_us}.")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--images", default="10,65,256,1040")
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--tune", action="store_true")
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    if not all(number.isdecimal() and int(number) for number in given.images.split(",")):
        arguments.error("--images takes positive numbers with commas between, such as 10,256")
    if given.markdown and not given.markdown.parent.is_dir():
        place = "make it, or choose another place for --markdown"
        arguments.error(f"{given.markdown.parent} is no folder: {place}")
    device = torch.device(given.device)
    if device.type == "cuda" and not (torch.cuda.is_available() and gpu.has_triton()):
        arguments.error("this needs a GPU and Triton; --device cpu tries the program without them")
    lines = Lines()
    lines.add(f"{machine(given.device)}, TF32, µs")
    for count in map(int, given.images.split(",")):
        for line in tuned(count, device) if given.tune else measured(count, device):
            lines.add(line)
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
