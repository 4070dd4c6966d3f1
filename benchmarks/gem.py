"""Where GEM's time goes: a step of five runs on Permuted-MNIST shapes, and its quadratic program.

    python benchmarks/gem.py [--device cuda]

Measured after 1, 4, 8 and 16 past tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common import heading, now, parser, row
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.learners.gem import Gem, Options, closest, nonnegative
from onepass.memory import FleetMemory
from onepass.models.mlp import mlp
from onepass.streams.base import shared_heads

RUNS, TASKS, MEMORY = 5, 17, 250


def milliseconds(work: Callable[[], object], device: str, times: int) -> float:
    work()
    start = now(device)
    for _ in range(times):
        work()
    return (now(device) - start) / times * 1e3


def measured(learner: Gem, batch: Batch, task: int, device: str) -> str:
    """Milliseconds of a step, of one run's quadratic program and of its parts."""
    fleet = learner.fleet
    times = 20 if device == "cuda" else 5
    step = milliseconds(lambda: fleet.learn(learner, batch), device, times)
    size = fleet.theta.shape[1]
    g = torch.randn(size, device=device)
    constraints = torch.randn(task, size, device=device)
    columns = torch.cat([constraints, g[None]]).double()
    program = milliseconds(lambda: closest(g, constraints), device, times)
    qr = milliseconds(lambda: torch.linalg.qr(columns.T, mode="r"), device, times)
    triangle = torch.linalg.qr(columns.T, mode="r").R.cpu().numpy()
    small = milliseconds(lambda: nonnegative(triangle[:, :-1], -triangle[:, -1]), "cpu", 200)
    return row(task, f"{step:.1f}", f"{program:.2f}", f"{small:.3f}", f"{qr:.2f}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cpu")
    device = arguments.parse_args().device
    torch.set_num_threads(1)
    slots = Slots(shared_heads(TASKS, 10))
    rates = [1e-3] * RUNS
    fleet = Fleet(lambda: mlp(784, [256, 256], 10), range(RUNS), slots, rates, device=device)
    memory = FleetMemory(fleet, TASKS, MEMORY)
    learner = Gem(fleet, {"margin": torch.zeros(RUNS, 1)}, Options(), memory)

    def batch(size: int) -> Batch:
        x = torch.rand(RUNS, size, 784, device=device)
        return Batch(x, torch.randint(0, 10, (RUNS, size), device=device))

    parts = "its non-negative least squares, ms", "a QR of its gradients, ms"
    print("\n".join(heading("past tasks", "step of 5 runs, ms", "QP of one run, ms", *parts)))
    for task in range(TASKS):
        learner.begin_task(task)
        if task in (1, 4, 8, 16):
            print(measured(learner, batch(10), task, device), flush=True)
        memory.observe(batch(2000))
        learner.end_task()


if __name__ == "__main__":
    main()
