"""What a step costs when there are 3, 20 and 100 tasks: A-GEM's costs the same, GEM's grows.

    python benchmarks/tasks.py [--device cuda] [--methods van,a-gem,gem] [--tasks 3,20,100] [--runs 5] [--rounds 5] [--plot FILE] [--markdown FILE]

Shapes of Permuted MNIST (784-256-256-10, batch 10, reference batch 256, memory 250 a task), made-up bytes. The step measured is one of the last
task, when the memory holds all tasks before it. All are measured in one run, in turns; printed are medians over the rounds, and the ratio to
the fewest tasks is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onepass.engine.batch import Batch
from onepass.engine.precision import products
from onepass.engine.step_graphs import StepGraphs
from onepass.learners import METHODS
from onepass.protocol import Run, assemble
from onepass.streams.base import Heads, Part, PermutedStream, Pool, Task, shared_heads
from onepass.studies.recipe import load

IMAGES, STEPS = 20_000, 600


class ManyTasks(PermutedStream):
    """As many tasks as one likes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (IMAGES + 10, 784), dtype=torch.uint8, generator=generator)
        super().__init__(
            Pool(x, torch.randint(0, 10, (IMAGES + 10,), generator=generator), IMAGES, 1 / 255),
            None,
            None,
        )
        self.count = count

    def heads(self, part: Part) -> Heads:
        return shared_heads(self.count, self.classes_per_task)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        (first, *_) = super().tasks(part, seed)
        return [first] * self.count  # what is in a task does not matter to what it costs


def prepared(method: str, tasks: int, runs: int, device: str) -> Callable[[], float]:
    """Something that takes steps of the last of `tasks` tasks and says how many seconds each took."""
    recipe = load("permuted-mnist")
    rows = [Run(seed, dict.fromkeys(METHODS[method].hyperparameters, 0.01)) for seed in range(runs)]
    feed, fleet, learner = assemble(
        ManyTasks(tasks),
        "ev",
        METHODS[method],
        rows,
        recipe.setup(),
        recipe.method_options(method),
        device=device,
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

    def seconds() -> float:
        nonlocal stretches
        done, budget, began = 0, STEPS if device == "cuda" else 3, 0.0
        with products(fleet.device, tf32=True):
            for warming in (True, False):
                done, began = 0, time.perf_counter()
                while done < (max(1, budget // 10) if warming else budget):
                    following = next(stretches, None)
                    if following is None:
                        stretches = feed.stretches(tasks - 1, 0, lambda _, left: take.stretch(left))
                        continue
                    take(*following)
                    done += following[1]
                if device == "cuda":
                    torch.cuda.synchronize()
        return (time.perf_counter() - began) / done

    return seconds


def plot(path: Path, tasks: list[int], found: dict[str, list[float]], title: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for method, values in found.items():
        axes.plot(tasks, values, marker="o", label=method)
        axes.annotate(
            f"{values[-1]:.0f}",
            (tasks[-1], values[-1]),
            textcoords="offset points",
            xytext=(-6, 6),
            ha="right",
            fontsize=8,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tasks",
        ylabel="microseconds a step of all runs",
        title=title,
    )
    axes.set_xticks(tasks, [str(n) for n in tasks])
    axes.margins(y=0.12)
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default="van,a-gem,gem")
    parser.add_argument("--tasks", default="3,20,100")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    tasks = [int(n) for n in arguments.tasks.split(",")]
    methods = arguments.methods.split(",")
    ready = {
        (method, n): prepared(method, n, arguments.runs, arguments.device)
        for method in methods
        for n in tasks
    }
    rounds = [
        {key: 1e6 * measure() for key, measure in ready.items()} for _ in range(arguments.rounds)
    ]
    found = {
        method: [statistics.median(r[method, n] for r in rounds) for n in tasks]
        for method in methods
    }
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    title = f"{device}, torch {torch.__version__}, {arguments.runs} runs side by side"
    lines = [
        title,
        "",
        "| µs a step of all runs | " + " | ".join(f"{n} tasks" for n in tasks) + " |",
        "|---" * (1 + len(tasks)) + "|",
    ]
    for method, values in found.items():
        ratios = [
            statistics.median(r[method, n] / r[method, tasks[0]] for r in rounds) for n in tasks
        ]
        lines.append(
            f"| {method} | "
            + " | ".join(
                f"{value:.0f} (× {ratio:.2f})" for value, ratio in zip(values, ratios, strict=True)
            )
            + " |"
        )
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    if arguments.plot:
        plot(arguments.plot, tasks, found, title)


if __name__ == "__main__":
    main()
