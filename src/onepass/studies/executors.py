"""Where fleets are trained: in this process, in local processes, or on a Dask cluster. A worker returns records; only the driver stores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any, Protocol

import torch

from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError, first_line
from onepass.metrics import Record
from onepass.studies.store import Provenance
from onepass.studies.work import Job, work

log = logging.getLogger(__name__)

Trained = tuple[list[Record], Provenance]


class WorkerDiedError(Exception):
    """A worker ended in the middle of a fleet."""


class Executor(Protocol):
    """Somewhere to train fleets: `workers` of them at a time, as far as is known; it takes up to `slots` at once."""

    workers: int
    slots: int

    def submit(self, job: Job) -> Future[Trained]: ...
    def steps(self) -> int: ...  # run-steps done so far, where it can be known
    def stop(self, *, at_once: bool) -> None: ...


@contextmanager
def executor(workers: int, threads: int, scheduler: str | None = None) -> Iterator[Executor]:
    """In process with one worker, else local processes; with the address of a scheduler, its cluster."""
    made: Executor = _Cluster(scheduler, threads) if scheduler is not None else _InProcess(threads) if workers == 1 else _Processes(workers, threads)
    try:
        yield made
    except BaseException:
        made.stop(at_once=True)
        raise
    made.stop(at_once=False)


def _let_go(futures: Iterable[Future[Trained]]) -> None:
    """Give back the locks of futures that this thread still holds.

    An interrupt may come right after the thread that watches has taken one, before Python knows that it is to be given back. Then whoever works
    for the future could never finish it, and we would wait for ever.
    """
    for future in futures:
        with suppress(RuntimeError):  # it is not ours (any more)
            while True:
                future._condition.release()


class _InProcess:
    """Trains in this process, beside the thread that watches."""

    def __init__(self, threads: int) -> None:
        self.workers = self.slots = 1
        self._steps, self._stopped = 0, False
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(1)
        self._last: list[Future[Trained]] = []

    def submit(self, job: Job) -> Future[Trained]:
        self._last = [self._pool.submit(work, job, self._count)]
        return self._last[0]

    def steps(self) -> int:
        return self._steps

    def _count(self, steps: int) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._steps += steps

    def stop(self, *, at_once: bool) -> None:
        self._stopped = at_once
        _let_go(self._last)
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Processes:
    """Trains in worker processes. Each belongs to a pool of its own, so that one that dies takes no other fleet with it."""

    def __init__(self, workers: int, threads: int) -> None:
        # Workers are copies of a process that has imported everything already, so each, and each that replaces a dead one, starts at once.
        # A GPU is safe: that process never touches one.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["onepass.studies.work", "torch._dynamo"])  # tracing imports the latter, which takes a second
        self.workers = self.slots = workers
        self._threads = threads
        self._own = threading.local()  # each thread here leads one worker
        self._pools: list[ProcessPoolExecutor] = []
        self._counters: list[Any] = []  # one a process: a lock that they shared would be left locked by one that is killed
        self._changing = threading.Lock()
        self._stopped = False
        resource_tracker.ensure_running()  # now: whoever starts it is open to interrupts again
        self._leading: list[Future[Trained]] = []
        self._leaders = ThreadPoolExecutor(workers, initializer=_hold_interrupts)
        self._leaders.submit(forkserver.ensure_running)  # it takes seconds: now, while the driver plans

    def submit(self, job: Job) -> Future[Trained]:
        future = self._leaders.submit(self._lead, job)
        self._leading = [other for other in self._leading if not other.done()] + [future]
        return future

    def _lead(self, job: Job) -> Trained:
        try:
            submitted = self._pool().submit(_work_in_process, job)
            if self._stopped:
                self._terminate()  # it was started after everybody else had been stopped
            return submitted.result()
        except BrokenProcessPool:
            self._own.pool = None
            raise WorkerDiedError("a worker process was killed (out of memory?)") from None

    def _pool(self) -> ProcessPoolExecutor:
        if getattr(self._own, "pool", None) is None:
            with self._changing:
                if self._stopped:
                    raise KeyboardInterrupt
                counter = self._context.RawValue("q", 0)
                arguments = (counter, self._threads)
                self._own.pool = ProcessPoolExecutor(1, mp_context=self._context, initializer=_start_worker, initargs=arguments)
                self._counters.append(counter)
                self._pools.append(self._own.pool)
        pool: ProcessPoolExecutor = self._own.pool
        return pool

    def steps(self) -> int:
        return sum(int(counter.value) for counter in self._counters)

    def stop(self, *, at_once: bool) -> None:
        with self._changing:
            self._stopped = True
        _let_go(self._leading)
        self._leaders.shutdown(wait=not at_once, cancel_futures=True)
        while not all(future.done() for future in self._leading):  # a leader may be about to start a process
            self._terminate()
            time.sleep(0.02)
        self._terminate()  # they have nothing to do any more, and would take a second to say good-bye
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def _terminate(self) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):  # terminate_workers() from Python 3.14 on
                process.terminate()


def _hold_interrupts() -> None:
    """Ctrl-C is for the driving process alone: the processes that this thread starts inherit this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


