"""What a step costs when there are 3, 20 and 100 tasks: A-GEM's costs the same, GEM's grows.

    python benchmarks/tasks.py [--device cuda] [--methods van,a-gem,gem] [--tasks 3,20,100]
                               [--runs 5] [--rounds 5] [--plot FILE] [--markdown FILE]

Shapes of Permuted MNIST (784-256-256-10, batch 10, reference batch 256, memory 250 per task) and
random bytes. The step measured is one of the last task, when the memory holds all tasks before it.
All are measured in one process, in turns. Printed are medians over the rounds, and the ratio to the
fewest tasks is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

from common import Lines, heading, machine, now, parser, row
from onepass.engine.batch import Batch
from onepass.engine.precision import products
from onepass.engine.step_graphs import StepGraphs
from onepass.learners import METHODS
from onepass.protocol import Run, assemble
from onepass.streams.base import Heads, Part, PermutedStream, Pool, Task, shared_heads
from onepass.studies.recipe import load

IMAGES, STEPS = 20_000, 600


class ManyTasks(PermutedStream):
    """A stream with any number of tasks."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (IMAGES + 10, 784), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 10, (IMAGES + 10,), generator=generator)
        super().__init__(Pool(x, y, IMAGES, 1 / 255), None, None)
        self.count = count

    def heads(self, part: Part) -> Heads:
        return shared_heads(self.count, self.classes_per_task)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        (first, *_) = super().tasks(part, seed)
        return [first] * self.count  # what is in a task does not matter to what it costs


def prepared(method: str, tasks: int, runs: int, device: str) -> Callable[[], float]:
    """A function that takes steps of the last of `tasks` tasks and returns the seconds per step."""
    recipe = load("permuted-mnist")
    setup, options = recipe.setup(), recipe.method_options(method)
    chosen = METHODS[method]
    rows = [Run(seed, dict.fromkeys(chosen.hyperparameters, 0.01)) for seed in range(runs)]
    feed, fleet, learner = assemble(
        ManyTasks(tasks), "ev", chosen, rows, setup, options, device=device
    )
    some = next(feed.batches(0))
    many = Batch(some.x.repeat(1, 30, 1), torch.arange(10, device=device).repeat(runs, 30))
    for task in range(tasks):
        learner.begin_task(task)
        if task < tasks - 1:
            if learner.memory is not None:
                learner.memory.observe(many)
            learner.end_task()
    take = StepGraphs(fleet, learner)
    stretches = feed.stretches(tasks - 1, 0, lambda _, left: take.stretch(left))

    def steps(least: int) -> int:
        """Take at least so many steps; return how many."""
        nonlocal stretches
        done = 0
        while done < least:
            following = next(stretches, None)
            if following is None:
                stretches = feed.stretches(tasks - 1, 0, lambda _, left: take.stretch(left))
                continue
            take(*following)
            done += following[1]
        return done

    def seconds() -> float:
        budget = STEPS if device == "cuda" else 3
        with products(fleet.device, tf32=True):
            steps(max(1, budget // 10))
            began = now(device)
            done = steps(budget)
            return (now(device) - began) / done

    return seconds


def plot(path: Path, tasks: list[int], found: dict[str, list[float]], title: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for method, values in found.items():
        axes.plot(tasks, values, marker="o", label=method)
        last = tasks[-1], values[-1]
        beside = {"xytext": (-6, 6), "textcoords": "offset points", "ha": "right", "fontsize": 8}
        axes.annotate(f"{values[-1]:.0f}", last, **beside)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="tasks", ylabel="microseconds per step of all runs")
    axes.set_xticks(tasks, [str(n) for n in tasks])
    axes.margins(y=0.12)
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--methods", default="van,a-gem,gem")
    arguments.add_argument("--tasks", default="3,20,100")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--plot", type=Path)
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    tasks = [int(n) for n in given.tasks.split(",")]
    methods = given.methods.split(",")
    cases = product(methods, tasks)
    ready = {case: prepared(*case, given.runs, given.device) for case in cases}
    rounds = [
        {case: 1e6 * measure() for case, measure in ready.items()} for _ in range(given.rounds)
    ]
    title = f"{machine(given.device)}, {given.runs} runs side by side"
    lines = Lines()
    lines.add(title, "")
    lines.add(*heading("µs per step of all runs", *(f"{n} tasks" for n in tasks)))
    found: dict[str, list[float]] = {}
    for method in methods:
        cells = []
        found[method] = []
        for n in tasks:
            value = statistics.median(times[method, n] for times in rounds)
            ratio = statistics.median(
                times[method, n] / times[method, tasks[0]] for times in rounds
            )
            found[method].append(value)
            cells.append(f"{value:.0f} (× {ratio:.2f})")
        lines.add(row(method, *cells))
    lines.write(given.markdown)
    if given.plot:
        plot(given.plot, tasks, found, title)


if __name__ == "__main__":
    main()
