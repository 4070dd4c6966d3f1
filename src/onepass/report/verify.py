"""Is a result the published one? A verdict for every number, by rules that were fixed before looking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from onepass.report.table import summaries
from onepass.studies.paper import KnownDifference, known_differences
from onepass.studies.recipe import Recipe, from_stored
from onepass.studies.results import Result, results
from onepass.studies.store import Store

COMPARED = ("reproduced", "close", "differs")
Judgement = Literal["reproduced", "close", "differs", "not published", "unfinished"]

# Metrics that are compared, and what still counts as close: 1.5 points of accuracy, 0.03 of forgetting, 0.02 of LCA. The published LCA is the
# trapezoidal one.
CLOSE = {"A_T": 0.015, "F_T": 0.03, "worst_forgetting": 0.03, "LCA_10_trapezoid": 0.02}


@dataclass(frozen=True)
class Verdict:
    """What became of one published number, or of a published failure (then the metric is `outcome`)."""

    method: str
    metric: str
    ours: str
    published: str
    judgement: Judgement
    known: KnownDifference | None = None

    @property
    def accepted(self) -> bool:
        return self.judgement != "unfinished" and (
            self.judgement != "differs" or self.known is not None
        )


@dataclass(frozen=True)
class Verification:
    """All verdicts on a study, and why the paper's numbers do not apply to it, if they do not."""

    verdicts: Sequence[Verdict]
    changes: Sequence[str]

    @property
    def compared(self) -> bool:
        """Was any number, or any failure, compared with a published one?"""
        return any(verdict.judgement in COMPARED for verdict in self.verdicts)

    @property
    def accepted(self) -> bool:
        """Nothing is accepted unseen: something was compared, and every difference is explained."""
        return self.compared and all(verdict.accepted for verdict in self.verdicts)


def judge(ours: Sequence[float], published: Sequence[float], runs: int, close: float) -> Judgement:
    """*reproduced*: the means are within twice their combined standard error, `2 √(s²/n + σ²/(runs − 1))`.

    `s` is our sample standard deviation over n runs; `σ` the published population standard deviation over `runs` runs, whose standard error
    of the mean is `σ/√(runs − 1)`. A spread that is not published, or not known of a single run, counts as 0. Else *close* within `close`.

    >>> judge([0.88, 0.90], [0.891, 0.0014], 5, 0.015), judge([0.88, 0.88], [0.891, 0.0014], 5, 0.015), judge([0.8, 0.8], [0.891], 5, 0.015)
    ('reproduced', 'close', 'differs')
    """
    distance = abs(float(np.mean(ours)) - published[0])
    variance = np.var(ours, ddof=1) / len(ours) if len(ours) > 1 else 0.0
    if len(published) > 1 and runs > 1:
        variance += published[1] ** 2 / (runs - 1)
    if distance <= 2 * math.sqrt(variance):
        return "reproduced"
    return "close" if distance <= close + 1e-12 else "differs"


def verdicts(folder: Path) -> Verification:
    """Judge every method of a study."""
    with Store.read(folder) as store:
        recipe = from_stored(store.contents.study["recipe"])
        found = results(recipe, store)
    changes = recipe.changes()
    known = {(entry.method, entry.metric): entry for entry in known_differences(recipe.name)}
    made: list[Verdict] = []
    for result in found.values():
        for method, metric, ours, published, judgement in _verified(
            recipe, result, applies=not changes
        ):
            made.append(
                Verdict(
                    method,
                    metric,
                    ours,
                    published,
                    judgement,
                    known.get((method, metric)) if judgement == "differs" else None,
                )
            )
    return Verification(made, changes)


def _verified(
    recipe: Recipe, result: Result, applies: bool
) -> list[tuple[str, str, str, str, Judgement]]:
    name = result.method
    published = recipe.paper.published.get(name) if applies else None
    lost = _lost(result)
    if published is None:
        todo = f"{result.missing} to do" if result.missing else lost or ""
        return [
            (
                name,
                "–",
                todo,
                "",
                "unfinished" if result.missing or result.failed else "not published",
            )
        ]
    if result.missing or (result.failed and lost != "out of memory"):
        return [
            (name, "–", f"{result.missing} to do, {len(result.failed)} failed", "", "unfinished")
        ]
    if isinstance(published, str) or lost:
        # A failure is a result: it is reproduced by the same failure, and numbers are never like a failure.
        was = published if isinstance(published, str) else "learnt"
        return [
            (name, "outcome", lost or "learnt", was, "reproduced" if lost == was else "differs")
        ]
    rows: list[tuple[str, str, str, str, Judgement]] = []
    for metric, close in CLOSE.items():
        summary = summaries(result)[metric]
        values = [value for value in summary.values if value is not None]
        if metric not in published:
            if values:
                rows.append(
                    (
                        name,
                        metric,
                        _number([float(np.mean(values)), float(np.std(values))]),
                        "",
                        "not published",
                    )
                )
            continue
        if not values:
            rows.append((name, metric, "–", _number(published[metric]), "differs"))
            continue
        judgement = judge(values, published[metric], recipe.paper.runs, close)
        rows.append(
            (
                name,
                metric,
                _number([float(np.mean(values)), float(np.std(values))]),
                _number(published[metric]),
                judgement,
            )
        )
    return rows


def _lost(result: Result) -> str | None:
    """How a method came to no result, if it did not."""
    if result.failed:
        return (
            "out of memory"
            if all("OutOfMemoryError" in text for text in result.failed.values())
            else "failed"
        )
    if result.diverged or any(record.diverged for record in result.records):
        return "diverged"
    return None


def _number(values: Sequence[float]) -> str:
    return " ± ".join(f"{value:.4f}" for value in values)


def view(found: Verification) -> Group:
    """The verdicts as a table, and what is to be said about them."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "metric", "ours", "published", "verdict"):
        made.add_column(heading, no_wrap=heading != "verdict")
    for verdict in found.verdicts:
        known = (
            f" (known: {verdict.known.explanation} Shown by {verdict.known.experiment})"
            if verdict.known
            else ""
        )
        made.add_row(
            verdict.method,
            verdict.metric,
            verdict.ours,
            verdict.published,
            verdict.judgement + known,
        )
    notes = []
    if found.changes:
        notes.append(
            f"nothing was compared: the paper's numbers are not for this study, which has {', '.join(found.changes)}"
        )
    elif not found.compared and any(
        verdict.judgement == "not published" for verdict in found.verdicts
    ):
        notes.append("nothing was compared: the recipe has no published numbers for these methods")
    for judgement, why in {
        "differs": "a difference that is not explained",
        "unfinished": "something that is not finished",
    }.items():
        names = list(
            dict.fromkeys(
                v.method for v in found.verdicts if v.judgement == judgement and not v.accepted
            )
        )
        if names:
            notes.append(f"not accepted, because of {why}: {', '.join(names)}")
    return Group(made, *(Text(note) for note in notes))
