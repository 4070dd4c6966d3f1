"""The time that is left is told by what each method costs, in whatever order they come."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onepass.studies import forecast as forecasting
from onepass.studies import packing, progress, study
from onepass.studies.executors import Trained
from onepass.studies.forecast import Forecast, Piece, weighed
from onepass.studies.study import Means
from onepass.studies.work import Job, work
from tests.studies.small_study import Silent, small

COSTS = {"fast": 1.0, "slow": 50.0}
FLEETS = (("cv", 20), ("cv", 20), ("ev", 5))
FAST = [Piece("fast", part, rows, 20_000 * rows) for part, rows in FLEETS]
SLOW = [Piece("slow", part, rows, 20_000 * rows) for part, rows in FLEETS]
ORDERS = {
    "slow first": [*SLOW, *FAST],
    "fast first": [*FAST, *SLOW],
    "in turns": [piece for pair in zip(FAST, SLOW, strict=True) for piece in pair],
}


def simulated(
    pieces: list[Piece], workers: int, wrong: dict[str, float]
) -> tuple[list[float | None], list[float]]:
    """What is said to be left every second of a study, and which share to be done.

    `wrong` is by how much methods cost more than is counted.
    """
    noise, forecast = random.Random(0), Forecast(COSTS, pieces)
    waiting = list(pieces)
    running: list[list[Any]] = []  # a piece, and how much of it is left
    said, shares = list[float | None](), list[float]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append([waiting[0], waiting.pop(0).steps])
        for place in running:
            piece, left = place
            cost = COSTS[piece.method] * wrong[piece.method] * weighed(1, piece.rows)
            second = noise.uniform(0.5, 1.5) * 100_000 / cost
            done = min(left, second)
            place[1] -= done
            forecast.proceeded(Piece(piece.method, piece.part, piece.rows, done), done / second)
        running = [place for place in running if place[1] > 0]
        rest = [*waiting, *(replace(piece, steps=left) for piece, left in running)]
        said.append(forecast.left(rest, workers))
        shares.append(forecast.share(rest))
    return said, shares


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "wrong", [{"fast": 1.0, "slow": 1.0}, {"fast": 1.0, "slow": 1.7}, {"fast": 1.7, "slow": 1.0}]
)
def test_what_is_left_is_never_far_off_after_a_tenth_of_the_work(
    order: str, workers: int, wrong: dict[str, float]
) -> None:
    said, shares = simulated(ORDERS[order], workers, wrong)
    total = len(said)
    assert total > 60
    for second in range(total // 10, total):
        truth, told = total - 1 - second, said[second]
        assert told is not None
        assert truth / 2 - 2 <= told <= 2 * truth + 2, (second, total)
    for before, after in pairwise(said[total // 10 :]):
        assert before is not None
        assert after is not None
        assert abs(after - before) <= 2 + 0.1 * total, "no jumps"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_method_that_is_slower_than_counted_is_noticed_while_it_runs() -> None:
    said, _ = simulated(ORDERS["fast first"], 1, {"fast": 1.0, "slow": 5.0})
    half = len(said) // 2
    assert said[half] == pytest.approx(len(said) - half, rel=0.2)


def test_nothing_is_said_before_something_was_measured() -> None:
    forecast = Forecast(COSTS, FAST)
    assert forecast.left(FAST, 1) is None
    forecast.proceeded(FAST[0], None)  # as much as a checkpoint had
    assert forecast.left(FAST[1:], 1) is None
    assert forecast.share(FAST[1:]) == pytest.approx(20 * 1.1 / (2 * 20 * 1.1 + 5 * 1.4))


def test_the_end_is_not_sooner_than_the_longest_method_allows() -> None:
    forecast = Forecast(COSTS, [*FAST, *SLOW])
    forecast.proceeded(Piece("slow", "cv", 1, 100), 100.0)
    alone = forecast.left(SLOW[1:], 1)
    assert forecast.left(SLOW[1:], 64) == alone, "runs follow on the grid"


class Clock:
    """Trains at once, but says that it takes as long as its methods are slow."""

    def __init__(self, workers: int, seconds: dict[str, float]) -> None:
        self.workers = self.slots = workers
        self.now = 0.0
        self._seconds, self._jobs = seconds, dict[Future[Trained], tuple[Job, float]]()

    def submit(self, job: Job) -> Future[Trained]:
        future: Future[Trained] = Future()
        future.set_running_or_notify_cancel()
        self._jobs[future] = job, self.now
        return future

    def _all(self, job: Job) -> int:
        return len(job.units) * {"cv": 9, "ev": 51}[job.part]

    def steps(self) -> dict[str, int]:
        return {
            job.name: min(self._all(job), int((self.now - began) / self._seconds[job.method]))
            for job, began in self._jobs.values()
        }

    def held_up(self) -> None:
        return None

    def wait(
        self, futures: dict[Future[Trained], Job], **_: object
    ) -> tuple[list[Future[Trained]], None]:
        self.now += 1
        steps, done = self.steps(), []
        for future in futures:
            job, _ = self._jobs[future]
            if steps[job.name] == self._all(job):
                done.append(future)
        for future in done:
            future.set_result(work(self._jobs.pop(future)[0]))
        return done, None


class Told(Silent):
    """Remembers what is said to be left, and when."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self.left = clock, list[tuple[float, float | None]]()

    def steps(self, done: int, share: float, left: float | None) -> None:
        self.left.append((self._clock.now, left))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_study_whose_methods_cost_fifty_to_one_tells_how_long_it_takes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(workers, {"van": 0.1, "a-gem": 5.0})
    told = Told(clock)
    monkeypatch.setattr(packing, "cost_of_step", lambda _, name: {"van": 1, "a-gem": 50}[name])
    monkeypatch.setattr(study, "wait", clock.wait)
    times = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now)
    for module in (forecasting, progress):
        monkeypatch.setattr(module, "time", times)
    with study.opened(tmp_path, small("van,a-gem")) as (store, recipe):
        study.run(recipe, store, Means(workers=workers), clock, told)  # type: ignore[arg-type]
    for now, left in told.left:
        truth = clock.now - now
        if now > clock.now / 10:
            assert left is not None
            assert truth / 2 - 6 <= left <= 2 * truth + 6, (now, clock.now)  # a step takes 5 s
