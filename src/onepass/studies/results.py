"""From recipe to units of work, and from their records to results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onepass.errors import InputError
from onepass.files import canonical
from onepass.learners import method
from onepass.metrics import Record, select
from onepass.protocol import Run, grid_points
from onepass.settings import of_unit
from onepass.streams.base import Part
from onepass.studies.recipe import Recipe
from onepass.studies.store import Store, Unit


@dataclass
class Result:
    """What a method ended with: the hyper-parameters chosen on `D^CV`, and the records.

    Where every grid point diverged there is nothing to choose and nothing to learn with: both are
    empty. `missing` units are still to be done, `failed` ones (with tracebacks) were given up.
    """

    method: str
    hyperparameters: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    cross_validation: list[Record] = field(default_factory=list)
    missing: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return not self.missing and not self.failed

    @property
    def diverged(self) -> bool:
        """Whether every grid point diverged."""
        return self.finished and not self.records


def units(recipe: Recipe, name: str, part: Part, runs: Iterable[Run]) -> list[Unit]:
    """The units of work of some runs, configured by everything that matters to their results."""
    found = method(name)
    scopes = {"run"}
    if found.learner.needs.memory:
        scopes.add("memory")
    if found.joined:
        scopes.add("joined pass")
    configuration = of_unit(recipe.setup(), scopes) | {
        "stream": recipe.stream,
        "stream_options": of_unit(recipe.make_stream_options()),
        "part": part,
        "method": name,
        "options": of_unit(recipe.method_options(name)),
    }
    shared = json.loads(canonical(configuration))  # as it will come out of a store
    return [
        Unit({**shared, "hyperparameters": dict(run.hyperparameters), "seed": run.seed})
        for run in runs
    ]


def cross_validation(recipe: Recipe, name: str) -> list[Unit]:
    """Every grid point with every seed, on `D^CV`."""
    points = grid_points(recipe.grids[name])
    runs = [Run(seed, point) for point in points for seed in range(recipe.cv_seeds)]
    return units(recipe, name, "cv", runs)


def evaluation(recipe: Recipe, name: str, chosen: dict[str, float]) -> list[Unit]:
    """The chosen grid point with every seed, on `D^EV`."""
    return units(recipe, name, "ev", [Run(seed, chosen) for seed in range(recipe.seeds)])


def result(recipe: Recipe, name: str, store: Store) -> Result:
    """What a method has come to so far."""
    found = Result(name)
    found.cross_validation = _collect(found, store, cross_validation(recipe, name))
    if found.missing:
        found.missing += recipe.seeds
        return found
    entries = store.contents.entries
    broken = {tuple(entries[unit].unit.hyperparameters.items()) for unit in found.failed}
    sound = [
        record
        for record in found.cross_validation
        if tuple(record.hyperparameters.items()) not in broken
    ]
    try:
        found.hyperparameters = select(sound) if sound else {}
    except InputError:  # every grid point diverged: that is the result of this method
        return found
    if found.hyperparameters:
        found.records = _collect(found, store, evaluation(recipe, name, found.hyperparameters))
    return found


def _collect(found: Result, store: Store, wanted: Sequence[Unit]) -> list[Record]:
    records = []
    for unit in wanted:
        entry = store.contents.entries.get(unit.id)
        if unit.id in store.contents.records:
            records.append(store.record(unit.id))
        elif entry is not None and entry.traceback is not None:
            found.failed[unit.id] = entry.traceback
        else:
            found.missing += 1
    return records


def results(recipe: Recipe, store: Store) -> dict[str, Result]:
    """Every method of the study, in the order of its recipe."""
    return {name: result(recipe, name, store) for name in recipe.methods}
