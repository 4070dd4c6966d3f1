"""Running a study: everything that a recipe asks for and the store does not have yet.

The plan of a study (which units share a fleet) is stored before anything is trained, so a study that was interrupted goes on with the same
fleets, and its results are the same to the last bit on the same CPU.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from onepass.errors import InputError, first_line
from onepass.feed import Feed
from onepass.files import canonical, write_here
from onepass.interrupts import Held
from onepass.learners import method
from onepass.metrics import Record
from onepass.streams.base import Part, Stream
from onepass.studies import checkpoint, packing
from onepass.studies.database import PROGRESS
from onepass.studies.executors import Executor, Trained
from onepass.studies.forecast import Forecast, Piece
from onepass.studies.packing import PARTS
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
    """Somebody who watches a study."""

    def running(self, jobs: list[Job]) -> None: ...
    def stored(self, unit: Unit, record: Record) -> None: ...
    def chose(self, method: str, hyperparameters: dict[str, float]) -> None: ...
    def finished(self, result: Result) -> None: ...
    def trouble(self, job: Job, what: str) -> None: ...

    def steps(self, done: int, share: float, left: float | None) -> None:
        """Run-steps and the share of the work that are done, and the seconds that are left."""
        ...

    def held_up(self, what: str | None) -> None:
        """What is being waited for, told again and again as long as that is so."""
        ...


def check_device(device: str) -> str:
    """`auto` becomes `cuda` where there is one, else `cpu`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{device}': choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here: use --device cpu, or install a CUDA build of torch on a machine with a GPU"
        )
    return device


def try_stream(recipe: Recipe, data: str | None) -> Stream:
    """The stream of a recipe, with its options tried out on both parts, for every seed."""
    source = open_stream(recipe, data)
    for part in PARTS:
        source.check(part, range(recipe.cv_seeds if part == "cv" else recipe.seeds))
    return source


@contextmanager
def opened(folder: Path, asked: Recipe) -> Iterator[tuple[Store, Recipe]]:
    """The study in a folder, begun if there is none, and its recipe, grown by what is asked for now."""
    with Store.write_to(folder, create={"recipe": asked.stored()}) as store:
        stored = store.contents.study["recipe"]
        recipe = _grown(folder, from_stored(stored), asked) if store.contents.records else asked
        if not store.contents.records and recipe.stored() != stored:
            store.restart(
                recipe=recipe.stored()
            )  # nothing would be lost, and the first try may have been a mistake
        elif recipe.stored() != stored:
            store.note(recipe=recipe.stored())
        yield store, recipe


