"""Where a study stands. It needs no torch, so it is quick."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onepass.errors import InputError
from onepass.metrics import select
from onepass.report.formats import duration
from onepass.studies.locking import running
from onepass.studies.progress import read_progress
from onepass.studies.store import Entry, Store


@dataclass
class Count:
    """How far a method is.

    That is how many units of each part its recipe wants now, how many are done, and which failed.
    """

    wanted: dict[str, int]
    done: dict[str, int]
    failed: dict[str, Entry]


def show(folder: Path, console: Console) -> None:
    """Print a table with one line per method, the totals, and why units failed."""
    with Store.read(folder) as store:
        store.check_arrays()
        recipe = store.contents.study["recipe"]
        entries: dict[str, dict[str, Entry]] = {name: {} for name in recipe["methods"]}
        for unit, entry in store.contents.entries.items():
            entries.get(entry.unit.method, {})[unit] = entry
        counts = {name: count(store, recipe, name, entries[name]) for name in entries}
        revisions = {stored.provenance.revision for stored in store.contents.records.values()}
    busy, now = running(folder), read_progress(folder)
    jobs = Counter(now.running.values()) if busy and now else Counter[str]()
    made = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "choosing", "learning", "running", "failed"):
        made.add_column(heading, justify="left" if heading == "method" else "right")
    for name, found in counts.items():
        parts = [f"{found.done[part]}/{found.wanted[part]}" for part in ("cv", "ev")]
        made.add_row(name, *parts, str(jobs[name] or ""), str(len(found.failed) or ""))
    console.print(f"{recipe['name']} in {folder}", soft_wrap=True)
    console.print(made)
    done = sum(sum(found.done.values()) for found in counts.values())
    total = sum(sum(found.wanted.values()) for found in counts.values())
    failed = sum(len(found.failed) for found in counts.values())
    sentence = f"{done} of {total} units done, {sum(jobs.values())} running, {failed} failed"
    if busy and now and now.left is not None:
        sentence += f"; about {duration(now.left)} left"
    elif busy:
        sentence += "; time left: not known yet"
    elif done < total:
        sentence += f"; no process is working on it: go on with 'onepass run --out {folder}'"
    console.print(sentence, soft_wrap=True)
    if len(revisions) > 1:
        sources = f"{len(revisions)} versions of the source: {', '.join(sorted(revisions))}"
        console.print(f"its results were made by {sources}", soft_wrap=True)
    for found in counts.values():
        for unit, entry in found.failed.items():
            last = (entry.traceback or "").strip().rpartition("\n")[2]
            console.print(f"{unit} ({entry.unit.method}): {last}", soft_wrap=True)


def count(store: Store, recipe: dict[str, Any], name: str, entries: Mapping[str, Entry]) -> Count:
    """Count a method's units in the store that the recipe wants.

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
    finished = {"cv": len(done), "ev": sum(unit in contents.records for unit in mine)}
    return Count(wanted, finished, failed)
