"""Running a study: everything that a recipe wants and the store does not have yet.

The plan of a study (which units share a fleet) is stored before anything is trained. So a study
that was interrupted goes on with the same fleets, and its results are the same to the last bit on
the same CPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from onepass.errors import InputError, first_line
from onepass.interrupts import Held
from onepass.metrics import Record
from onepass.streams.base import Part, Stream
from onepass.studies import checkpoint, packing
from onepass.studies.executors import Executor, Trained
from onepass.studies.forecast import Workload
from onepass.studies.packing import PARTS
from onepass.studies.progress import Progress, ProgressFile
from onepass.studies.recipe import Recipe, from_stored, grown
from onepass.studies.results import Result, cross_validation, evaluation, result
from onepass.studies.store import Provenance, Store, Unit
from onepass.studies.work import Job, OutOfMemoryError, open_stream

ATTEMPTS = 3  # then a fleet has failed


@dataclass(frozen=True)
class Means:
    """How a study is run, which does not matter to its results."""

    data: str | None = None
    device: str = "cpu"
    workers: int = 1
    keep: bool = True  # checkpoints, in the study's folder
    checkpoint_every: int | None = None


class Observer(Protocol):
    """What is told of a study's progress."""

    def running(self, jobs: list[Job]) -> None: ...
    def stored(self, unit: Unit, record: Record) -> None: ...
    def chose(self, method: str, hyperparameters: dict[str, float]) -> None: ...
    def finished(self, result: Result) -> None: ...
    def trouble(self, job: Job, what: str) -> None: ...

    def steps(self, done: int, share: float, left: float | None) -> None:
        """Run-steps and the share of the work that are done, and the seconds that are left."""
        ...

    def held_up(self, what: str | None) -> None:
        """What the study waits for; told again and again as long as it waits."""
        ...


