"""What the results on a stream of the paper depend on: varied hyper-parameters on `D^EV`.

    python benchmarks/sensitivity.py METHOD HYPERPARAMETER=VALUE,VALUE,… …
                                     [--recipe permuted-mnist] [--seeds 10] [--first-seed 0]
                                     [--tasks N] [--beside STUDY] [--set KEY=VALUE …]
                                     [--variant NAME] [--device cuda] [--data DIR] [--markdown FILE]

All values and seeds are side by side in one fleet. The other hyper-parameters are those that the
paper chose. There is no cross-validation: this uses `D^EV` to explain a result, not to choose one.
The spread is that of single runs; a mean over five runs, as published, varies by its share of 1/√5.
Single runs are printed too: seed by seed, two settings differ by less than seeds do. `--tasks N`
learns the first N tasks alone, step by step as in the whole stream, and `A_T` is then `A_N`.
`--beside STUDY` adds what a stored study has after as many tasks with the same seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from common import Lines, heading, machine, parser, row
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
        expected = "expected NAME=VALUE,VALUE,… such as learning_rate=0.03,0.1"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None


class Beginning(Stream):
    """The first tasks of a stream, with the slots, and so the network, of the whole stream."""

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
            other = f"{folder} is a study of {recipe.name}"
            raise InputError(f"{other}, not of {name}: take another one")
        found = results(recipe, store)
    if method not in found or not found[method].records:
        raise InputError(f"{folder} has no runs of {method}: take another study")
    return found[method].records


def summary(title: str, records: Sequence[Record]) -> tuple[str, str]:
    """A row of the table, and the single runs behind it."""
    found = [metrics(record) for record in records]
    cells = [title]
    for metric in SHOWN:
        values = [value for one in found if (value := getattr(one, metric)) is not None]
        cells.append(f"{np.mean(values):.4g} ± {np.std(values):.2g}" if values else "–")
    seeds = f"{records[0].seed} to {records[-1].seed}"
    finals = ", ".join(f"{one.A_T:.4f}" for one in found if one.A_T is not None)
    singles = f"`A_T` of seeds {seeds}, {title}: {finals}"
    tasks = len(records[0].accuracy)
    if tasks > 1:
        means = [
            np.mean([average_accuracy(record.accuracy, k + 1) for record in records])
            for k in range(tasks)
        ]
        path = ", ".join(f"{value:.3f}" for value in means)
        singles += f"; `A_k` after each task, their mean: {path}"
    return row(*cells), singles


def command(given: argparse.Namespace, axes: Mapping[str, Sequence[float]]) -> str:
    """The command that was given, without the options that change no number."""
    words = ["python benchmarks/sensitivity.py", given.method]
    words += [f"{name}={','.join(f'{value:g}' for value in axes[name])}" for name in axes]
    words.append(f"--recipe {given.recipe} --seeds {given.seeds}")
    if given.first_seed:
        words.append(f"--first-seed {given.first_seed}")
    if given.tasks < TASKS["ev"]:
        words.append(f"--tasks {given.tasks}")
    if given.beside:
        words.append(f"--beside {given.beside}")
    words += [f"--set {setting}" for setting in given.set]
    if given.variant:
        words.append(f"--variant {given.variant}")
    return " ".join(words)


def options() -> argparse.ArgumentParser:
    arguments = parser(__doc__)
    recipes = ["permuted-mnist", "split-cifar"]
    same_recipe = "the folder of a study of the same recipe"
    variants = [f"{name} of {method}" for method in VARIANTS for name in VARIANTS[method]]
    arguments.add_argument("method")
    arguments.add_argument("varied", nargs="+", type=varied, help="such as learning_rate=0.03,0.1")
    arguments.add_argument("--recipe", default=recipes[0], choices=recipes)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--tasks", type=int, default=TASKS["ev"], help="learn only so many")
    arguments.add_argument("--beside", type=Path, metavar="STUDY", help=same_recipe)
    arguments.add_argument("--set", action="append", default=[], help="as for onepass run")
    arguments.add_argument("--variant", help=f"of variants.py: {', '.join(variants)}")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--data")
    arguments.add_argument("--markdown", type=Path)
    return arguments


def main() -> None:
    arguments = options()
    given = arguments.parse_args()
    keep_freed_memory()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    if given.tasks not in range(1, TASKS["ev"] + 1):
        arguments.error(f"there are 1 to {TASKS['ev']} tasks to learn, not {given.tasks}")
    try:
        stored = recorded(given.beside, given.method, given.recipe) if given.beside else []
        recipe = load(given.recipe, given.set)
        folder = locate(streams.stream(recipe.stream).data or "", given.data)
        stream = open_stream(recipe, folder)
    except InputError as reason:
        arguments.error(str(reason))
    axes = dict(given.varied)
    known = UNPUBLISHED | recipe.paper.selected
    if not axes.keys() <= known.get(given.method, {}).keys() or given.seeds < 1:
        named = ", ".join(f"{method} ({', '.join(point)})" for method, point in known.items())
        needed = "one of these methods with a hyper-parameter of it"
        arguments.error(f"needs at least one seed, and {needed}: {named}")
    method = METHODS[given.method]
    if given.variant is not None:
        variants = VARIANTS.get(given.method, {})
        if given.variant not in variants:
            arguments.error(f"there is no variant {given.variant!r} of {given.method}: see --help")
        method = variants[given.variant]
    chosen = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    points = [known[given.method] | point for point in chosen]
    runs = [Run(seed, point) for point in points for seed in seeds]
    if given.tasks < TASKS["ev"]:
        stream = Beginning(stream, given.tasks)
    setup, extra = recipe.setup(), recipe.method_options(given.method)
    records = train(stream, "ev", method, runs, setup, extra, device=given.device)
    rows = []
    for number, point in enumerate(chosen):
        title = ", ".join(f"{name} {value:g}" for name, value in point.items())
        rows.append(summary(title, records[number * len(seeds) : (number + 1) * len(seeds)]))
    if beside := [beginning(record, given.tasks) for record in stored if record.seed in seeds]:
        rows.append(summary(str(given.beside), beside))
    lines = Lines()
    lines.add(f"`{command(given, axes)}`, {machine(given.device)}", "")
    lines.add(*heading(given.method, *(f"{metric} (single runs)" for metric in SHOWN)))
    lines.add(*(line for line, _ in rows))
    lines.add("", *(single for _, single in rows))
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
