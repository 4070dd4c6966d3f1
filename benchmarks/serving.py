"""What serving costs while a learner learns: threads that ask beside one that learns.

    python benchmarks/serving.py [--rounds 5] [--seconds 2] [--markdown FILE]

A-GEM in a fully connected net (784-256-256-10), batch 10, reference batch 256; a question is
`predict` of 10 examples. Every line is measured in every round, in turns, and the table has the
medians. Calls of a learner wait for each other, so an answer waits for the batch that is being
learnt, and a batch for the answers that came before it. Torch computes with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch

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
    """Milliseconds per batch (0 without learning), and those of every answer."""
    stop, answers = threading.Event(), list[float]()
    x, y = torch.randn(10, 784), torch.randint(0, 10, (10,))

    def ask() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            learner.predict(x)
            answers.append(1000 * (time.perf_counter() - began))

    workers = [threading.Thread(target=ask) for _ in range(threads)]
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
    return (1000 * took / batches if batches else 0.0), answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    learner = made()
    rows: dict[tuple[int, bool], list[tuple[float, list[float]]]] = {}
    for _ in range(given.rounds):
        rows.setdefault((1, False), []).append(measured(learner, 1, given.seconds, learns=False))
        for threads in THREADS:
            rows.setdefault((threads, True), []).append(measured(learner, threads, given.seconds))
    lines = [
        "| threads that ask | learning | ms per batch | ms per answer, median | 99 % below | answers per second |",
        "|---|---|---|---|---|---|",
    ]
    for (threads, learns), found in rows.items():
        batch = statistics.median(one for one, _ in found)
        answers = sorted(ms for _, some in found for ms in some)
        shown = (
            [f"{answers[len(answers) // 2]:.2f}", f"{answers[int(0.99 * len(answers))]:.2f}"]
            if answers
            else ["–", "–"]
        )
        rate = len(answers) / given.rounds / given.seconds
        lines.append(
            f"| {threads} | {'yes' if learns else 'no'} | {f'{batch:.2f}' if learns else '–'} | {' | '.join(shown)} | {rate:.0f} |"
        )
    table = "\n".join(lines)
    print(table)
    if given.markdown is not None:
        given.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
