"""Where fleets are trained: in this process, in local processes, or on a Dask cluster.

A worker returns records; only the driving process stores them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, Protocol

import torch

from onepass.engine.cpu import keep_freed_memory
from onepass.metrics import Record
from onepass.stopping import (
    abandon,
    cpu_seconds,
    fork_server,
    is_stopped,
    kill_fork_server,
    wake_helpers,
    within,
)
from onepass.studies.store import Provenance
from onepass.studies.work import Job, work

log = logging.getLogger(__name__)

SOON = 2.0  # seconds in which a step, or a worker process that gets SIGTERM, usually ends
GRACE = 10.0  # seconds after which what has not ended is left behind
QUIET = 60.0  # seconds without any computing after which a process with a fleet is reported to hang
STOPPED = 3600.0  # seconds after which the fleet of such a process goes to another one

Trained = tuple[list[Record], Provenance]


class WorkerDiedError(Exception):
    """A worker ended in the middle of a fleet."""


class Executor(Protocol):
    """A place to train fleets: `workers` of them at a time, as far as is known.

    Up to `slots` fleets may be submitted at once.
    """

    workers: int
    slots: int

    def submit(self, job: Job) -> Future[Trained]: ...
    def stop(self, *, at_once: bool) -> None: ...

    def steps(self) -> Mapping[str, int]:
        """Run-steps done so far of fleets in training, by their name, as far as is known."""
        ...

    def held_up(self) -> str | None:
        """What it waits for, in a sentence; raises InputError if it has waited long enough."""
        ...


@contextmanager
def executor(workers: int, threads: int, scheduler: str | None = None) -> Iterator[Executor]:
    """The cluster of a scheduler; without its address this process for one worker, else several."""
    made: Executor
    if scheduler is not None:
        from onepass.studies.cluster import Cluster  # which needs what is defined here

        made = Cluster(scheduler, threads)
    else:
        made = _InProcess(threads) if workers == 1 else _Processes(workers, threads)
    try:
        yield made
    except BaseException:
        made.stop(at_once=True)
        raise
    made.stop(at_once=False)


def _let_go(futures: Iterable[Future[Trained]]) -> None:
    """Release the locks of futures that this thread still holds.

    An interrupt may come right after the thread that watches has acquired one, before Python has
    noted that it is to be released. Then the worker could never finish the future, and we would
    wait for ever.
    """
    for future in futures:
        with suppress(RuntimeError):  # this thread does not hold it (any more)
            while True:
                future._condition.release()


class _InProcess:
    """Trains in this process, beside the thread that watches."""

    def __init__(self, threads: int) -> None:
        self.workers = self.slots = 1
        self._steps, self._name, self._stopped = 0, "", False
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(1)
        self._last: list[Future[Trained]] = []

    def submit(self, job: Job) -> Future[Trained]:
        self._steps, self._name = 0, job.name
        self._last = [self._pool.submit(work, job, self._count)]
        return self._last[0]

    def steps(self) -> Mapping[str, int]:
        return {self._name: self._steps}

    def held_up(self) -> str | None:
        return None

    def _count(self, steps: int) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._steps += steps

    def stop(self, *, at_once: bool) -> None:
        self._stopped = at_once
        _let_go(self._last)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if wait(self._last, SOON).not_done:
            log.warning(
                "waiting for up to %.0f s for the step that is being computed; a second interrupt"
                " ends the command at once",
                GRACE,
            )
            if wait(self._last, GRACE).not_done:
                abandon()


class _Processes:
    """Trains in worker processes.

    Each belongs to a pool of its own, so that one that dies takes no other fleet with it.
    """

    def __init__(self, workers: int, threads: int) -> None:
        # Workers are copies of a process that has imported everything already, so each, and each
        # that replaces a dead one, starts at once. A GPU is safe: that process never touches one.
        # Tracing imports torch._dynamo, which takes a second.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["onepass.studies.work", "torch._dynamo"])
        self.workers = self.slots = workers
        self._threads = threads
        self._own = threading.local()  # each thread here leads one worker
        self._pools: list[ProcessPoolExecutor] = []
        # One per fleet: a lock that they shared would be left locked by a process that is killed.
        self._counters: dict[str, Any] = {}
        self._busy: dict[str, ProcessPoolExecutor] = {}  # by the name of the fleet
        # By process id: the seconds that it has computed, and since when they have not grown.
        self._resting: dict[int, tuple[float | None, float]] = {}
        self._changing = threading.Lock()
        self._stopped = False
        resource_tracker.ensure_running()  # now: the thread that starts it gets interrupts again
        self._leading: list[Future[Trained]] = []
        self._leaders = ThreadPoolExecutor(workers, initializer=_hold_interrupts)
        # It takes seconds: now, while the driver plans.
        self._leaders.submit(forkserver.ensure_running)

    def submit(self, job: Job) -> Future[Trained]:
        future = self._leaders.submit(self._lead, job)
        self._leading = [other for other in self._leading if not other.done()] + [future]
        return future

    def _lead(self, job: Job) -> Trained:
        try:
            pool = self._pool()
            self._own.counter.value = 0
            self._counters[job.name], self._busy[job.name] = self._own.counter, pool
            submitted = pool.submit(_work_in_process, job)
            if self._stopped:
                self._signal(signal.SIGTERM)  # it was started after all others had been stopped
            return submitted.result()
        except BrokenProcessPool:
            self._own.pool = None
            raise WorkerDiedError("a worker process was killed (out of memory?)") from None
        finally:
            self._counters.pop(job.name, None)
            self._busy.pop(job.name, None)

    def _pool(self) -> ProcessPoolExecutor:
        if getattr(self._own, "pool", None) is None:
            with self._changing:
                if self._stopped:
                    raise KeyboardInterrupt
                self._own.counter = self._context.RawValue("q", 0)
                arguments = (self._own.counter, self._threads)
                self._own.pool = ProcessPoolExecutor(
                    1, mp_context=self._context, initializer=_start_worker, initargs=arguments
                )
                self._pools.append(self._own.pool)
        pool: ProcessPoolExecutor = self._own.pool
        return pool

    def steps(self) -> Mapping[str, int]:
        return {name: int(counter.value) for name, counter in self._counters.copy().items()}

    def held_up(self) -> str | None:
        """A sentence about processes that are stopped, or hang: a frozen one never computes."""
        now, helper = time.monotonic(), fork_server()
        ends: dict[int, Callable[[], None]] = {
            process.pid: process.kill for process in self._processes()
        }
        if helper is not None:  # a leader may wait for it
            ends[helper] = kill_fork_server
        stopped = {pid for pid in ends if is_stopped(pid)}
        busy = {process.pid for process in self._processes(self._busy.copy().values())}
        before, self._resting = self._resting, {}
        for pid in stopped | busy:
            spent = cpu_seconds(pid)
            same = spent is not None and before.get(pid, (None,))[0] == spent
            self._resting[pid] = before[pid] if same else (spent, now)
        for pid, (_, since) in self._resting.items():
            if now - since > STOPPED and pid in ends:
                ends[pid]()
        hanging = {pid for pid, (_, since) in self._resting.items() if now - since > QUIET}
        pids = " ".join(map(str, sorted(stopped or hanging)))
        if stopped:
            return (
                f"stopped worker processes: {pids}; let them go on by 'kill -CONT {pids}', or"
                " interrupt the study"
            )
        if hanging:
            return (
                f"worker processes that have computed nothing for a minute: {pids}; let them go on"
                " if they are frozen, or interrupt the study"
            )
        return None

    def stop(self, *, at_once: bool) -> None:
        with self._changing:
            self._stopped = True
        _let_go(self._leading)
        self._leaders.shutdown(wait=False, cancel_futures=True)
        began = time.monotonic()
        while not self._ended():
            waited = time.monotonic() - began
            # Stopped processes end by SIGKILL only.
            self._signal(signal.SIGTERM if waited < SOON else signal.SIGKILL)
            # A leader may wait for the fork server, to start a process or to hear of its end.
            if waited > 2 * SOON:
                kill_fork_server()
            if waited > GRACE:
                abandon()
                return
            time.sleep(0.02)
        wake_helpers()
        try:
            for pool in self._pools:
                within(GRACE, partial(pool.shutdown, wait=True, cancel_futures=True))
        except TimeoutError:
            abandon()

    def _ended(self) -> bool:
        """Whether no leader is about to start a process, and no process is alive."""
        return all(future.done() for future in self._leading) and not any(
            process.is_alive() for process in self._processes()
        )

    def _processes(self, pools: Iterable[ProcessPoolExecutor] | None = None) -> list[Any]:
        return [
            process
            for pool in (self._pools if pools is None else pools)
            for process in list((pool._processes or {}).values())
        ]

    def _signal(self, kind: signal.Signals) -> None:
        for process in self._processes():
            process.kill() if kind == signal.SIGKILL else process.terminate()


def _hold_interrupts() -> None:
    """Block Ctrl-C, which is for the driver alone, in this thread and the processes it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


_counter: Any = None


def _start_worker(counter: Any, threads: int) -> None:
    global _counter
    _counter = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()


def _end_with_parent() -> None:
    """End this worker when its driver has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_in_process(job: Job) -> Trained:
    def count(steps: int) -> None:
        _counter.value += steps  # no other process writes to it

    return work(job, count)


def default_workers(device: str) -> int:
    """One process per core on a CPU, one in all on a GPU."""
    if device == "cuda":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
