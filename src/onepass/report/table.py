"""The table of a study, for people and for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from io import StringIO
from typing import Any

from rich.table import Table

from onepass.learners import method
from onepass.metrics import Metrics, Summary, metrics, summarise
from onepass.studies.recipe import Recipe
from onepass.studies.results import Result

AGAIN = "†"


def summaries(result: Result) -> dict[str, Summary]:
    """Every metric of a method over its runs."""
    runs = [metrics(record) for record in result.records]
    return {f.name: summarise([getattr(run, f.name) for run in runs]) for f in fields(Metrics)}


def document(recipe: Recipe, results: Mapping[str, Result]) -> dict[str, Any]:
    """The table as data: fractions in [0, 1], a value a seed, null where a metric has no meaning."""
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
    """The table as CSV: a line a run of `D^EV`, with every metric."""
    text = StringIO()
    writer = csv.writer(text)
    names = [f.name for f in fields(Metrics)]
    writer.writerow(
        ["recipe", "method", "seed", "hyperparameters", "diverged", *names, "state_bytes"]
    )
    for name, result in results.items():
        for record in result.records:
            values = ["" if value is None else repr(value) for value in astuple(metrics(record))]
            writer.writerow(
                [
                    recipe.name,
                    name,
                    record.seed,
                    _chosen(record.hyperparameters),
                    int(record.diverged),
                    *values,
                    record.state_bytes,
                ]
            )
    return text.getvalue()


def table(recipe: Recipe, results: Mapping[str, Result]) -> Table:
    """Method, chosen hyper-parameters and results; the paper's numbers in a second line where it has some.

    What was set differently from the recipe stands below: the paper's numbers do not apply to it.
    """
    title = f"{recipe.name}: mean ± population standard deviation over {recipe.seeds} seed{'s' if recipe.seeds > 1 else ''}"
    made = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 1))
    made.add_column("method", no_wrap=True)
    made.add_column("chosen", min_width=8)
    for heading in ("A_T %", "F_T", "LCA_10", "worst F", "viol.", "secs", "state"):
        made.add_column(heading, justify="right", no_wrap=True)  # all of it fits into 80 columns
    for name, result in results.items():
        found, label = summaries(result), name + (AGAIN if _looks_again(recipe, name) else "")
        if not result.finished:
            what = f"{len(result.failed)} failed" if result.failed else f"{result.missing} to do"
            made.add_row(label, _chosen(result.hyperparameters) or "–", what)
        elif result.diverged:
            made.add_row(
                label, "diverged: every grid point, add smaller learning rates or strengths"
            )
        elif any(record.diverged for record in result.records):
            lost = sum(record.diverged for record in result.records)
            made.add_row(
                label,
                _chosen(result.hyperparameters),
                f"diverged ({lost} of {len(result.records)})",
            )
        else:
            made.add_row(
                label,
                _chosen(result.hyperparameters),
                _spread(found["A_T"], 100, 1),
                _spread(found["F_T"], 1, 2),
                _spread(found["LCA_10"], 1, 3),
                _spread(found["worst_forgetting"], 1, 2),
                _spread(found["violations"], 1, 0, spread=False),
                _spread(found["seconds"], 1, 1, spread=False),
                _bytes(result.records[0].state_bytes),
            )
        published = recipe.paper.published.get(name)
        if isinstance(published, str):
            made.add_row(
                "  paper", _chosen(recipe.paper.selected.get(name, {})), published, style="dim"
            )
        elif published:
            made.add_row(
                "  paper",
                _chosen(recipe.paper.selected.get(name, {})),
                _published(published.get("A_T"), 100, 1),
                _published(published.get("F_T"), 1, 2),
                _published(published.get("LCA_10_trapezoid"), 1, 3, mark="*"),
                _published(published.get("worst_forgetting"), 1, 2),
                _published(published.get("violations"), 1, 0),
                style="dim",
            )
    changes = recipe.changes()
    notes = [f"with {', '.join(changes)}"] if changes else []
    notes += _remarks(recipe, results)
    if recipe.paper.published:
        notes.append(
            "* the paper's LCA is the trapezoidal one; ours is by the paper's formula (both are in the JSON)"
        )
    if changes and recipe.paper.published:
        notes.append("the paper's numbers are for the recipe as it stands, not for these changes")
    made.caption = "\n".join(notes) or None
    made.caption_justify = "left"
    return made


def _looks_again(recipe: Recipe, name: str) -> bool:
    return method(name).learner.needs_with(recipe.method_options(name)).second_pass


def _remarks(recipe: Recipe, results: Mapping[str, Result]) -> list[str]:
    """What a reader of the numbers should know about the methods behind them."""
    notes = []
    finished = {
        name: result for name, result in results.items() if result.finished and result.records
    }
    if any(_looks_again(recipe, name) for name in results):
        notes.append(f"{AGAIN} looks at each task's data a second time, so it is not a single pass")
    for name, result in finished.items():
        grown = next(
            (record.state_by_task for record in result.records if not record.diverged), None
        )
        if grown and grown[-1] >= 2 * grown[0]:
            notes.append(
                f"{name} grows: {_bytes(grown[0])} after its first task, {_bytes(grown[-1])} after its last"
            )
    better = better_than_agem(finished)
    if better:
        notes.append(
            "better than a-gem with the same examples kept: "
            + ", ".join(f"{name} (+{100 * by:.1f} points)" for name, by in better.items())
        )
    return notes


def better_than_agem(finished: Mapping[str, Result]) -> dict[str, float]:
    """Methods with the same memory whose `A_T` is higher, seed by seed: the whole 95 % interval of the mean difference is above 0."""
    found: dict[str, float] = {}
    if "a-gem" not in finished:
        return found
    agem = [metrics(record).A_T for record in finished["a-gem"].records]
    for name, result in finished.items():
        mine = [metrics(record).A_T for record in result.records]
        gain = summarise(
            [None if a is None or b is None else a - b for a, b in zip(mine, agem, strict=False)]
        )
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
        return "–"
    return _number([summary.mean, summary.std] if spread else [summary.mean], scale, digits)


def _published(values: list[float] | None, scale: float, digits: int, mark: str = "") -> str:
    return "" if values is None else _number(values, scale, digits) + mark


def _number(values: list[float], scale: float, digits: int) -> str:
    return "±".join(f"{value * scale:.{digits}f}" for value in values)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f}MB" if count >= 1e5 else f"{count / 1e3:.1f}kB"
