"""Microseconds a run-step on Permuted MNIST shapes: a plain hand-written PyTorch loop against a fleet, looped and stacked.

    python benchmarks/run_step.py [--device cuda] [--rounds 5] [--markdown FILE]

784-256-256-10, batch 10, reference batch 256 out of a memory of 2 000. Everything is measured in one run, in turns; printed are medians
over the rounds, and the last column is the median of the rounds' ratios, since machines have slow and fast minutes. The plain loop gets
all cores or one, whichever is faster. `onepass` is what `onepass run` does by default: on a CPU one single-threaded process a core with
the runs dealt out (a single run gets all cores), on a GPU one process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from onepass.engine.cpu import keep_freed_memory
from onepass.engine.gradients import Mode
from onepass.learners import METHODS
from onepass.models.mlp import mlp
from onepass.protocol import Run, Setup, assemble
from onepass.streams.base import PermutedStream, Pool
from onepass.streams.batch import Batch

METHOD_NAMES = ["van", "ewc", "a-gem"]
RUNS = [1, 5, 8, 40]
RATE, STRENGTH, BATCH, REFERENCE, MEMORY_TASKS = 0.01, 10.0, 10, 256, 8
IMAGES = 20_000


def pool() -> Pool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (IMAGES + 100, 784), dtype=torch.uint8, generator=generator)
    return Pool(x, torch.randint(0, 10, (IMAGES + 100,), generator=generator), IMAGES, 1 / 255)


def plain_loop(method: str, device: str) -> Callable[[int], None]:
    """The same method as one would write it by hand for one run: steps of `method` on a plain module."""
    data = pool()
    x, y = data.prepare(data.x).to(device), data.classes.to(device)
    net = mlp(784, [256, 256], 10).to(device)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    memory_x, memory_y = x[: 250 * MEMORY_TASKS].clone(), y[: 250 * MEMORY_TASKS].clone()
    squares = [torch.zeros_like(p) for p in parameters]
    fisher = [torch.rand_like(p) for p in parameters]
    importance = [torch.rand_like(p) for p in parameters]
    anchor = [p.detach().clone() for p in parameters]
    order, permutation = torch.randperm(IMAGES, device=device), torch.randperm(784, device=device)
    position = 0

    def flat() -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]

    def steps(count: int) -> None:
        nonlocal position
        for _ in range(count):
            start = position * BATCH % IMAGES
            position += 1
            chosen = order[start : start + BATCH]
            xb, yb = x[chosen][:, permutation], y[chosen]
            if method == "a-gem":
                chosen = torch.randperm(len(memory_x), device=device)[:REFERENCE]
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(memory_x[chosen]), memory_y[chosen]).backward()
                reference = flat()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(xb), yb)
            loss.backward()
            if method == "a-gem":
                g = flat()
                dot = torch.dot(g, reference)
                if dot < 0:
                    g -= dot / torch.dot(reference, reference) * reference
                    offset = 0
                    for p in parameters:
                        p.grad.copy_(g[offset : offset + p.numel()].view_as(p))  # type: ignore[union-attr]
                        offset += p.numel()
            if method == "ewc":
                for s, p, f, w, a in zip(squares, parameters, fisher, importance, anchor, strict=True):
                    s.add_(p.grad.square())  # type: ignore[union-attr]
                    if position % 10 == 0:
                        f.mul_(0.1).add_(s, alpha=0.09)
                        s.zero_()
                    p.grad.add_(2 * STRENGTH * w * (p.detach() - a))  # type: ignore[union-attr]
            optimizer.step()

    return steps


def fleet_loop(method: str, runs: int, mode: Mode, device: str) -> Callable[[int], None]:
    """Steps of a fleet of `runs` runs, in the middle of a stream."""
    stream = PermutedStream(pool(), None, None)
    hyperparameters = {"learning_rate": RATE, "strength": STRENGTH}
    rows = [Run(seed, hyperparameters) for seed in range(runs)]
    feed, fleet, learner = assemble(stream, "ev", METHODS[method], rows, Setup(gradients=mode), device=device)
    if learner.memory is not None:
        for task in range(MEMORY_TASKS):
            learner.begin_task(task)
            examples = next(feed.batches(task))
            many = Batch(examples.x.repeat(1, 100, 1), examples.slots.repeat(1, 100))
            learner.memory.observe(Batch(many.x, torch.arange(10, device=device).repeat(runs, 100)))
            learner.end_task()
    else:
        learner.begin_task(0)
        fleet.learn(learner, next(feed.batches(0)))
        learner.end_task()
    learner.begin_task(MEMORY_TASKS)
    batches = feed.batches(MEMORY_TASKS)

    def steps(count: int) -> None:
        nonlocal batches
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:
                batches = feed.batches(MEMORY_TASKS)
                batch = next(batches)
            fleet.learn(learner, batch)

    return steps


def serve(pipe: Connection, threads: int, device: str, tuned: bool) -> None:
    """A worker process: builds loops when asked to, and times their steps."""
    torch.set_num_threads(threads)
    if tuned:
        keep_freed_memory()
    loops: dict[Any, Callable[[int], None]] = {}
    while True:
        try:
            key, count = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if key not in loops:
            if len(loops) > 24:
                loops.clear()
            kind, *arguments = key
            loops[key] = plain_loop(*arguments, device) if kind == "plain" else fleet_loop(*arguments, device)
            loops[key](3)
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        loops[key](count)
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send(time.perf_counter() - began)


class Workers:
    """Processes as `onepass run` has them (one a core with one thread; one with all threads for a single run), and untouched ones for the
    plain loop, with one thread and with all."""

    def __init__(self, device: str) -> None:
        cores = len(os.sched_getaffinity(0))
        context = multiprocessing.get_context("spawn")
        count = 1 if device == "cuda" else cores
        self.single = [self._start(context, 1, device, True) for _ in range(count)]
        self.whole = self._start(context, cores, device, True)
        self.plain = [self._start(context, threads, device, False) for threads in {1, cores}]

    @staticmethod
    def _start(context: Any, threads: int, device: str, tuned: bool) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, threads, device, tuned), daemon=True).start()
        return ours  # type: ignore[no-any-return]

    def time(self, pipes: list[Connection], keys: list[Any], count: int) -> float:
        """Seconds until all are done."""
        for pipe, key in zip(pipes, keys, strict=True):
            pipe.send((key, 0))
        for pipe, _ in zip(pipes, keys, strict=True):
            pipe.recv()
        for pipe, key in zip(pipes, keys, strict=True):
            pipe.send((key, count))
        return max(pipe.recv() for pipe, _ in zip(pipes, keys, strict=True))


def measure(workers: Workers, method: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a run-step of every way, a value a round."""
    ways: dict[str, tuple[list[Connection], list[Any], int]] = {
        f"plain {i}": ([worker], [("plain", method)], 1) for i, worker in enumerate(workers.plain)
    }
    for runs in RUNS:
        for mode in ("looped", "stacked"):
            ways[f"{mode} {runs}"] = ([workers.single[0]], [("fleet", method, runs, mode)], runs)
        if runs == 1:
            ways["onepass 1"] = ([workers.whole], [("fleet", method, 1, "auto")], 1)
            continue
        shares = [n for n in (len(range(i, runs, len(workers.single))) for i in range(len(workers.single))) if n]
        ways[f"onepass {runs}"] = (workers.single[: len(shares)], [("fleet", method, n, "auto") for n in shares], runs)
    counts = {}
    for way, (pipes, keys, _) in ways.items():
        counts[way] = max(3, int(seconds / max(workers.time(pipes, keys, 5) / 5, 1e-6)))
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (pipes, keys, runs) in ways.items():
            found[way].append(workers.time(pipes, keys, counts[way]) / counts[way] / runs * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement")
    parser.add_argument("--markdown", help="also write the table to this file")
    arguments = parser.parse_args()
    workers = Workers(arguments.device)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{len(workers.single)} cores"
    lines = [
        f"Microseconds a run-step, {where}, torch {torch.__version__} (`python benchmarks/run_step.py --device {arguments.device}`)",
        "",
        "| method | runs | plain loop | looped | stacked | onepass | plain / onepass |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHOD_NAMES:
        found = measure(workers, method, arguments.rounds, arguments.seconds)
        middle = {way: statistics.median(values) for way, values in found.items()}
        fastest = min((way for way in middle if way.startswith("plain")), key=lambda way: middle[way])
        plain = middle[fastest]
        for runs in RUNS:
            looped, stacked, ours = (middle[f"{way} {runs}"] for way in ("looped", "stacked", "onepass"))
            ratio = statistics.median(p / o for p, o in zip(found[fastest], found[f"onepass {runs}"], strict=True))
            lines.append(f"| {method} | {runs} | {plain:.0f} | {looped:.0f} | {stacked:.0f} | {ours:.0f} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
