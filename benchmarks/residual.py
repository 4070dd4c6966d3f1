"""A step of the reduced ResNet-18 on a CPU: a loop by hand against the engine, in turn, each in a process of its own.

    python benchmarks/residual.py [--method a-gem] [--tasks 16] [--rounds 3] [--threads 1,2] [--markdown FILE]

Both have the same network, batches of 10 images and, for A-GEM, the whole memory of the past tasks (65 images each) as reference; the images
are noise. The loop by hand is what anybody would write: `nn.Module`, `torch.autograd.grad`, a projection, SGD, in a process that nobody has
tuned. Ours is a fleet of one run in a process as `onepass run` has them. Rounds alternate, and the ratio of the medians is what counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onepass.engine.batch import Batch
from onepass.engine.cpu import keep_freed_memory
from onepass.engine.fleet import Fleet
from onepass.engine.slots import Slots
from onepass.learners import METHODS
from onepass.memory import FleetMemory
from onepass.models import Network
from onepass.streams.base import Pool, separate_heads

BATCH, TASKS, CLASSES, BUDGET, RATE = 10, 17, 5, 65, 0.01
NETWORK = Network("resnet18-reduced", batch_norm="torch", initialisation="torch")
IMAGE = (32, 32, 3)


def images(count: int, task: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(task)
    x = torch.randint(0, 256, (count, 3072), dtype=torch.uint8, generator=generator)
    return x, CLASSES * task + torch.arange(count) % CLASSES


def by_hand(tasks: int) -> Callable[[], None]:
    torch.manual_seed(0)
    net = NETWORK.build(IMAGE, TASKS * CLASSES).train()
    parameters = list(net.parameters())
    bytes_, slots = images(BATCH, tasks)
    past = [images(BUDGET, task) for task in range(tasks)]

    def floats(x: Tensor) -> Tensor:
        return x.view(-1, *IMAGE).permute(0, 3, 1, 2).contiguous().float() / 255

    x, reference, labels = (
        floats(bytes_),
        floats(torch.cat([x for x, _ in past])) if past else None,
        torch.cat([slots, *(y for _, y in past)])[BATCH:],
    )

    def gradient(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        rivals = (targets // CLASSES * CLASSES)[:, None] + torch.arange(CLASSES)
        loss = functional.cross_entropy(net(inputs).gather(1, rivals), targets % CLASSES)
        return list(torch.autograd.grad(loss, parameters))

    def step() -> None:
        if reference is None:
            g = gradient(x, slots)
        else:
            g_ref = torch.cat([part.flatten() for part in gradient(reference, labels)])
            g = gradient(x, slots)
            row = torch.cat([part.flatten() for part in g])
            product = row @ g_ref
            if product < 0:
                row = row - product / (g_ref @ g_ref) * g_ref
            g = [
                part.view_as(p)
                for part, p in zip(
                    row.split([p.numel() for p in parameters]), parameters, strict=True
                )
            ]
        with torch.no_grad():
            for parameter, part in zip(parameters, g, strict=True):
                parameter -= RATE * part

    return step


def by_engine(method: str, tasks: int) -> Callable[[], None]:
    keep_freed_memory()
    pool = Pool(
        torch.zeros(1, 3072, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int64),
        1,
        1 / 255,
        shape=IMAGE,
    )
    slots = Slots(separate_heads(TASKS, CLASSES))
    fleet = Fleet(
        lambda: NETWORK.build(IMAGE, slots.count), [0], slots, [RATE], prepare=pool.prepare_images
    )
    found = METHODS[method].learner
    memory = FleetMemory(fleet, TASKS, BUDGET) if found.needs.memory else None
    options = (
        found.options(reference_batch=1300)
        if hasattr(found.options(), "reference_batch")
        else found.options()
    )  # type: ignore[call-arg]
    learner = found(fleet, {}, options, memory)
    for task in range(tasks if memory is not None else 0):
        learner.begin_task(task)
        x, y = images(BUDGET, task)
        memory.observe(Batch(x[None], y[None]))  # type: ignore[union-attr]
        learner.end_task()
    learner.begin_task(tasks)
    x, y = images(BATCH, tasks)
    return lambda: fleet.learn(learner, Batch(x[None], y[None]))


def serve(
    pipe: Connection,
    make: Callable[..., Callable[[], None]],
    arguments: tuple[Any, ...],
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    step = make(*arguments)
    step()
    while (count := pipe.recv()) is not None:
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        for _ in range(count):
            step()
        seconds = (time.perf_counter() - began) / count
        pipe.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // count))


def measured(method: str, tasks: int, threads: int, rounds: int) -> str:
    context, sides = multiprocessing.get_context("spawn"), {}
    made: dict[str, tuple[Callable[..., Callable[[], None]], tuple[Any, ...]]] = {
        "by hand": (by_hand, (tasks if method == "a-gem" else 0,)),
        "ours": (by_engine, (method, tasks if method == "a-gem" else 0)),
    }
    for name, (make, arguments) in made.items():
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, make, arguments, threads), daemon=True
        )
        process.start()
        sides[name] = (ours, process)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
    count = 1 if method == "a-gem" and tasks > 4 else 20
    for _ in range(rounds):
        for name, (pipe, _) in sides.items():
            pipe.send(count)
            found[name].append(pipe.recv())
    for pipe, process in sides.values():
        pipe.send(None)
        process.join()
    (hand, hand_faults), (own, own_faults) = (
        tuple(statistics.median(column) for column in zip(*found[name], strict=True))
        for name in sides
    )
    return f"| {method} | {threads} | {1e3 * hand:.0f} | {1e3 * own:.0f} | {hand / own:.2f} | {hand_faults:.0f} | {own_faults:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="van,a-gem")
    parser.add_argument("--tasks", type=int, default=16, help="past tasks, for A-GEM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    lines = [
        f"CPU, torch {torch.__version__}; A-GEM with {arguments.tasks * BUDGET} reference images; medians of {arguments.rounds} rounds",
        "",
        "| method | threads | ms a step by hand | ours | by hand / ours | page faults a step by hand | ours |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for method in arguments.method.split(","):
        if method not in ("van", "a-gem"):
            parser.error(f"there is no loop by hand of {method}: take van, a-gem or both")
        for threads in arguments.threads.split(","):
            lines.append(measured(method, arguments.tasks, int(threads), arguments.rounds))
            print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
