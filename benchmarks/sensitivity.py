"""What the results on a stream of the paper depend on: hyper-parameters varied, all their values and seeds side by side in one fleet on `D^EV`.

    python benchmarks/sensitivity.py METHOD HYPERPARAMETER=VALUE,VALUE,… … [--recipe permuted-mnist] [--seeds 10] [--first-seed 0]
                                     [--tasks N] [--beside STUDY] [--set KEY=VALUE …] [--variant NAME] [--device cuda] [--data DIR]
                                     [--markdown FILE]

The other hyper-parameters are those that the paper chose. No cross-validation: this looks at `D^EV`, to explain a result and not to choose one. The
spread is that of single runs; a mean over five runs, as published, varies by its share of 1/√5. Single runs are printed too: seed by seed, two
settings differ by less than seeds do. `--tasks N` learns the first N tasks alone, step by step as in the whole stream, and `A_T` is then `A_N`;
`--beside STUDY` adds what a stored study has after as many tasks with the same seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from full_length import UNPUBLISHED
from onepass import streams
from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.metrics import Record, average_accuracy, metrics
from onepass.protocol import Run, train
from onepass.streams.base import TASKS, Heads, Part, Stream, Task
from onepass.studies.fetch import locate
from onepass.studies.recipe import from_stored, load
from onepass.studies.results import results
from onepass.studies.store import Store
from onepass.studies.work import open_stream
from variants import VARIANTS

SHOWN = ("A_T", "F_T", "worst_forgetting", "LCA_10", "LCA_10_trapezoid", "violations")


def varied(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    try:
        return name, [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected NAME=VALUE,VALUE,… such as learning_rate=0.03,0.1, got {text!r}"
        ) from None


class Beginning(Stream):
    """The first tasks of a stream, with the slots, and so with the network, of all of it."""

    def __init__(self, whole: Stream, tasks: int) -> None:
        self.whole, self.count, self.pool = whole, tasks, whole.pool

    def heads(self, part: Part) -> Heads:
        return self.whole.heads(part)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        return self.whole.tasks(part, seed)[: self.count]


def beginning(record: Record, tasks: int) -> Record:
    """What is recorded of the first tasks."""
    memory, violations = record.memory_accuracy, record.violations
    return replace(
        record,
        accuracy=record.accuracy[:tasks, :tasks],
        initial=record.initial[:tasks],
        curve=record.curve[:tasks],
        memory_accuracy=None if memory is None else memory[:tasks, :tasks],
        violations=None if violations is None else violations[:tasks],
    )


def recorded(folder: Path, method: str, name: str = "split-cifar") -> Sequence[Record]:
    """The runs of a method on `D^EV` in a stored study of the recipe of this name."""
    with Store.read(folder) as store:
        recipe = from_stored(store.contents.study["recipe"])
        if recipe.name != name:
            raise InputError(
                f"{folder} is a study of {recipe.name}, not of {name}: take another one"
            )
        found = results(recipe, store)
    if method not in found or not found[method].records:
        raise InputError(f"{folder} has no runs of {method}: take another study")
    return found[method].records


def row(title: str, records: Sequence[Record]) -> tuple[str, str]:
    """A line of the table, and the single runs behind it."""
    found = [metrics(record) for record in records]
    cells = [title]
    for metric in SHOWN:
        values = [value for one in found if (value := getattr(one, metric)) is not None]
        cells.append(f"{np.mean(values):.4g} ± {np.std(values):.2g}" if values else "–")
    seeds = f"{records[0].seed} to {records[-1].seed}"
    singles = f"`A_T` of seeds {seeds}, {title}: {', '.join(f'{one.A_T:.4f}' for one in found if one.A_T is not None)}"
    if len(records[0].accuracy) > 1:
        path = [
            np.mean([average_accuracy(record.accuracy, k + 1) for record in records])
            for k in range(len(records[0].accuracy))
        ]
        singles += (
            f"; `A_k` after each task, their mean: {', '.join(f'{value:.3f}' for value in path)}"
        )
    return "| " + " | ".join(cells) + " |", singles


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method")
    parser.add_argument("varied", nargs="+", type=varied, help="such as learning_rate=0.03,0.1")
    parser.add_argument(
        "--recipe", default="permuted-mnist", choices=["permuted-mnist", "split-cifar"]
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=TASKS["ev"], help="learn only so many")
    parser.add_argument(
        "--beside", type=Path, metavar="STUDY", help="the folder of a study of the same recipe"
    )
    parser.add_argument("--set", action="append", default=[], help="as for onepass run")
    parser.add_argument(
        "--variant",
        help="of variants.py: "
        + ", ".join(f"{name} of {method}" for method in VARIANTS for name in VARIANTS[method]),
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.tasks not in range(1, TASKS["ev"] + 1):
        parser.error(f"there are 1 to {TASKS['ev']} tasks to learn, not {arguments.tasks}")
    try:
        stored = (
            recorded(arguments.beside, arguments.method, arguments.recipe)
            if arguments.beside
            else []
        )
        recipe = load(arguments.recipe, arguments.set)
        stream = open_stream(
            recipe, locate(streams.stream(recipe.stream).data or "", arguments.data)
        )
    except InputError as reason:
        parser.error(str(reason))
    axes = dict(arguments.varied)
    known = UNPUBLISHED | recipe.paper.selected
    if not axes.keys() <= known.get(arguments.method, {}).keys() or arguments.seeds < 1:
        named = ", ".join(f"{method} ({', '.join(point)})" for method, point in known.items())
        parser.error(
            f"needs at least one seed, and one of these methods with a hyper-parameter of it: {named}"
        )
    method = (
        METHODS[arguments.method]
        if arguments.variant is None
        else VARIANTS.get(arguments.method, {}).get(arguments.variant)
    )
    if method is None:
        parser.error(f"there is no variant {arguments.variant!r} of {arguments.method}: see --help")
    chosen = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    points = [known[arguments.method] | point for point in chosen]
    runs = [Run(seed, point) for point in points for seed in seeds]
    options = recipe.method_options(arguments.method)
    if arguments.tasks < TASKS["ev"]:
        stream = Beginning(stream, arguments.tasks)
    records = train(stream, "ev", method, runs, recipe.setup(), options, device=arguments.device)
    written = [
        f"{name}={','.join(f'{value:g}' for value in values)}" for name, values in axes.items()
    ]
    heads = [arguments.method, *(f"{metric} (single runs)" for metric in SHOWN)]
    command = [
        "python benchmarks/sensitivity.py",
        arguments.method,
        *written,
        f"--recipe {arguments.recipe} --seeds {arguments.seeds}",
    ]
    command += [f"--first-seed {arguments.first_seed}"] if arguments.first_seed else []
    command += [f"--tasks {arguments.tasks}"] if arguments.tasks < TASKS["ev"] else []
    command += [f"--beside {arguments.beside}"] if arguments.beside else []
    command += [f"--set {setting}" for setting in arguments.set] + (
        [f"--variant {arguments.variant}"] if arguments.variant else []
    )
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    lines = [f"`{' '.join(command)}`, {where}, torch {torch.__version__}", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    rows = [
        row(
            ", ".join(f"{name} {value:g}" for name, value in point.items()),
            records[number * len(seeds) : (number + 1) * len(seeds)],
        )
        for number, point in enumerate(chosen)
    ]
    if beside := [beginning(record, arguments.tasks) for record in stored if record.seed in seeds]:
        rows.append(row(str(arguments.beside), beside))
    lines += [line for line, _ in rows]
    lines += ["", *(single for _, single in rows)]
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
