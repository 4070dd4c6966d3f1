"""The table of a study, for people and for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from io import StringIO
from typing import Any

from rich.table import Table

from onepass.learners import METHODS, method
from onepass.metrics import Metrics, Summary, metrics, summarise
from onepass.report.formats import NONE, number, size
from onepass.studies.recipe import Recipe
from onepass.studies.results import Result

AGAIN = "†"
BASELINE = next(name for name, entry in METHODS.items() if entry.baseline)


def summaries(result: Result) -> dict[str, Summary]:
    """Every metric of a method over its runs."""
    runs = [metrics(record) for record in result.records]
    return {f.name: summarise([getattr(run, f.name) for run in runs]) for f in fields(Metrics)}


def document(recipe: Recipe, results: Mapping[str, Result]) -> dict[str, Any]:
    """The table as data: fractions in [0, 1], one value per seed, null for what has no meaning."""
    methods: dict[str, Any] = {}
    for name, result in results.items():
        methods[name] = {key: asdict(summary) for key, summary in summaries(result).items()} | {
            "hyperparameters": result.hyperparameters,
            "state_bytes": result.records[0].state_bytes if result.records else None,
            "diverged_in_cross_validation": result.diverged,
            "diverged": [record.seed for record in result.records if record.diverged],
            "missing": result.missing,
            "failed": sorted(result.failed),
            "looks_again": _looks_again(recipe, name),
            "state_by_task": result.records[0].state_by_task if result.records else None,
            "paper": _paper(recipe, name),
        }
    return {
        "recipe": recipe.name,
        "configuration": recipe.model_dump(exclude={"paper"}),
        "methods": methods,
    }


def _paper(recipe: Recipe, name: str) -> dict[str, Any]:
    published = recipe.paper.published.get(name, {})
    numbers = {"outcome": published} if isinstance(published, str) else published
    return {**numbers, "hyperparameters": recipe.paper.selected.get(name, {})}


def lines(recipe: Recipe, results: Mapping[str, Result]) -> str:
    """The table as CSV: one line per run on `D^EV`, with every metric."""
    text = StringIO()
    writer = csv.writer(text)
    names = [f.name for f in fields(Metrics)]
    about = ["recipe", "method", "seed", "hyperparameters", "diverged"]
    writer.writerow([*about, *names, "state_bytes"])
    for name, result in results.items():
        for record in result.records:
            chosen, diverged = _chosen(record.hyperparameters), int(record.diverged)
            values = ["" if value is None else repr(value) for value in astuple(metrics(record))]
            run = [recipe.name, name, record.seed, chosen, diverged]
            writer.writerow([*run, *values, record.state_bytes])
    return text.getvalue()


def table(recipe: Recipe, results: Mapping[str, Result]) -> Table:
    """Method, chosen hyper-parameters and results; a second line has the paper's numbers, if any.

    What was set differently from the recipe stands below: the paper's numbers do not apply to it.
    """
    seeds = f"{recipe.seeds} seed{'s' if recipe.seeds > 1 else ''}"
    title = f"{recipe.name}: mean ± population standard deviation over {seeds}"
    made = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 1))
    made.add_column("method", no_wrap=True)
    made.add_column("chosen", min_width=8)
    for heading in ("A_T %", "F_T", "LCA_10", "worst F", "viol.", "secs", "state"):
        made.add_column(heading, justify="right", no_wrap=True)  # all of it fits into 80 columns
    for name, result in results.items():
        label = name + (AGAIN if _looks_again(recipe, name) else "")
        made.add_row(label, *_ours(result))
        theirs = _theirs(recipe, name)
        if theirs:
            selected = recipe.paper.selected.get(name, {})
            made.add_row("  paper", _chosen(selected), *theirs, style="dim")
    made.caption = "\n".join(_remarks(recipe, results)) or None
    made.caption_justify = "left"
    return made


def _ours(result: Result) -> list[str]:
    found, chosen = summaries(result), _chosen(result.hyperparameters)
    if not result.finished:
        failed = len(result.failed)
        return [chosen or NONE, f"{failed} failed" if failed else f"{result.missing} to do"]
    if result.diverged:
        return ["diverged: every grid point, add smaller learning rates or strengths"]
    lost = sum(record.diverged for record in result.records)
    if lost:
        return [chosen, f"diverged ({lost} of {len(result.records)})"]
    return [
        chosen,
        _spread(found["A_T"], 100, 1),
        _spread(found["F_T"], 1, 2),
        _spread(found["LCA_10"], 1, 3),
        _spread(found["worst_forgetting"], 1, 2),
        _spread(found["violations"], 1, 0, spread=False),
        _spread(found["seconds"], 1, 1, spread=False),
        size(result.records[0].state_bytes),
    ]


def _theirs(recipe: Recipe, name: str) -> list[str]:
    published = recipe.paper.published.get(name)
    if not published:
        return []
    if isinstance(published, str):
        return [published]
    lca = _published(published, "LCA_10_trapezoid", 1, 3)
    return [
        _published(published, "A_T", 100, 1),
        _published(published, "F_T", 1, 2),
        lca and f"{lca}*",
        _published(published, "worst_forgetting", 1, 2),
        _published(published, "violations", 1, 0),
    ]


def _looks_again(recipe: Recipe, name: str) -> bool:
    return method(name).learner.needs_with(recipe.method_options(name)).second_pass


def _remarks(recipe: Recipe, results: Mapping[str, Result]) -> list[str]:
    """What a reader of the numbers should know about the study and its methods."""
    changes = recipe.changes()
    notes = [f"with {', '.join(changes)}"] if changes else []
    done = {name: result for name, result in results.items() if result.finished and result.records}
    if any(_looks_again(recipe, name) for name in results):
        notes.append(f"{AGAIN} sees each task's data a second time, so it is not a single pass")
    for name, result in done.items():
        grown = next((r.state_by_task for r in result.records if not r.diverged), None)
        if grown and grown[-1] >= 2 * grown[0]:
            first, last = size(grown[0]), size(grown[-1])
            notes.append(f"{name} grows: {first} after its first task, {last} after its last")
    better = better_than_baseline(done)
    if better:
        gains = ", ".join(f"{name} (+{100 * by:.1f} points)" for name, by in better.items())
        notes.append(f"better than {BASELINE} with the same examples kept: {gains}")
    if recipe.paper.published:
        notes.append(
            "* the paper's LCA is the trapezoidal one; ours is by the paper's formula (both are in"
            " the JSON)"
        )
    if changes and recipe.paper.published:
        notes.append("the paper's numbers are for the recipe as it stands, not for these changes")
    return notes


def better_than_baseline(finished: Mapping[str, Result]) -> dict[str, float]:
    """The lead in `A_T` of methods that have the baseline's memory and are better.

    They are compared seed by seed: the whole 95 % interval of the mean difference is above 0.
    """
    found: dict[str, float] = {}
    if BASELINE not in finished:
        return found
    reference = [metrics(record).A_T for record in finished[BASELINE].records]
    for name, result in finished.items():
        mine = [metrics(record).A_T for record in result.records]
        pairs = zip(mine, reference, strict=False)
        gain = summarise([None if a is None or b is None else a - b for a, b in pairs])
        if (
            method(name).learner.needs.memory
            and gain.mean is not None
            and gain.interval is not None
            and gain.interval[0] > 0
        ):
            found[name] = gain.mean
    return found


def _chosen(hyperparameters: Mapping[str, float]) -> str:
    short = {"learning_rate": "lr", "strength": "λ", "sensitivity": "ε", "distillation": "λ"}
    return " ".join(f"{short.get(name, name)}={value:g}" for name, value in hyperparameters.items())


def _spread(summary: Summary, scale: float, digits: int, spread: bool = True) -> str:
    if summary.mean is None or summary.std is None:
        return NONE
    return number([summary.mean, summary.std] if spread else [summary.mean], scale, digits)


def _published(numbers: Mapping[str, list[float]], name: str, scale: float, digits: int) -> str:
    return number(numbers.get(name, []), scale, digits)