_counter: Any = None


def _start_worker(counter: Any, threads: int) -> None:
    global _counter
    _counter = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()


def _end_with_parent() -> None:
    """A worker whose driver was killed has nobody to work for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_in_process(job: Job) -> Trained:
    def count(steps: int) -> None:
        _counter.value += steps  # nobody else writes to it

    return work(job, count)


class _Cluster:
    """Trains on the workers of a Dask cluster. Dask gives the fleet of a worker that dies to another one, three times."""

    def __init__(self, scheduler: str, threads: int) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise InputError("a cluster needs the package distributed: install onepass[cluster]") from None
        self._address = scheduler
        _check_address(scheduler)
        try:
            self._client = Client(scheduler, timeout=10, set_as_default=False)
        except Exception as reason:  # whatever Dask makes of an address that answers, but not as a scheduler does
            raise InputError(f"no Dask scheduler answers at {scheduler} ({first_line(reason)}): start one, or leave out --scheduler") from None
        there = len(self._client.scheduler_info(n_workers=-1)["workers"])
        if there == 0:
            log.warning("there is no worker at %s yet: waiting for one", scheduler)
        self.workers = max(1, there)
        self.slots = sys.maxsize  # workers come and go: the scheduler knows best
        self._threads = threads
        self._futures: list[Any] = []

    def submit(self, job: Job) -> Future[Trained]:
        done: Future[Trained] = Future()
        done.set_running_or_notify_cancel()
        remote = self._client.submit(_work_on_cluster, job, self._threads, key=f"onepass-{job.method}-{job.name}-{len(self._futures)}", pure=False)
        self._futures.append(remote)
        remote.add_done_callback(lambda finished: self._pass_on(finished, done))
        return done

    def _pass_on(self, remote: Any, done: Future[Trained]) -> None:
        from distributed.scheduler import KilledWorker

        try:
            done.set_result(remote.result())
        except KilledWorker as reason:
            done.set_exception(WorkerDiedError(first_line(reason)))
        except CancelledError:
            done.set_exception(InputError(f"the Dask scheduler at {self._address} is gone: start it, and give the same command again"))
        except BaseException as reason:
            done.set_exception(reason)

    def steps(self) -> int:
        return 0

    def stop(self, *, at_once: bool) -> None:
        if at_once:
            with suppress(Exception):  # whatever the cluster says, we are leaving
                self._client.cancel(self._futures, force=True)
        self._client.close()


def _check_address(scheduler: str) -> None:
    """Somebody must listen there; Dask itself is wordy about it."""
    found = re.fullmatch(r"tcp://(?:\[(?P<six>[^]]+)\]|(?P<four>[^:/]+)):(?P<port>\d{1,5})", scheduler)
    if found is None:
        raise InputError(f"'{scheduler}' is not the address of a Dask scheduler: write tcp://HOST:PORT")
    try:
        socket.create_connection((found["six"] or found["four"], int(found["port"])), timeout=10).close()
    except (OSError, OverflowError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise InputError(f"no Dask scheduler answers at {scheduler} ({why}): start one, or leave out --scheduler") from None


def _work_on_cluster(job: Job, threads: int) -> Trained:
    torch.set_num_threads(threads)
    keep_freed_memory()
    return work(job)


def default_workers(device: str) -> int:
    """One process a core on a CPU, one in all on a GPU."""
    if device == "cuda":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