def check_device(device: str) -> str:
    """`auto` becomes `cuda` where there is one, else `cpu`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{device}': choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here: use --device cpu, or install a CUDA build of torch on a"
            " machine with a GPU"
        )
    return device


def try_stream(recipe: Recipe, data: str | None) -> Stream:
    """The stream of a recipe, with its options tried out on both parts, for every seed."""
    source = open_stream(recipe, data)
    for part in PARTS:
        source.check(part, range(recipe.cv_seeds if part == "cv" else recipe.seeds))
    return source


@contextmanager
def opened(folder: Path, wanted: Recipe) -> Iterator[tuple[Store, Recipe]]:
    """The study in a folder and its recipe, grown by what is wanted now.

    In a folder without a study, one is begun.
    """
    with Store.write_to(folder, create={"recipe": wanted.stored()}) as store:
        stored = store.contents.study["recipe"]
        recipe = _grown(folder, from_stored(stored), wanted) if store.contents.records else wanted
        if recipe.stored() != stored:
            # Without results nothing would be lost: the first try may have been a mistake.
            change = store.note if store.contents.records else store.restart
            change(recipe=recipe.stored())
        yield store, recipe


def _grown(folder: Path, stored: Recipe, wanted: Recipe) -> Recipe:
    try:
        return grown(stored, wanted)
    except InputError as reason:
        raise InputError(
            f"the study in {folder} is another one ({reason}): it may get more methods, seeds and"
            f" grid points; go on with it as it is by 'onepass run --out {folder}', or choose"
            " another folder"
        ) from None


def run(
    recipe: Recipe, store: Store, means: Means, executor: Executor, observer: Observer
) -> dict[str, Result]:
    """Do what is missing: the whole protocol for every method of the recipe."""
    store.forgive()
    source = try_stream(recipe, means.data)
    study = _Study(recipe, store, means, source, executor, observer)
    study.go()
    found = {name: result(recipe, name, store) for name in recipe.methods}
    if all(method_result.finished for method_result in found.values()):
        checkpoint.discard_all(store.folder / "checkpoints")  # also of fleets that a merge finished
    return found


class _Study:
    """Gives fleets to the executor until every method of a recipe has its results."""

    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        means: Means,
        source: Stream,
        executor: Executor,
        observer: Observer,
    ) -> None:
        self.recipe = recipe
        self.store = store
        self.means = means
        self.source = source
        self.executor = executor
        self.observer = observer
        self._waiting: list[Job] = []
        self._running: dict[Future[Trained], Job] = {}
        self._failures: Counter[str] = Counter()  # by fleet
        # Runs of a method side by side, once more of them did not fit into memory.
        self._most: dict[str, int] = {}
        self._chosen: set[str] = set()  # methods whose choice was announced
        self._costs = {name: packing.cost(source, recipe, name) for name in recipe.methods}
        self._packing = self._packing_of_all()
        self._workload = Workload(source, recipe, self._packing)
        self._progress = ProgressFile(store.folder)

    def go(self) -> None:
        for name in self.recipe.methods:
            self._advance(name)
        self._workload.begin(self._waiting)
        try:
            while self._waiting or self._running:
                self._start()
                done, _ = wait(self._running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    self._take(future)
                self._show()
        except BaseException:
            self._keep_what_is_finished()
            raise
        finally:
            self._progress.remove()

    def _start(self) -> None:
        """Give the executor as many fleets as it can train.

        Those of the longest method come first, so that no worker waits for it in the end.
        """
        self._waiting.sort(key=lambda job: -self._costs[job.method])
        while self._waiting and len(self._running) < self.executor.slots:
            job = self._waiting.pop(0)
            with Held():  # an interrupt must not come between the submission and its note
                self._running[self.executor.submit(job)] = job

    def _keep_what_is_finished(self) -> None:
        for future, job in self._running.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                with suppress(InputError):  # the disk is full: nothing more can be kept
                    self._keep(job, *future.result())

    def _packing_of_all(self) -> dict[str, dict[Part, list[int]]]:
        """How runs are packed is decided when a method is new, for both its parts, and stored.

        All of it now, not when it is needed: it builds models, and beside a fleet that trains in
        this process it would share its random seed.
        """
        known = self.store.contents.study.get("packing", {})
        if any(name not in known for name in self.recipe.methods):
            new = packing.plan(self.source, self.recipe, self.means.device, self.means.workers)
            known = new | known
            self.store.note(packing=known)
        return dict(known)

    def _show(self) -> None:
        self._workload.measure(self._running, self.executor.steps())
        jobs = [job for future, job in self._running.items() if future.running()]
        done, share, seconds = self._workload.progress(
            self._running, self._waiting, self.executor.workers
        )
        self.observer.running(jobs)
        self.observer.steps(done, share, seconds)
        self.observer.held_up(self.executor.held_up())
        units = {unit.id: job.method for job in jobs for unit in job.units}
        self._progress.show(Progress(seconds, units))

    # ---- what to do next

    def _advance(self, name: str) -> None:
        """Submit what a method needs next: its grid on `D^CV`, after that its runs on `D^EV`."""
        if self._submit_missing(name, "cv", cross_validation(self.recipe, name)):
            return
        chosen = result(self.recipe, name, self.store).hyperparameters
        if chosen and name not in self._chosen:
            self._chosen.add(name)
            self.observer.chose(name, chosen)
        runs = evaluation(self.recipe, name, chosen) if chosen else []
        if not self._submit_missing(name, "ev", runs):
            self.observer.finished(result(self.recipe, name, self.store))

    def _submit_missing(self, name: str, part: Part, wanted: list[Unit]) -> bool:
        """Plan units without a place and submit fleets that are not finished; False if none are."""
        new = [unit for unit in wanted if unit.id not in self.store.contents.entries]
        if new:
            self.store.plan(packing.deal(new, packing.fleets(len(new), *self._packing[name][part])))
        ours = {unit.id for unit in wanted}
        fleets = [
            [entry.unit for entry in fleet if entry.unit.id in ours]
            for fleet in self.store.open_fleets().values()
        ]
        for units in filter(None, fleets):
            self._submit(name, part, units)
        return any(fleets)

    def _submit(self, name: str, part: Part, units: Sequence[Unit]) -> None:
        """Queue a fleet, or several if one of this size did not fit into memory."""
        fleets = packing.deal(units, -(-len(units) // self._most.get(name, len(units))))
        if len(fleets) > 1:
            self.store.plan(fleets)
        means = self.means
        folder = str(self.store.folder.absolute()) if means.keep else None
        where = means.data, means.device, folder, means.checkpoint_every
        self._waiting += [Job(self.recipe, name, part, tuple(some), *where) for some in fleets]

    # ---- what came out

    def _take(self, future: Future[Trained]) -> None:
        job, error = self._running[future], future.exception()
        if error is None:
            records, made = future.result()
            self._keep(job, records, made)
            self._workload.ended(future, job, records)
        elif isinstance(error, InputError) or not isinstance(error, Exception):
            raise error  # wrong for every attempt and every fleet, or Ctrl-C
        else:
            self._workload.ended(future, job, None)
            if isinstance(error, OutOfMemoryError) and len(job.units) > 1:
                self._split(job)
            else:
                self._retry(job, error)
        # Not before: what an interrupt hits here is stored by `_keep_what_is_finished`.
        del self._running[future]
        left = [*self._running.values(), *self._waiting]
        if not any(other.method == job.method for other in left):
            self._advance(job.method)

    def _keep(self, job: Job, records: list[Record], made: Provenance) -> None:
        named = {unit.id: record for unit, record in zip(job.units, records, strict=True)}
        self.store.add(named, made)
        self._discard_checkpoints(job)
        for unit in job.units:
            self.observer.stored(unit, named[unit.id])

    def _discard_checkpoints(self, job: Job) -> None:
        checkpoints = job.checkpoints()
        if checkpoints is not None:
            checkpoints.discard()

    def _split(self, job: Job) -> None:
        name, runs = job.method, len(job.units)
        most = self._most[name] = min(-(-runs // 2), self._most.get(name, runs))
        what = f"out of memory with {runs} runs side by side, going on with {most}"
        self.observer.trouble(job, what)
        others = [one for one in self._waiting if one.method == name and len(one.units) > most]
        self._waiting = [one for one in self._waiting if one not in others]
        for too_large in (job, *others):
            self._discard_checkpoints(too_large)
            self._submit(name, too_large.part, too_large.units)

    def _retry(self, job: Job, error: Exception) -> None:
        self._failures[job.name] += 1
        left = ATTEMPTS - self._failures[job.name]
        next_step = f"{left} attempts left" if left else "given up"
        self.observer.trouble(job, f"{first_line(error)}, {next_step}")
        if left == 1:  # it may fail because of its checkpoints: the last attempt begins anew
            self._discard_checkpoints(job)
        if left:
            self._submit(job.method, job.part, list(job.units))
        else:
            lines = "".join(traceback.format_exception(error))
            self.store.fail([unit.id for unit in job.units], lines)
