"""How much of a study is left: run-steps, weighed by what they cost.

The cost of a step comes from its shapes first (`packing.cost_of_step`). As fleets proceed, the
measured speed of each method takes over. A method that has not begun is expected to be as much
faster or slower than its count as those that have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from onepass.feed import Feed
from onepass.learners import method
from onepass.metrics import Record
from onepass.streams.base import Part, Stream
from onepass.studies import packing
from onepass.studies.packing import PARTS
from onepass.studies.recipe import Recipe
from onepass.studies.work import Job

# A step of a fleet takes as long as this many rows, and its own rows (benchmarks/packing.py).
SHARED = 2.0
TRUST = 0.01  # share of the whole work after which a method's own speed counts for half


@dataclass(frozen=True)
class Piece:
    """What is left of one fleet, in run-steps of all its rows."""

    method: str
    part: Part
    rows: int
    steps: float

    @property
    def rowsteps(self) -> float:
        """Steps as if each row were alone, less what rows of a fleet share."""
        return weighed(self.steps, self.rows)


def weighed(steps: float, rows: int) -> float:
    """Run-steps of a fleet, weighed: its rows share what a step costs whatever their number.

    >>> weighed(100, rows=1), weighed(100, rows=50)
    (300.0, 104.0)
    """
    return steps * (1 + SHARED / max(rows, 1))


class Forecast:
    """Learns how fast each method is, and says how long the rest will take."""

    def __init__(self, costs: Mapping[str, float], pieces: Iterable[Piece]) -> None:
        self._costs = dict(costs)  # of a run-step
        self._trust = TRUST * sum(self._work(piece) for piece in pieces)
        # By method: measured seconds, the work that was done in them, and all work done.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._measured: defaultdict[str, float] = defaultdict(float)
        self._done: defaultdict[str, float] = defaultdict(float)
        self._share = 0.0

    def _work(self, piece: Piece) -> float:
        return self._costs[piece.method] * piece.rowsteps

    def proceeded(self, piece: Piece, seconds: float | None) -> None:
        """Note that a piece of a fleet is done, and the seconds it took a worker, if known."""
        self._done[piece.method] += self._work(piece)
        if seconds is not None:
            self._measured[piece.method] += self._work(piece)
            self._seconds[piece.method] += seconds

    def left(self, pieces: Iterable[Piece], workers: int) -> float | None:
        """Seconds until all of it is done; None as long as nothing was measured.

        Not less than the longest method takes on its own: its runs follow on its grid.
        """
        if not sum(self._measured.values()):
            return None
        total, longest = 0.0, dict[tuple[str, Part], float]()
        for piece in pieces:
            seconds = self._work(piece) * self._pace(piece.method)
            total += seconds
            place = piece.method, piece.part
            longest[place] = max(seconds, longest.get(place, 0.0))
        chains = [sum(longest.get((name, part), 0.0) for part in PARTS) for name in self._costs]
        return max([total / max(workers, 1), *chains])

    def share(self, pieces: Iterable[Piece]) -> float:
        """The share of the work that is done. It never shrinks."""
        done = sum(work * self._pace(name) for name, work in self._done.items())
        left = sum(self._work(piece) * self._pace(piece.method) for piece in pieces)
        self._share = max(self._share, done / (done + left) if done + left else 1.0)
        return self._share

    def _pace(self, method: str) -> float:
        """Seconds for a unit of a method's work: the average, until enough of it was measured."""
        measured = sum(self._measured.values())
        average = sum(self._seconds.values()) / measured if measured else 1.0
        if not self._trust:
            return average
        seconds = self._seconds[method] + self._trust * average
        return seconds / (self._measured[method] + self._trust)


class Workload:
    """The run-steps of a study: those that its fleets have done, and those that are left.

    `packed` says into how many fleets the runs of a method and part are dealt (`packing.plan`).
    """

    def __init__(
        self, source: Stream, recipe: Recipe, packed: Mapping[str, Mapping[Part, Sequence[int]]]
    ) -> None:
        self._recipe = recipe
        self._packed = packed
        self._steps = {
            (name, part): Feed(
                source, part, [0], recipe.batch_size, joined=method(name).joined
            ).steps()
            for name in recipe.methods
            for part in PARTS
        }
        self._finished = 0  # run-steps of finished fleets
        # Of fleets in training: run-steps, and when they were counted.
        self._seen: dict[Future[Any], tuple[int, float]] = {}
        self._forecast = Forecast({}, [])

    def begin(self, waiting: Iterable[Job]) -> None:
        """Note all that is to be done, now that it is planned."""
        costs = {name: packing.cost_of_step(self._recipe, name) for name in self._recipe.methods}
        self._forecast = Forecast(costs, self._left({}, waiting))

    def measure(self, running: Mapping[Future[Any], Job], known: Mapping[str, int]) -> None:
        """Tell the forecast what fleets in training have done since the last time.

        `known` has their run-steps by their names, as far as they are known.
        """
        now = time.monotonic()
        for future, job in running.items():
            steps = known.get(job.name, 0)
            if steps <= 0:
                continue
            before, then = self._seen.get(future, (0, None))
            # The first steps come from a checkpoint, or after seconds of preparation.
            seconds = None if then is None else now - then
            self._forecast.proceeded(_piece(job, steps - before), seconds)
            self._seen[future] = steps, now

    def ended(self, future: Future[Any], job: Job, records: list[Record] | None) -> None:
        """A fleet has ended with records; None: it failed, and what it did counts for nothing."""
        seen = self._seen.pop(future, None)
        steps = 0 if records is None else len(job.units) * self._steps[job.method, job.part]
        self._finished += steps
        seconds = None
        if records is not None and seen is None:  # all that is known of a fleet on a cluster
            seconds = sum(record.seconds for record in records)
        self._forecast.proceeded(_piece(job, steps - (seen[0] if seen else 0)), seconds)

    def progress(
        self, running: Mapping[Future[Any], Job], waiting: Iterable[Job], workers: int
    ) -> tuple[int, float, float | None]:
        """Run-steps that are done, the share of the work that they are, and the seconds left."""
        left = self._left(running, waiting)
        done = self._finished + sum(steps for steps, _ in self._seen.values())
        seconds = self._forecast.left(left, workers)
        return done, self._forecast.share(left), seconds

    def _left(self, running: Mapping[Future[Any], Job], waiting: Iterable[Job]) -> list[Piece]:
        """What is left of fleets in training, of those that wait, and of methods that choose."""
        begun = [(job, self._seen.get(future, (0, 0))[0]) for future, job in running.items()]
        jobs = [*begun, *((job, 0) for job in waiting)]
        left = [
            _piece(job, len(job.units) * self._steps[job.method, job.part] - steps)
            for job, steps in jobs
        ]
        seeds = self._recipe.seeds
        for name in {job.method for job, _ in jobs if job.part == "cv"}:
            fleets = packing.fleets(seeds, *self._packed[name]["ev"])
            for runs in packing.deal(range(seeds), fleets):
                left.append(Piece(name, "ev", len(runs), len(runs) * self._steps[name, "ev"]))
        return left


def _piece(job: Job, steps: float) -> Piece:
    return Piece(job.method, job.part, len(job.units), steps)
