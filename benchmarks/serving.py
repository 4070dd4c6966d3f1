"""What serving costs while a learner learns: threads that predict beside one that learns.

    python benchmarks/serving.py [--rounds 5] [--seconds 2] [--markdown FILE]

A-GEM in a fully connected net (784-256-256-10), batch 10, reference batch 256; a prediction is
`predict` of 10 examples. Every line is measured in every round, in turns, and the table has the
medians. Calls of a learner wait for each other: a prediction waits for the batch that is being
learnt, and a batch for the predictions that came before it. Torch computes with one thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import torch

from common import Lines, heading, parser, row
from onepass import OnePass
from onepass.models.mlp import mlp

THREADS = (0, 1, 2, 4, 8)


def made() -> OnePass:
    learner = OnePass(mlp(784, [256, 256], 10), learning_rate=0.01)
    for _ in range(2):
        for _ in range(60):
            learner.observe(torch.randn(10, 784), torch.randint(0, 10, (10,)))
        learner.end_task()
    return learner


def measured(
    learner: OnePass, threads: int, seconds: float, learns: bool = True
) -> tuple[float, list[float]]:
    """Milliseconds per batch (0 without learning), and those of every prediction."""
    stop = threading.Event()
    predictions: list[float] = []
    x, y = torch.randn(10, 784), torch.randint(0, 10, (10,))

    def predict() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            learner.predict(x)
            predictions.append(1000 * (time.perf_counter() - began))

    workers = [threading.Thread(target=predict) for _ in range(threads)]
    for worker in workers:
        worker.start()
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        if learns:
            learner.observe(x, y)
            batches += 1
        else:
            time.sleep(0.01)
    took = time.perf_counter() - began
    stop.set()
    for worker in workers:
        worker.join()
    return (1000 * took / batches if batches else 0.0), predictions


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=2.0)
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    learner = made()
    rows: dict[tuple[int, bool], list[tuple[float, list[float]]]] = {}
    for _ in range(given.rounds):
        rows.setdefault((1, False), []).append(measured(learner, 1, given.seconds, learns=False))
        for threads in THREADS:
            rows.setdefault((threads, True), []).append(measured(learner, threads, given.seconds))
    columns = "ms per batch", "ms per prediction, median", "99 % below", "predictions per second"
    lines = Lines()
    lines.add(*heading("threads that predict", "learning", *columns))
    for (threads, learns), found in rows.items():
        batch = f"{statistics.median(one for one, _ in found):.2f}" if learns else "–"
        times = sorted(ms for _, some in found for ms in some)
        ranks = len(times) // 2, int(0.99 * len(times))
        shown = [f"{times[rank]:.2f}" if times else "–" for rank in ranks]
        rate = len(times) / given.rounds / given.seconds
        lines.add(row(threads, "yes" if learns else "no", batch, *shown, f"{rate:.0f}"))
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
