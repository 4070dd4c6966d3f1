"""What A-GEM costs in a module of one's own: a step of `OnePass` against a plain step and a plain step on the reference batch.

    python benchmarks/wrapper.py [--device cuda] [--rounds 30] [--markdown FILE]

For a small fully connected net (784-256-256-10), a ResNet-18 (11 million parameters, 32×32 images) and a transformer encoder (4 layers,
width 128, 32 tokens): batch 10 and the reference batch in the table, out of a memory twice as large. The plain steps are those of a plain
loop with `torch.optim.SGD`; both are measured in turns in one run, and the ratio is the median of the rounds' ratios. The last columns are
bytes: the peak of a step of `OnePass` minus the peak of a plain step, beside the paper's formula for that difference, `P + M·H`, with `P` the
parameters, `M` the reference batch and `H` what a forward pass keeps an example (measured, the example itself included).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from onepass import Memory, OnePass
from onepass.models.mlp import mlp
from onepass.models.resnet import ResNet

BATCH, CLASSES = 10, 10
Step = Callable[[], None]


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


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # how to build it, and reference batches on a CPU and on a GPU
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
        x = torch.randn(count, *((3, 32, 32) if name == "ResNet-18" else (784,)), generator=generator)
    return x.to(device), y.to(device)


def plain_step(module: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def agem_step(module: nn.Module, x: Tensor, y: Tensor, past: tuple[Tensor, Tensor], reference: int) -> Step:
    """A step with a memory of two past tasks, each as large as the reference batch."""
    learner = OnePass(module, "a-gem", learning_rate=0.001, memory=Memory(per_task=reference), reference_batch=reference)
    for task in range(2):
        for start in range(task * reference, (task + 1) * reference, BATCH):
            rows = slice(start, min(start + BATCH, (task + 1) * reference))
            if rows.stop - rows.start > 1:  # batch-norm cannot take one
                learner.observe(past[0][rows], past[1][rows])
        learner.end_task()

    def step() -> None:
        learner.observe(x, y)

    return step


def seconds(step: Step, count: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def peak(step: Step, device: str) -> int:
    """Bytes at the worst moment of a step, beyond what there was before any module was built."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    now = most = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def kept(module: nn.Module, x: Tensor, y: Tensor, device: str) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters and the examples themselves aside."""
    sizes: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in [*module.parameters(), x]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(module(x), y)
    del loss
    return sum(sizes.values())


def measure(name: str, device: str, rounds: int) -> list[str]:
    build, on_cpu, on_gpu = MODELS[name]
    reference = on_gpu if device == "cuda" else on_cpu
    x, y = examples(name, BATCH, device)
    past = examples(name, 2 * reference, device)
    twin, module = build().to(device), build().to(device)
    steps = [
        plain_step(twin, x, y),
        plain_step(twin, past[0][:reference], past[1][:reference]),
        agem_step(module, x, y, past, reference),
    ]
    for step in steps:
        seconds(step, 5, device)
    count = max(1, round(0.05 / seconds(steps[2], 3, device)))
    times = [[seconds(step, count, device) for step in steps] for _ in range(rounds)]
    ratio = statistics.median(agem / (plain + again) for plain, again, agem in times)
    plain, again, agem = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    del steps, twin, module
    extra, formula = memory(name, device, reference, x, y, past)
    cells = [
        f"{plain:.2f}",
        f"{again:.2f}",
        f"{agem:.2f}",
        f"{ratio:.2f}",
        f"{extra / 2**20:.1f}",
        f"{formula / 2**20:.1f}",
        f"{extra / formula:.2f}",
    ]
    return [name, str(reference), *cells]


def memory(name: str, device: str, reference: int, x: Tensor, y: Tensor, past: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Extra bytes of an A-GEM step over a plain step, and the paper's formula for them."""
    build = MODELS[name][0]
    module = build().to(device)
    parameters = sum(p.nbytes for p in module.parameters())
    batch = past[0][:reference], past[1][:reference]
    formula = parameters + kept(module, *batch, device) + batch[0].nbytes

    def persistent() -> int:
        return torch.cuda.memory_allocated() if device == "cuda" else 0

    plain = plain_step(module, x, y)
    plain()
    module.zero_grad()  # as a plain loop does before its next step
    base = persistent()
    worst_plain = peak(plain, device) - base
    learner_module = build().to(device)
    agem = agem_step(learner_module, x, y, past, reference)
    for _ in range(3):
        agem()
    before = persistent()
    worst = peak(agem, device) - before
    # What stays between steps: the gradient and the reference gradient. Examples are the memory's, counted in its own budget.
    rows = 2 * parameters
    return rows + worst - worst_plain, formula


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--markdown", type=Path)
    chosen = parser.parse_args()
    head = [
        "module",
        "reference batch",
        "plain ms",
        "plain on the reference ms",
        "A-GEM ms",
        "A-GEM / both",
        "extra MiB",
        "formula MiB",
        "extra / formula",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in MODELS:
        lines.append("| " + " | ".join(measure(name, chosen.device, chosen.rounds)) + " |")
        print(lines[-1], flush=True)
    if chosen.markdown is not None:
        chosen.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
