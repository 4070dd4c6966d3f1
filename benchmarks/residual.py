"""A step of the reduced ResNet-18 on a CPU: a loop by hand against the engine.

    python benchmarks/residual.py [--method a-gem] [--tasks 16] [--rounds 3] [--threads 1,2]
                                  [--markdown FILE]

Each runs in a process of its own. Both have the same network, batches of 10 images and, for A-GEM,
the whole memory of the past tasks (65 images each) as reference batch; the images are noise. The
loop by hand is the straightforward one: `nn.Module`, `torch.autograd.grad`, a projection, SGD, in a
process that is not tuned. Ours is a fleet of one run in a process as `onepass run` starts them.
Rounds alternate, and the ratio of the medians is what counts.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common import Lines, heading, machine, parser, row
from onepass.engine.batch import Batch
from onepass.engine.cpu import keep_freed_memory
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.learners import METHODS
from onepass.memory import FleetMemory
from onepass.models import Network
from onepass.streams.base import Pool, separate_heads

BATCH = 10
TASKS, CLASSES = 17, 5  # classes of a task
BUDGET = 65  # images kept of each task
RATE = 0.01
NETWORK = Network("resnet18-reduced", batch_norm="torch", initialisation="torch")
IMAGE = (32, 32, 3)


def images(count: int, task: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(task)
    x = torch.randint(0, 256, (count, 3072), dtype=torch.uint8, generator=generator)
    return x, CLASSES * task + torch.arange(count) % CLASSES


def by_hand(tasks: int) -> Callable[[], None]:
    """A step of a plain loop: SGD where there are no past tasks, A-GEM where there are."""
    torch.manual_seed(0)
    net = NETWORK.build(IMAGE, TASKS * CLASSES).train()
    parameters = list(net.parameters())

    def floats(x: Tensor) -> Tensor:
        return x.view(-1, *IMAGE).permute(0, 3, 1, 2).contiguous().float() / 255

    pixels, slots = images(BATCH, tasks)
    x = floats(pixels)
    past = [images(BUDGET, task) for task in range(tasks)]
    if past:
        reference = floats(torch.cat([pixels for pixels, _ in past]))
        labels = torch.cat([slots for _, slots in past])

    def gradient(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        rivals = (targets // CLASSES * CLASSES)[:, None] + torch.arange(CLASSES)
        loss = functional.cross_entropy(net(inputs).gather(1, rivals), targets % CLASSES)
        return list(torch.autograd.grad(loss, parameters))

    def step() -> None:
        if past:
            g_ref = torch.cat([part.flatten() for part in gradient(reference, labels)])
        g = gradient(x, slots)
        if past:
            flat = torch.cat([part.flatten() for part in g])
            product = flat @ g_ref
            if product < 0:
                flat = flat - product / (g_ref @ g_ref) * g_ref
            parts = torch.split(flat, [p.numel() for p in parameters])
            g = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        with torch.no_grad():
            for parameter, part in zip(parameters, g, strict=True):
                parameter.sub_(RATE * part)

    return step


def by_engine(method: str, tasks: int) -> Callable[[], None]:
    """A step of the engine, on one run."""
    keep_freed_memory()
    no_image = torch.zeros(1, 3072, dtype=torch.uint8)
    pool = Pool(no_image, torch.zeros(1, dtype=torch.int64), 1, 1 / 255, shape=IMAGE)
    slots = Slots(separate_heads(TASKS, CLASSES))

    def build() -> nn.Module:
        return NETWORK.build(IMAGE, slots.count)

    fleet = Fleet(build, [0], slots, [RATE], prepare=pool.prepare_images)
    kind = METHODS[method].learner
    memory = FleetMemory(fleet, TASKS, BUDGET) if kind.needs.memory else None
    sized = hasattr(kind.options(), "reference_batch")
    options = kind.options(**({"reference_batch": 1300} if sized else {}))
    learner = kind(fleet, {}, options, memory)
    if memory is not None:
        for task in range(tasks):
            learner.begin_task(task)
            x, y = images(BUDGET, task)
            memory.observe(Batch(x[None], y[None]))
            learner.end_task()
    learner.begin_task(tasks)
    x, y = images(BATCH, tasks)
    return lambda: fleet.learn(learner, Batch(x[None], y[None]))


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def serve(
    pipe: Connection, make: Callable[..., Callable[[], None]], given: tuple[Any, ...], threads: int
) -> None:
    """Take as many steps as the pipe says, each time; send seconds and page faults per step."""
    torch.set_num_threads(threads)
    step = make(*given)
    step()
    while (count := pipe.recv()) is not None:
        faults = page_faults()
        began = time.perf_counter()
        for _ in range(count):
            step()
        seconds = (time.perf_counter() - began) / count
        pipe.send((seconds, (page_faults() - faults) // count))


def measured(method: str, tasks: int, threads: int, rounds: int) -> str:
    context = multiprocessing.get_context("spawn")
    past = tasks if method == "a-gem" else 0
    sides = []
    for make, given in ((by_hand, (past,)), (by_engine, (method, past))):
        pipe, other_end = context.Pipe()
        work = other_end, make, given, threads
        process = context.Process(target=serve, args=work, daemon=True)
        process.start()
        sides.append((pipe, process))
    found: list[list[tuple[float, int]]] = [[], []]
    count = 1 if method == "a-gem" and tasks > 4 else 20
    for _ in range(rounds):
        for (pipe, _), times in zip(sides, found, strict=True):
            pipe.send(count)
            times.append(pipe.recv())
    for pipe, process in sides:
        pipe.send(None)
        process.join()
    medians = [[statistics.median(column) for column in zip(*side, strict=True)] for side in found]
    (hand, hand_faults), (own, own_faults) = medians
    times_per_step = f"{1e3 * hand:.0f}", f"{1e3 * own:.0f}", f"{hand / own:.2f}"
    return row(method, threads, *times_per_step, f"{hand_faults:.0f}", f"{own_faults:.0f}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--method", default="van,a-gem")
    arguments.add_argument("--tasks", type=int, default=16, help="past tasks, for A-GEM")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", default="1,2")
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    reference = f"A-GEM with {given.tasks * BUDGET} reference images"
    times = "ms per step by hand", "ours", "by hand / ours"
    lines = Lines()
    lines.add(f"{machine('cpu')}; {reference}; medians of {given.rounds} rounds", "")
    lines.add(*heading("method", "threads", *times, "page faults per step by hand", "ours"))
    for method in given.method.split(","):
        if method not in ("van", "a-gem"):
            arguments.error(f"there is no loop by hand of {method}: take van, a-gem or both")
        for threads in given.threads.split(","):
            lines.add(measured(method, given.tasks, int(threads), given.rounds))
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
