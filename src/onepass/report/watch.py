"""A study on a terminal while it runs."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from onepass.metrics import Record
from onepass.report.formats import duration
from onepass.report.tracking import Tracking
from onepass.studies import checkpoint
from onepass.studies.results import Result
from onepass.studies.store import Store, Unit
from onepass.studies.work import Job

AGAIN = 600.0  # seconds after which what a study waits for is repeated
WHAT = {"cv": "choosing", "ev": "learning"}


class Watch:
    """Shows a study on a terminal, and writes it to a folder for TensorBoard, if there is one."""

    def __init__(self, screen: Console, tensorboard: Path | None, store: Store) -> None:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[pace]}"),
        ]
        self._progress = Progress(*columns, console=screen, disable=not screen.is_terminal)
        self._task = self._progress.add_task("starting", total=None, pace="")
        self._lately: deque[tuple[float, int]] = deque(maxlen=100)  # a time, run-steps until then
        self._said: tuple[str | None, float] = (None, 0.0)  # what it waits for, and when said
        self._tracking = Tracking(tensorboard, store) if tensorboard is not None else None
        self._store = store
        self._done: list[str] = []

    def __enter__(self) -> Watch:
        self._progress.start()
        contents = self._store.contents
        if contents.records or contents.entries:
            checkpoints = checkpoint.any_in(self._store.folder / "checkpoints")
            more = ", and there are checkpoints" if checkpoints else ""
            self._say(f"going on: {len(contents.records)} units are done{more}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def running(self, jobs: list[Job]) -> None:
        names = ", ".join(dict.fromkeys(f"{WHAT[job.part]} {job.method}" for job in jobs))
        description = names or ("done" if self._done else "starting")
        self._progress.update(self._task, description=description)

    def steps(self, done: int, share: float, left: float | None) -> None:
        self._lately.append((time.monotonic(), done))
        (began, before), (now, _) = self._lately[0], self._lately[-1]
        speed = (done - before) / (now - began) if now > began else 0.0
        pace = [
            *([f"{speed:,.0f} steps/s"] if speed > 0 else []),
            *([f"about {duration(left)} left"] if left is not None else []),
        ]
        self._progress.update(self._task, completed=share, total=1.0, pace=", ".join(pace))

    def held_up(self, what: str | None) -> None:
        said, when = self._said
        if what is not None and (what != said or time.monotonic() - when > AGAIN):
            self._said = what, time.monotonic()
            self._say(what)
        elif what is None:
            self._said = None, when

    def stored(self, unit: Unit, record: Record) -> None:
        if self._tracking is not None:
            self._tracking.write(unit, record)

    def chose(self, method: str, hyperparameters: dict[str, float]) -> None:
        values = ", ".join(f"{name} = {value:g}" for name, value in hyperparameters.items())
        self._say(f"{method}: chose {values}")

    def finished(self, result: Result) -> None:
        self._done.append(result.method)
        what = f"{len(result.failed)} units failed" if result.failed else "finished"
        self._say(f"{result.method}: {what}")

    def trouble(self, job: Job, what: str) -> None:
        self._say(f"{job.method}, {WHAT[job.part]}: {what}")

    def interrupted(self, out: Path | None) -> None:
        self._progress.stop()
        kept = "without --out nothing is kept"
        if out:
            done = len(self._store.contents.records)
            kept = f"{done} units are kept in {out}: the same command goes on"
        self._say(f"interrupted; {kept}")

    def _say(self, what: str) -> None:
        self._progress.console.print(what, highlight=False, markup=False, soft_wrap=True)
