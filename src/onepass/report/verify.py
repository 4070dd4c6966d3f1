"""Whether results are the published ones: a verdict on each number, by rules fixed beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from onepass.report.formats import NONE
from onepass.report.table import summaries
from onepass.studies.paper import KnownDifference, known_differences
from onepass.studies.recipe import Recipe, from_stored
from onepass.studies.results import Result, results
from onepass.studies.store import Store

COMPARED = ("reproduced", "close", "differs")
Verdict = Literal["reproduced", "close", "differs", "not published", "unfinished"]

# Metrics that are compared, and what still counts as close: 1.5 points of accuracy, 0.03 of
# forgetting, 0.02 of LCA. The published LCA is the trapezoidal one.
CLOSE = {"A_T": 0.015, "F_T": 0.03, "worst_forgetting": 0.03, "LCA_10_trapezoid": 0.02}


@dataclass(frozen=True)
class Comparison:
    """One number beside the published one, or one failure (then the metric is `outcome`)."""

    method: str
    metric: str
    ours: str
    published: str
    verdict: Verdict
    known: KnownDifference | None = None

    @property
    def accepted(self) -> bool:
        unexplained = self.verdict == "differs" and self.known is None
        return self.verdict != "unfinished" and not unexplained


@dataclass(frozen=True)
class Verification:
    """All comparisons of a study, and the changes for which the paper's numbers do not apply."""

    comparisons: Sequence[Comparison]
    changes: Sequence[str]

    @property
    def compared(self) -> bool:
        """Whether any number, or any failure, was compared with a published one."""
        return any(one.verdict in COMPARED for one in self.comparisons)

    @property
    def accepted(self) -> bool:
        """Whether something was compared, and every difference is explained."""
        return self.compared and all(one.accepted for one in self.comparisons)


def compare(ours: Sequence[float], published: Sequence[float], runs: int, close: float) -> Verdict:
    """*reproduced*: the means are within twice their standard error, `2 √(s²/n + σ²/(runs − 1))`.

    `s` is our sample standard deviation over n runs. `σ` is the published population standard
    deviation over `runs` runs, whose standard error of the mean is `σ/√(runs − 1)`. A spread that
    is not published, or not known of a single run, counts as 0. Else *close* within `close`.

    >>> compare([0.88, 0.90], [0.891, 0.0014], 5, 0.015)
    'reproduced'
    >>> compare([0.88, 0.88], [0.891, 0.0014], 5, 0.015), compare([0.8, 0.8], [0.891], 5, 0.015)
    ('close', 'differs')
    """
    distance = abs(float(np.mean(ours)) - published[0])
    variance = np.var(ours, ddof=1) / len(ours) if len(ours) > 1 else 0.0
    if len(published) > 1 and runs > 1:
        variance += published[1] ** 2 / (runs - 1)
    if distance <= 2 * math.sqrt(variance):
        return "reproduced"
    return "close" if distance <= close + 1e-12 else "differs"


def verify(folder: Path) -> Verification:
    """Compare every method of a study with what is published."""
    with Store.read(folder) as store:
        recipe = from_stored(store.contents.study["recipe"])
        found = results(recipe, store)
    changes = recipe.changes()
    known = {(entry.method, entry.metric): entry for entry in known_differences(recipe.name)}
    made = []
    for result in found.values():
        for one in _compared(recipe, result, applies=not changes):
            if one.verdict == "differs":
                one = replace(one, known=known.get((one.method, one.metric)))
            made.append(one)
    return Verification(made, changes)


def _compared(recipe: Recipe, result: Result, applies: bool) -> list[Comparison]:
    name = result.method
    published = recipe.paper.published.get(name) if applies else None
    lost = _lost(result)
    if published is None:
        ours = f"{result.missing} to do" if result.missing else lost or ""
        finished = not (result.missing or result.failed)
        return [Comparison(name, NONE, ours, "", "not published" if finished else "unfinished")]
    if result.missing or (result.failed and lost != "out of memory"):
        ours = f"{result.missing} to do, {len(result.failed)} failed"
        return [Comparison(name, NONE, ours, "", "unfinished")]
    if isinstance(published, str) or lost:
        # A failure is a result: the same failure reproduces it, and no number is like a failure.
        outcome, expected = lost or "learnt", published if isinstance(published, str) else "learnt"
        verdict: Verdict = "reproduced" if outcome == expected else "differs"
        return [Comparison(name, "outcome", outcome, expected, verdict)]
    made, found = [], summaries(result)
    for metric, close in CLOSE.items():
        values = [value for value in found[metric].values if value is not None]
        if not values and metric not in published:
            continue
        ours = _number([float(np.mean(values)), float(np.std(values))]) if values else NONE
        theirs, verdict = "", "not published"
        if metric in published:
            theirs, verdict = _number(published[metric]), "differs"
            if values:
                verdict = compare(values, published[metric], recipe.paper.runs, close)
        made.append(Comparison(name, metric, ours, theirs, verdict))
    return made


def _lost(result: Result) -> str | None:
    """How a method came to no result, if it did not."""
    if result.failed:
        full = all("OutOfMemoryError" in text for text in result.failed.values())
        return "out of memory" if full else "failed"
    if result.diverged or any(record.diverged for record in result.records):
        return "diverged"
    return None


def _number(values: Sequence[float]) -> str:
    return " ± ".join(f"{value:.4f}" for value in values)


def view(found: Verification) -> Group:
    """The comparisons as a table, and notes on them."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "metric", "ours", "published", "verdict"):
        made.add_column(heading, no_wrap=heading != "verdict")
    for one in found.comparisons:
        verdict: str = one.verdict
        if one.known:
            verdict += f" (known: {one.known.explanation} Shown by {one.known.experiment})"
        made.add_row(one.method, one.metric, one.ours, one.published, verdict)
    notes = []
    if found.changes:
        changes = ", ".join(found.changes)
        notes.append(
            f"nothing was compared: the paper's numbers are not for this study, which has {changes}"
        )
    elif not found.compared and any(one.verdict == "not published" for one in found.comparisons):
        notes.append("nothing was compared: the recipe has no published numbers for these methods")
    for verdict, why in {
        "differs": "a difference that is not explained",
        "unfinished": "something that is not finished",
    }.items():
        refused = [c for c in found.comparisons if c.verdict == verdict and not c.accepted]
        if refused:
            names = ", ".join(dict.fromkeys(one.method for one in refused))
            notes.append(f"not accepted, because of {why}: {names}")
    return Group(made, *(Text(note) for note in notes))
