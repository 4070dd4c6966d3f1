"""Where GEM's time goes: a step of five runs on Permuted-MNIST shapes after 1, 4, 8 and 16 past tasks, and the parts of its quadratic program.

python benchmarks/gem.py [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.learners.gem import Gem, Options, closest, nonnegative
from onepass.memory import FleetMemory
from onepass.models.mlp import mlp
from onepass.streams.base import shared_heads

RUNS, TASKS, MEMORY = 5, 17, 250


def milliseconds(work: Callable[[], object], device: str, times: int) -> float:
    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    start = now()
    for _ in range(times):
        work()
    return (now() - start) / times * 1e3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cpu")
    device = arguments.parse_args().device
    torch.set_num_threads(1)
    times = 20 if device == "cuda" else 5
    fleet = Fleet(
        lambda: mlp(784, [256, 256], 10),
        range(RUNS),
        Slots(shared_heads(TASKS, 10)),
        [1e-3] * RUNS,
        device=device,
    )
    memory = FleetMemory(fleet, TASKS, MEMORY)
    learner = Gem(fleet, {"margin": torch.zeros(RUNS, 1)}, Options(), memory)

    def batch(size: int) -> Batch:
        return Batch(
            torch.rand(RUNS, size, 784, device=device),
            torch.randint(0, 10, (RUNS, size), device=device),
        )

    heads = [
        "past tasks",
        "step of 5 runs, ms",
        "QP of one run, ms",
        "its non-negative least squares, ms",
        "a QR of its gradients, ms",
    ]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for task in range(TASKS):
        learner.begin_task(task)
        if task in (1, 4, 8, 16):
            some = batch(10)
            step = milliseconds(lambda some=some: fleet.learn(learner, some), device, times)
            g, constraints = (
                torch.randn(fleet.theta.shape[1], device=device),
                torch.randn(task, fleet.theta.shape[1], device=device),
            )
            columns: Tensor = torch.cat([constraints, g[None]]).double()
            program = milliseconds(lambda g=g, c=constraints: closest(g, c), device, times)
            qr = milliseconds(
                lambda columns=columns: torch.linalg.qr(columns.T, mode="r"), device, times
            )
            triangle = torch.linalg.qr(columns.T, mode="r").R.cpu().numpy()
            small = milliseconds(lambda t=triangle: nonnegative(t[:, :-1], -t[:, -1]), "cpu", 200)
            print(f"| {task} | {step:.1f} | {program:.2f} | {small:.3f} | {qr:.2f} |", flush=True)
        memory.observe(batch(2000))
        learner.end_task()


if __name__ == "__main__":
    main()
