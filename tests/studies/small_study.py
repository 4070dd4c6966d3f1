"""A small study, and running it in this thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from onepass.metrics import Record
from onepass.studies import study, work
from onepass.studies.executors import Trained
from onepass.studies.recipe import Recipe, load
from onepass.studies.results import Result
from onepass.studies.store import Unit
from onepass.studies.study import Means
from onepass.studies.work import Job

CHANGES = [
    "train_examples=30",
    "test_examples=20",
    "hidden=[16]",
    "grids.van.learning_rate=[0.1, 0.001]",
    "grids.a-gem.learning_rate=0.1",
]


def small(methods: str = "van", seeds: int = 2, changes: list[str] | None = None) -> Recipe:
    return load("quickstart", CHANGES + (changes or []), methods, seeds)


class Silent:
    """An observer of a study that prints nothing and remembers what went wrong."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.stored_units: list[str] = []

    def running(self, jobs: list[Job]) -> None: ...
    def steps(self, done: int, share: float, left: float | None) -> None: ...
    def held_up(self, what: str | None) -> None: ...
    def chose(self, method: str, hyperparameters: dict[str, float]) -> None: ...
    def finished(self, result: Result) -> None: ...

    def stored(self, unit: Unit, record: Record) -> None:
        self.stored_units.append(unit.id)

    def trouble(self, job: Job, what: str) -> None:
        self.troubles.append(what)


class Scripted:
    """Trains at once, in this thread, after asking a script whether to."""

    workers = slots = 1

    def __init__(self, script: Callable[[work.Job], Exception | None] = lambda _: None) -> None:
        self.jobs: list[work.Job] = []
        self._script = script

    def submit(self, job: work.Job) -> Future[Trained]:
        self.jobs.append(job)
        done: Future[Trained] = Future()
        error = self._script(job)
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(work.work(job))
        return done

    def steps(self) -> dict[str, int]:
        return {}

    def held_up(self) -> None:
        return None


def go(
    folder: Path,
    asked: Recipe,
    script: Callable[[work.Job], Exception | None] = lambda _: None,
    workers: int = 2,
) -> tuple[dict[str, Result], Silent]:
    observer, means = Silent(), Means(workers=workers, checkpoint_every=2)
    with study.opened(folder, asked) as (store, recipe):
        return study.run(recipe, store, means, Scripted(script), observer), observer


def same(one: dict[str, Result], other: dict[str, Result]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].hyperparameters == other[name].hyperparameters
        and len(one[name].records) == len(other[name].records) > 0
        and all(a.same_as(b) for a, b in zip(one[name].records, other[name].records, strict=True))
        for name in one
    )
