"""What A-GEM costs in a module of one's own: a step of `OnePass` against two plain steps.

    python benchmarks/wrapper.py [--device cuda] [--rounds 30] [--markdown FILE]

One plain step is on the batch, the other on the reference batch. Measured for a small fully
connected net (784-256-256-10), a ResNet-18 (11 million parameters, 32×32 images) and a transformer
encoder (4 layers, width 128, 32 tokens): batch 10 and the reference batch in the table, which both
sides draw at random from a memory twice as large. The plain steps are those of a plain loop with
`torch.optim.SGD`. All are measured in turns in one process, and the ratio is the median of the
rounds' ratios. The last columns are megabytes: the peak of a step of `OnePass` minus the peak of a
plain step, beside the paper's formula for that difference, `P + M·H`. `P` are the parameters, `M`
is the reference batch, and `H` is what one more example in a large batch costs a plain step
(measured between `2 M` and `3 M`, where activations and not the gradients of parameters make the
peak), plus the example itself.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from common import Lines, heading, now, parser, row
from onepass import Memory, OnePass
from onepass.models.mlp import mlp
from onepass.models.resnet import ResNet

BATCH, CLASSES = 10, 10
Step = Callable[[], object]


class Encoder(nn.Module):
    """A transformer encoder over tokens, averaged, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(x)).mean(1))
        return out


# How to build it, and reference batches on a CPU and on a GPU.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "784-256-256-10": (lambda: mlp(784, [256, 256], CLASSES), 256, 256),
    "ResNet-18": (lambda: ResNet(64, CLASSES), 32, 256),
    "transformer encoder": (Encoder, 64, 256),
}


def examples(name: str, count: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    if name == "transformer encoder":
        x = torch.randint(0, 1000, (count, 32), generator=generator)
    else:
        shape = (3, 32, 32) if name == "ResNet-18" else (784,)
        x = torch.randn(count, *shape, generator=generator)
    return x.to(device), y.to(device)


def plain_step(module: nn.Module, x: Tensor, y: Tensor, draw: int | None = None) -> Step:
    """A step on a batch, or on one of `draw` examples at random."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)

    def step() -> None:
        batch, labels = x, y
        if draw is not None:
            chosen = torch.randperm(len(x), device=x.device)[:draw]
            batch, labels = x[chosen], y[chosen]
        optimizer.zero_grad()
        cross_entropy(module(batch), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def agem(module: nn.Module, past: tuple[Tensor, Tensor], reference: int) -> OnePass:
    """A learner with a memory of two past tasks, each as large as the reference batch."""
    memory = Memory(per_task=reference)
    learner = OnePass(
        module, "a-gem", learning_rate=0.001, memory=memory, reference_batch=reference
    )
    for task in range(2):
        for start in range(task * reference, (task + 1) * reference, BATCH):
            rows = slice(start, min(start + BATCH, (task + 1) * reference))
            if rows.stop - rows.start > 1:  # batch-norm cannot take one
                learner.observe(past[0][rows], past[1][rows])
        learner.end_task()
    return learner


def seconds(step: Step, count: int, device: str) -> float:
    began = now(device)
    for _ in range(count):
        step()
    return (now(device) - began) / count


def measure(name: str, device: str, rounds: int) -> str:
    build, on_cpu, on_gpu = MODELS[name]
    reference = on_gpu if device == "cuda" else on_cpu
    x, y = examples(name, BATCH, device)
    past = examples(name, 2 * reference, device)
    twin = build().to(device)
    learner = agem(build().to(device), past, reference)
    steps = [
        plain_step(twin, x, y),
        plain_step(twin, *past, draw=reference),
        lambda: learner.observe(x, y),
    ]
    for step in steps:
        seconds(step, 5, device)
    count = max(1, round(0.25 / seconds(steps[2], 3, device)))
    times = [[seconds(step, count, device) for step in steps] for _ in range(rounds)]
    ratio = statistics.median(ours / (plain + again) for plain, again, ours in times)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    extra, formula = extra_memory(build, device, reference, (x, y), past)
    speed = *(f"{1000 * median:.2f}" for median in medians), f"{ratio:.2f}"
    mebibytes = f"{extra / 2**20:.1f}", f"{formula / 2**20:.1f}"
    return row(name, reference, *speed, *mebibytes, f"{extra / formula:.2f}")


def extra_memory(
    build: Callable[[], nn.Module],
    device: str,
    reference: int,
    batch: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor],
) -> tuple[int, int]:
    """Extra bytes of an A-GEM step over a plain step, and the paper's formula for them.

    The examples in the memory do not count.
    """
    module = build().to(device)
    parameters = sum(p.nbytes for p in module.parameters())
    x, y = past
    many = x.repeat(2, *[1] * (x.dim() - 1)), y.repeat(2)
    peaks = []
    for n in (2, 3):
        step = plain_step(module, many[0][: n * reference], many[1][: n * reference])
        peaks.append(peak(step, module, device))
    hidden = peaks[1] - peaks[0]  # M·H: what a plain step needs for `reference` more examples
    del many, step
    plain = peak(plain_step(module, *batch), module, device)
    learner = agem(module, past, reference)
    agem_peak = peak(lambda: learner.observe(*batch), module, device)
    if device == "cpu":
        # The profiler sees what a step allocates, not the gradients that stay between steps.
        agem_peak += sum(views.whole.nbytes for views in learner.fleet.gradients._workspaces)
    else:
        assert learner.memory is not None
        assert learner.memory.storage is not None
        agem_peak -= learner.memory.storage.nbytes
    return agem_peak - plain, parameters + hidden + x[:reference].nbytes


def peak(step: Step, module: nn.Module, device: str) -> int:
    """Bytes at the worst moment of a step: all of a GPU, those of the step itself on a CPU."""
    step()
    module.zero_grad()
    gc.collect()  # what was traced leaves cycles behind
    most: int
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        # Requested bytes: what the allocator rounds up depends on what was there before.
        most = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
        held = most = 0
        for event in found.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
    module.zero_grad()
    return most


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    times = "plain ms", "plain on the reference ms", "A-GEM ms", "A-GEM / both"
    space = "extra MiB", "formula MiB", "extra / formula"
    lines = Lines()
    lines.add(*heading("module", "reference batch", *times, *space))
    for name in MODELS:
        lines.add(measure(name, given.device, given.rounds))
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
