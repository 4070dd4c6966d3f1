"""Running a study: the protocol for every method of a recipe, packed into fleets and spread over processes.

On a CPU one single-threaded process a core beats threads by far, so the runs of a method are dealt out to as many fleets as there are
workers. How runs are packed depends on the recipe and the number of workers alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError
from onepass.learners import method
from onepass.metrics import Record
from onepass.protocol import Run, grid_points, select, train
from onepass.streams import stream
from onepass.streams.base import Part, Stream
from onepass.streams.feed import Feed
from onepass.studies.recipe import Recipe

MOST_RUNS = 64  # in one fleet: beyond that nothing is gained and memory grows


@dataclass(frozen=True)
class Job:
    """One fleet: some runs of a method on a part of the stream. Everything a worker process needs to know."""

    number: int
    recipe: Recipe
    method: str
    part: Part
    runs: tuple[Run, ...]
    data: str | None
    device: str


@dataclass
class Result:
    """What a method ended with: the hyper-parameters chosen on `D^CV` and the records of both parts.

    Where every grid point diverged there is nothing to choose and nothing to learn with: both are empty.
    """

    method: str
    hyperparameters: dict[str, float]
    records: list[Record]
    cross_validation: list[Record] = field(default_factory=list)


class Observer(Protocol):
    """Somebody who watches a study."""

    def running(self, jobs: list[Job]) -> None: ...
    def steps(self, done: int, total: int) -> None: ...
    def chose(self, method: str, hyperparameters: dict[str, float]) -> None: ...
    def finished(self, result: Result) -> None: ...


def check_device(device: str) -> str:
    """`auto` becomes `cuda` where there is one, else `cpu`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{device}': choose cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here: use --device cpu, or install a CUDA build of torch on a machine with a GPU")
    return device


def run(recipe: Recipe, *, data: str | None, device: str, workers: int, observer: Observer) -> dict[str, Result]:
    """The whole protocol for every method of the recipe."""
    source = open_stream(recipe, data)
    total = sum(_run_steps(source, recipe, name) for name in recipe.methods)
    study = _Study(recipe, data, device, workers)
    with _executor(workers) as executor:
        for done in study.go(executor, observer):
            observer.steps(done, total)
    return {name: study.results[name] for name in recipe.methods}


def open_stream(recipe: Recipe, data: str | None) -> Stream:
    """The stream of a recipe, with its options tried out on both parts."""
    made = _cached_stream(recipe.stream, recipe.make_stream_options(), data)
    parts: tuple[Part, Part] = ("cv", "ev")
    for part in parts:
        made.tasks(part, 0)
    return made


@lru_cache(maxsize=1)
def _cached_stream(name: str, options: Any, data: str | None) -> Stream:
    return stream(name).make(options, data)


def _run_steps(source: Stream, recipe: Recipe, name: str) -> int:
    joined = method(name).joined
    runs: dict[Part, int] = {"cv": len(grid_points(recipe.grids[name])) * recipe.cv_seeds, "ev": recipe.seeds}
    return sum(count * Feed(source, part, [0], recipe.batch_size, joined=joined).steps() for part, count in runs.items())


