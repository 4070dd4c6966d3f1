"""Where a study stands. Needs no torch, so it answers at once."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onepass.studies.store import Contents, Store, running

PROGRESS = "progress.json"  # what the driving process writes once a second


def show(folder: Path, console: Console) -> None:
    """Print a table, a line a method, and what can be said about the rest."""
    with Store.read(folder) as store:
        contents = store.contents
    recipe = contents.study["recipe"]
    now = _now(folder)
    planned = {name: _planned(recipe, name) for name in recipe["methods"]}
    done = Counter((contents.entries[unit].unit.method, contents.entries[unit].unit.part) for unit in contents.records)
    failed = {unit: entry for unit, entry in contents.entries.items() if entry.traceback is not None}
    busy = Counter(now.get("running", {}).values())
    made = Table(title=f"{recipe['name']} in {folder}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "choosing", "learning", "running", "failed"):
        made.add_column(heading, justify="left" if heading == "method" else "right")
    for name, (grid, runs) in planned.items():
        lost = sum(entry.unit.method == name for entry in failed.values())
        made.add_row(name, f"{done[name, 'cv']}/{grid}", f"{done[name, 'ev']}/{runs}", str(busy[name] or ""), str(lost or ""))
    console.print(made, highlight=False)
    total = sum(sum(counts) for counts in planned.values())
    console.print(_sentence(folder, contents, now, max(total, len(contents.entries)), len(failed)), highlight=False, markup=False, soft_wrap=True)
    for unit, entry in failed.items():
        last = (entry.traceback or "").strip().rpartition("\n")[2]
        console.print(f"{unit} ({entry.unit.method}): {last}", highlight=False, markup=False, soft_wrap=True)


def _planned(recipe: dict[str, Any], name: str) -> tuple[int, int]:
    points = math.prod(len(values) for values in recipe["grids"][name].values())
    return points * recipe["cv_seeds"], recipe["seeds"]


def _sentence(folder: Path, contents: Contents, now: dict[str, Any], total: int, failed: int) -> str:
    counts = f"{len(contents.records)} of {total} units done, {len(now.get('running', {}))} running, {failed} failed"
    if running(folder):
        left = _left(now)
        return f"{counts}; {'time left: not known yet' if left is None else f'about {_duration(left)} left'}"
    if len(contents.records) < total:
        return f"{counts}; nobody is working on it: go on with 'onepass run --out {folder}'"
    return counts


def _now(folder: Path) -> dict[str, Any]:
    if not running(folder):
        return {}
    try:
        found = json.loads((folder / PROGRESS).read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):  # only a view: without it less is known
        return {}


def _left(now: dict[str, Any]) -> float | None:
    if not now.get("steps"):
        return None
    return float((time.time() - now["began"]) * (now["total"] - now["steps"]) / now["steps"])


def _duration(seconds: float) -> str:
    """In words that are as exact as such a guess can be.

    >>> _duration(5), _duration(200), _duration(9000)
    ('5 s', '3 min', '2.5 h')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
