"""What a run-step costs by the number of runs in a fleet: why fleets are packed as they are.

    python benchmarks/packing.py

Microseconds per run-step of one single-threaded process in the third task, for the quickstart
(64-256-256-10, batch 10, reference batch 100). The constants of `onepass.studies.packing` come from
it: how many rows pay, and what a step and a method's state cost in examples.
"""

from __future__ import annotations

import statistics

import torch

from common import heading, now, parser, row
from onepass.engine.cpu import keep_freed_memory
from onepass.learners import METHODS
from onepass.protocol import Run, assemble
from onepass.studies.recipe import load
from onepass.studies.work import open_stream

ROWS = [1, 2, 4, 8, 16, 32, 64, 128]


def microseconds(name: str, rows: int, device: str, steps: int) -> float:
    recipe = load("quickstart")
    stream = open_stream(recipe, None)
    runs = [Run(seed, {"learning_rate": 0.03, "strength": 10.0}) for seed in range(rows)]
    setup, options = recipe.setup(), recipe.method_options(name)
    feed, fleet, learner = assemble(
        stream, "ev", METHODS[name], runs, setup, options, device=device
    )
    for phase in range(2):
        learner.begin_task(phase)
        for _, batch in zip(range(20), feed.batches(phase), strict=False):
            fleet.learn(learner, batch)
        learner.end_task()
    learner.begin_task(2)
    batches = list(feed.batches(2))[: steps + 5]
    for batch in batches[:5]:
        fleet.learn(learner, batch)
    began = now(device)
    for batch in batches[5:]:
        fleet.learn(learner, batch)
    return (now(device) - began) / len(batches[5:]) / rows * 1e6


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    names = ["van", "ewc", "a-gem"]
    print("\n".join(heading("runs", *names)))
    for rows in ROWS:
        steps = max(20, 160 // rows)
        cells = []
        for name in names:
            times = [microseconds(name, rows, given.device, steps) for _ in range(given.rounds)]
            cells.append(f"{statistics.median(times):.0f}")
        print(row(rows, *cells), flush=True)


if __name__ == "__main__":
    main()
