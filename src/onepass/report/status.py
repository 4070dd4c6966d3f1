"""Where a study stands. Needs no torch, so it answers at once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onepass.errors import InputError
from onepass.files import read_plain
from onepass.metrics import select
from onepass.studies.database import PROGRESS
from onepass.studies.locking import running
from onepass.studies.store import Entry, Store

LARGEST = 2**24  # bytes of what the driving process says: a study may have 100 000 units


@dataclass
class Progress:
    """What the driving process says about itself."""

    left: float | None  # seconds
    running: Mapping[str, str]  # unit: method


@dataclass
class Count:
    """How far a method is: the units that its recipe wants now, which of them are done, and those that failed."""

    wanted: dict[str, int]
    done: dict[str, int]
    failed: dict[str, Entry]


def show(folder: Path, console: Console) -> None:
    """Print a table, a line a method, and what can be said about the rest."""
    with Store.read(folder) as store:
        store.check_arrays()
        recipe = store.contents.study["recipe"]
        entries: dict[str, dict[str, Entry]] = {name: {} for name in recipe["methods"]}
        for unit, entry in store.contents.entries.items():
            entries.get(entry.unit.method, {})[unit] = entry
        counts = {name: count(store, recipe, name, entries[name]) for name in entries}
        revisions = {stored.provenance.revision for stored in store.contents.records.values()}
    busy, now = running(folder), _progress(folder)
    jobs = Counter(now.running.values()) if busy and now else Counter[str]()
    made = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "choosing", "learning", "running", "failed"):
        made.add_column(heading, justify="left" if heading == "method" else "right")
    for name, found in counts.items():
        parts = [f"{found.done[part]}/{found.wanted[part]}" for part in ("cv", "ev")]
        made.add_row(name, *parts, str(jobs[name] or ""), str(len(found.failed) or ""))
    console.print(f"{recipe['name']} in {folder}", soft_wrap=True)
    console.print(made)
    done, total = (
        sum(sum(getattr(found, what).values()) for found in counts.values())
        for what in ("done", "wanted")
    )
    sentence = f"{done} of {total} units done, {sum(jobs.values())} running, {sum(len(found.failed) for found in counts.values())} failed"
    if busy:
        left = now.left if now else None
        sentence += (
            f"; {'time left: not known yet' if left is None else f'about {duration(left)} left'}"
        )
    elif done < total:
        sentence += f"; nobody is working on it: go on with 'onepass run --out {folder}'"
    console.print(sentence, soft_wrap=True)
    if len(revisions) > 1:
        console.print(
            f"its results were made by {len(revisions)} versions of the source: {', '.join(sorted(revisions))}",
            soft_wrap=True,
        )
    for found in counts.values():
        for unit, entry in found.failed.items():
            last = (entry.traceback or "").strip().rpartition("\n")[2]
            console.print(f"{unit} ({entry.unit.method}): {last}", soft_wrap=True)


def count(store: Store, recipe: dict[str, Any], name: str, entries: Mapping[str, Entry]) -> Count:
    """Of a method's units in the store, those that the recipe wants.

    These are its grid, and the runs of what is chosen from it now.
    """
    contents, given = store.contents, recipe["grids"][name]
    grid = {hyper: list(dict.fromkeys(values)) for hyper, values in given.items()}
    place = {hyper: {value: n for n, value in enumerate(values)} for hyper, values in grid.items()}
    tried: dict[str, Entry] = {}
    runs: dict[str, Entry] = {}
    for unit, entry in entries.items():
        point, part = entry.unit.hyperparameters, entry.unit.part
        known = point.keys() == grid.keys() and all(point[h] in place[h] for h in grid)
        if known and entry.unit.seed < recipe["cv_seeds" if part == "cv" else "seeds"]:
            (tried if part == "cv" else runs)[unit] = entry
    done = [unit for unit in tried if unit in contents.records]
    failed = {unit: entry for unit, entry in tried.items() if entry.traceback is not None}
    wanted = {"cv": math.prod(map(len, grid.values())) * recipe["cv_seeds"], "ev": recipe["seeds"]}
    chosen = None
    if len(done) == wanted["cv"]:
        done.sort(key=lambda unit: [place[h][tried[unit].unit.hyperparameters[h]] for h in grid])
        records = [store.record(unit) for unit in done]
        try:
            chosen = select(records)
        except InputError:  # every grid point diverged: there is nothing more to do
            wanted["ev"] = 0
    mine = {unit: entry for unit, entry in runs.items() if entry.unit.hyperparameters == chosen}
    failed |= {unit: entry for unit, entry in mine.items() if entry.traceback is not None}
    return Count(
        wanted, {"cv": len(done), "ev": sum(unit in contents.records for unit in mine)}, failed
    )


def _progress(folder: Path) -> Progress | None:
    try:
        found = json.loads(read_plain(folder / PROGRESS, LARGEST))
        units = {str(unit): str(name) for unit, name in found["running"].items()}
        left = None if found["left"] is None else float(found["left"])
        return Progress(left if left is not None and math.isfinite(left) else None, units)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):  # only a view: without it less is known
        return None


def duration(seconds: float) -> str:
    """In words that are as exact as such a guess can be.

    >>> duration(5), duration(200), duration(9000)
    ('5 s', '3 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