class _Study:
    def __init__(self, recipe: Recipe, data: str | None, device: str, workers: int) -> None:
        self.recipe, self.data, self.device, self.workers = recipe, data, device, workers
        self.results: dict[str, Result] = {}
        self._jobs = 0
        self._open: dict[tuple[str, Part], dict[int, list[Record]]] = {}
        self._expected: dict[tuple[str, Part], int] = {}

    def go(self, executor: _Executor, observer: Observer) -> Iterator[int]:
        """Everything, yielding the run-steps done so far."""
        running: dict[Future[list[Record]], Job] = {}
        # Methods with a memory take longest: they go first, so that no worker waits for them in the end.
        for name in sorted(self.recipe.methods, key=lambda n: not method(n).learner.needs_memory):
            points = grid_points(self.recipe.grids[name])
            runs = [Run(seed, point) for point in points for seed in range(self.recipe.cv_seeds)]
            running |= {executor.submit(job): job for job in self._pack(name, "cv", runs)}
        while running:
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                for follow_up in self._store(job, future.result(), observer):
                    running[executor.submit(follow_up)] = follow_up
            observer.running([job for future, job in running.items() if future.running()])
            yield executor.steps()

    def _pack(self, name: str, part: Part, runs: list[Run]) -> list[Job]:
        fleets = max(min(self.workers, len(runs)), -(-len(runs) // MOST_RUNS))
        jobs = []
        for i in range(fleets):
            mine = tuple(runs[i::fleets])  # dealt out, so that slow and fast grid points mix
            jobs.append(Job(self._jobs, self.recipe, name, part, mine, self.data, self.device))
            self._jobs += 1
        self._open[name, part] = {}
        self._expected[name, part] = fleets
        return jobs

    def _store(self, job: Job, records: list[Record], observer: Observer) -> list[Job]:
        stored = self._open[job.method, job.part]
        stored[job.number] = records
        fleets = self._expected[job.method, job.part]
        if len(stored) < fleets:
            return []
        dealt = [stored[number] for number in sorted(stored)]
        count = sum(len(d) for d in dealt)
        in_order = [dealt[i % fleets][i // fleets] for i in range(count)]
        if job.part == "cv":
            try:
                chosen = select(in_order)
            except InputError:  # every grid point diverged: that is this method's result, and the others go on
                self.results[job.method] = Result(job.method, {}, [], in_order)
                observer.finished(self.results[job.method])
                return []
            self.results[job.method] = Result(job.method, chosen, [], in_order)
            observer.chose(job.method, chosen)
            return self._pack(job.method, "ev", [Run(seed, chosen) for seed in range(self.recipe.seeds)])
        self.results[job.method].records = in_order
        observer.finished(self.results[job.method])
        return []


def work(job: Job, progress: Callable[[int], None] | None = None) -> list[Record]:
    """Train one fleet."""
    return train(
        _cached_stream(job.recipe.stream, job.recipe.make_stream_options(), job.data),
        job.part,
        method(job.method),
        job.runs,
        job.recipe.setup(),
        job.recipe.method_options(job.method),
        device=job.device,
        progress=progress,
    )


class _Executor(Protocol):
    def submit(self, job: Job) -> Future[list[Record]]: ...
    def steps(self) -> int: ...
    def stop(self, *, at_once: bool) -> None: ...


class _InProcess:
    """Trains in this process, beside the thread that watches."""

    def __init__(self) -> None:
        self._steps, self._stopped = 0, False
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(1)

    def submit(self, job: Job) -> Future[list[Record]]:
        return self._pool.submit(work, job, self._count)

    def steps(self) -> int:
        return self._steps

    def _count(self, steps: int) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._steps += steps

    def stop(self, *, at_once: bool) -> None:
        self._stopped = at_once
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Processes:
    """Trains in worker processes, one thread each."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._counter = context.Value("q", 0)
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(self._counter,))

    def submit(self, job: Job) -> Future[list[Record]]:
        with _interrupts_held():  # a worker that is started here inherits this: Ctrl-C is for the driving process alone
            return self._pool.submit(_work_in_process, job)

    def steps(self) -> int:
        return int(self._counter.value)

    def stop(self, *, at_once: bool) -> None:
        if at_once:
            for process in multiprocessing.active_children():
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_counter: Any = None


def _start_worker(counter: Any) -> None:
    global _counter
    _counter = counter
    torch.set_num_threads(1)
    keep_freed_memory()


def _work_in_process(job: Job) -> list[Record]:
    pending = 0

    def count(steps: int) -> None:
        nonlocal pending
        pending += steps
        if pending >= 200:  # a lock a step would be felt
            with _counter.get_lock():
                _counter.value += pending
            pending = 0

    return work(job, count)


@contextmanager
def _executor(workers: int) -> Iterator[_Executor]:
    executor: _Executor = _InProcess() if workers == 1 else _Processes(workers)
    try:
        yield executor
    except BrokenProcessPool:
        executor.stop(at_once=True)
        raise InputError("a worker process was killed (out of memory?): use fewer workers with --workers") from None
    except BaseException:
        executor.stop(at_once=True)
        raise
    executor.stop(at_once=False)


def default_workers(device: str) -> int:
    """One process a core on a CPU, one in all on a GPU."""
    if device == "cuda":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