def _grown(folder: Path, stored: Recipe, asked: Recipe) -> Recipe:
    try:
        return grown(stored, asked)
    except InputError as reason:
        raise InputError(
            f"the study in {folder} is another one ({reason}): it may get more methods, seeds and grid points;"
            f" go on with it as it is by 'onepass run --out {folder}', or choose another folder"
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
    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        means: Means,
        source: Stream,
        executor: Executor,
        observer: Observer,
    ) -> None:
        self.recipe, self.store, self.means, self.source = recipe, store, means, source
        self.executor, self.observer = executor, observer
        self._waiting: list[Job] = []
        self._running: dict[Future[Trained], Job] = {}
        self._failures: Counter[str] = Counter()
        self._most: dict[
            str, int
        ] = {}  # runs of a method side by side, once more of them did not fit into memory
        self._chosen: set[str] = set()  # methods whose choice was announced
        pairs = [(name, part) for name in recipe.methods for part in PARTS]
        self._steps = {(name, part): self._steps_of(name, part) for name, part in pairs}
        self._costs = {name: packing.cost(source, recipe, name) for name in recipe.methods}
        self._packing = self._packing_of_all()
        self._done = 0  # run-steps of finished fleets
        # Of fleets in training: run-steps, and when they were counted.
        self._seen: dict[Future[Trained], tuple[int, float]] = {}
        self._forecast = Forecast({}, [])
        self._progress = _Progress(store.folder / PROGRESS)

    def go(self) -> None:
        for name in self.recipe.methods:
            self._advance(name)
        self._forecast = Forecast(
            {name: packing.cost_of_step(self.recipe, name) for name in self.recipe.methods},
            self._left(),
        )
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
        """Give the executor as many fleets as it can train, those of the longest method first, so that no worker waits for it in the end."""
        self._waiting.sort(key=lambda job: -self._costs[job.method])
        while self._waiting and len(self._running) < self.executor.slots:
            job = self._waiting.pop(0)
            with (
                Held()
            ):  # an interrupt must not strike between the beginning of a fleet and its being known
                self._running[self.executor.submit(job)] = job

    def _keep_what_is_finished(self) -> None:
        for future, job in self._running.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                with suppress(InputError):  # the disk is full: nothing more can be kept
                    self._keep(job, *future.result())

    def _packing_of_all(self) -> dict[str, dict[Part, list[int]]]:
        """How runs are packed is decided when a method is new, for both its parts, and stored.

        All of it now, not when it is needed: it builds models, and beside a fleet that trains in this process it would share its random seed.
        """
        known = self.store.contents.study.get("packing", {})
        if any(name not in known for name in self.recipe.methods):
            known = (
                packing.plan(self.source, self.recipe, self.means.device, self.means.workers)
                | known
            )
            self.store.note(packing=known)
        return dict(known)

    def _show(self) -> None:
        self._measure()
        jobs = [job for future, job in self._running.items() if future.running()]
        left = self._left()
        seconds = self._forecast.left(left, self.executor.workers)
        self.observer.running(jobs)
        self.observer.steps(
            self._done + sum(steps for steps, _ in self._seen.values()),
            self._forecast.share(left),
            seconds,
        )
        self.observer.held_up(self.executor.held_up())
        self._progress.show(jobs, seconds)

    def _measure(self) -> None:
        """Tell the forecast what fleets in training have done since the last time."""
        now, known = time.monotonic(), self.executor.steps()
        for future, job in self._running.items() if known else ():
            steps = known.get(job.name, 0)
            before, then = self._seen.get(future, (0, None))
            if steps > 0:  # the first come from a checkpoint, or after seconds of preparation
                self._forecast.proceeded(
                    _piece(job, steps - before), None if then is None else now - then
                )
                self._seen[future] = steps, now

    def _left(self) -> list[Piece]:
        """What is left: of fleets in training, of waiting ones, and the runs of methods that choose."""
        seen = [(job, self._seen.get(future, (0, 0))[0]) for future, job in self._running.items()]
        jobs = [*seen, *((job, 0) for job in self._waiting)]
        left = [
            _piece(job, len(job.units) * self._steps[job.method, job.part] - steps)
            for job, steps in jobs
        ]
        for name in {job.method for job, _ in jobs if job.part == "cv"}:
            runs = packing.deal(
                range(self.recipe.seeds),
                packing.fleets(self.recipe.seeds, *self._packing[name]["ev"]),
            )
            left += [
                Piece(name, "ev", len(some), len(some) * self._steps[name, "ev"]) for some in runs
            ]
        return left

    def _account(self, future: Future[Trained], job: Job, records: list[Record] | None) -> None:
        """A fleet has ended with records; None: it failed, and what it did counts for nothing."""
        seen = self._seen.pop(future, None)
        steps = len(job.units) * self._steps[job.method, job.part] if records is not None else 0
        self._done += steps
        seconds = None
        if records is not None and seen is None:  # all that is known from far away
            seconds = sum(record.seconds for record in records)
        self._forecast.proceeded(_piece(job, steps - (seen[0] if seen is not None else 0)), seconds)

    def _steps_of(self, name: str, part: Part) -> int:
        return Feed(
            self.source, part, [0], self.recipe.batch_size, joined=method(name).joined
        ).steps()

    # ---- what to do next

    def _advance(self, name: str) -> None:
        """Submit what a method needs next: its grid on `D^CV`, then, once that is done, its runs on `D^EV`."""
        if self._submit_missing(name, "cv", cross_validation(self.recipe, name)):
            return
        chosen = result(self.recipe, name, self.store).hyperparameters
        if chosen and name not in self._chosen:
            self._chosen.add(name)
            self.observer.chose(name, chosen)
        if not chosen or not self._submit_missing(
            name, "ev", evaluation(self.recipe, name, chosen)
        ):
            self.observer.finished(result(self.recipe, name, self.store))

    def _submit_missing(self, name: str, part: Part, wanted: list[Unit]) -> bool:
        """Plan what has no place yet and submit the fleets that are not finished; False if there are none."""
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
        """A fleet, or several if one of this size did not fit into memory."""
        fleets = packing.deal(units, -(-len(units) // self._most.get(name, len(units))))
        if len(fleets) > 1:
            self.store.plan(fleets)
        folder = str(self.store.folder.absolute()) if self.means.keep else None
        for some in fleets:
            self._waiting.append(
                Job(
                    self.recipe,
                    name,
                    part,
                    tuple(some),
                    self.means.data,
                    self.means.device,
                    folder,
                    self.means.checkpoint_every,
                )
            )

    # ---- what came out

    def _take(self, future: Future[Trained]) -> None:
        job, error = self._running[future], future.exception()
        if error is None:
            records, made = future.result()
            self._keep(job, records, made)
            self._account(future, job, records)
        elif isinstance(error, InputError) or not isinstance(error, Exception):
            raise error  # wrong for every attempt and every fleet, or Ctrl-C
        else:
            self._account(future, job, None)
            if isinstance(error, OutOfMemoryError) and len(job.units) > 1:
                self._split(job)
            else:
                self._retry(job, error)
        del self._running[
            future
        ]  # not before: what an interrupt hits here is stored on the way out
        if not any(
            other.method == job.method for other in [*self._running.values(), *self._waiting]
        ):
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
        most = self._most[job.method] = min(
            -(-len(job.units) // 2), self._most.get(job.method, len(job.units))
        )
        self.observer.trouble(
            job, f"out of memory with {len(job.units)} runs side by side, going on with {most}"
        )
        too_large = [
            job,
            *(
                other
                for other in self._waiting
                if other.method == job.method and len(other.units) > most
            ),
        ]
        self._waiting = [other for other in self._waiting if other not in too_large]
        for one in too_large:
            self._discard_checkpoints(one)
            self._submit(one.method, one.part, one.units)

    def _retry(self, job: Job, error: Exception) -> None:
        self._failures[job.name] += 1
        left = ATTEMPTS - self._failures[job.name]
        self.observer.trouble(
            job, f"{first_line(error)}, {f'{left} attempts left' if left else 'given up'}"
        )
        if left == 1:
            self._discard_checkpoints(
                job
            )  # it may fail because of them: the last attempt begins anew
        if left:
            self._submit(job.method, job.part, list(job.units))
        else:
            self.store.fail(
                [unit.id for unit in job.units], "".join(traceback.format_exception(error))
            )


def _piece(job: Job, steps: float) -> Piece:
    return Piece(job.method, job.part, len(job.units), steps)


class _Progress:
    """A small file that tells `onepass status` what is going on. It is a view, not a result: nothing depends on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown = time.time()

    def show(self, jobs: list[Job], left: float | None) -> None:
        if time.time() - self._shown < 1:
            return
        self._shown = time.time()
        content: dict[str, Any] = {
            "left": left,
            "running": {unit.id: job.method for job in jobs for unit in job.units},
        }
        with suppress(InputError):
            write_here(self._path, canonical(content).encode())

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
