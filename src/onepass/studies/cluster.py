"""A Dask cluster as a place to train: which workers it has, and whether their software is the same.

Every request to it has a time limit.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError, first_line
from onepass.metrics import Record
from onepass.stopping import abandon, within
from onepass.studies.executors import Trained, WorkerDiedError
from onepass.studies.provenance import provenance, software
from onepass.studies.store import Provenance
from onepass.studies.work import Job, work

CONNECT = 15.0  # seconds for a scheduler to respond the first time
POLL = 2.0  # seconds between two requests for the list of workers
REPORT = 60.0  # seconds for a new worker to send its versions: it imports torch first
SILENT = 300.0  # seconds without a response of the scheduler: it is gone
DESERTED = 6 * 3600.0  # seconds without a worker: none will come
SOON = 10.0  # seconds after which either is reported
CLOSE = 5.0  # seconds to close the connection

Fingerprint = dict[str, str]


class ForeignWorkerError(Exception):
    """A worker's software is not the driver's: the worker's address and fingerprint."""


@cache
def fingerprint() -> Fingerprint:
    """What has to be the same on all machines of a study; of Python, without the patch version."""
    versions = dict(provenance("cpu").versions)
    return {
        "onepass and torch": software(),
        **versions,
        "python": versions["python"].rpartition(".")[0],
    }


def _report() -> Callable[[], Fingerprint | str]:
    """What a worker runs to report its fingerprint, or why it cannot.

    Dask sends a function inside another one as code. One that it sends by its name ends a worker
    that cannot import it, and the reason is lost.
    """

    def report() -> Fingerprint | str:
        try:
            from onepass.studies import cluster

            return cluster.fingerprint()
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}"

    return report


def _silence_dask() -> None:
    """Log no tracebacks of Dask's: a scheduler that is gone is reported in a sentence."""
    for name in ("distributed", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def difference(ours: Fingerprint, theirs: Mapping[str, object]) -> str | None:
    """The first thing that is not the same.

    >>> difference({"python": "3.11", "numpy": "2.0"}, {"python": "3.11", "numpy": "1.26"})
    'numpy 1.26, not 2.0'
    """
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if not differing:
        return None
    name = differing[0]
    return f"{name} {theirs.get(name, 'unknown')}, not {ours[name]}"


class Cluster:
    """Trains on the workers of a Dask cluster.

    Dask gives the fleet of a worker that dies to another one, three times.
    """

    def __init__(self, scheduler: str, threads: int) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise InputError(
                "a cluster needs the package distributed: install onepass[cluster]"
            ) from None
        _silence_dask()
        self._address = scheduler
        self._threads = threads
        check_address(scheduler)
        try:
            self._client = within(
                CONNECT, lambda: Client(scheduler, timeout=2 * CONNECT, set_as_default=False)
            )
            there = within(CONNECT, self._client.nthreads)
        except Exception as reason:  # whatever Dask raises for a program that is no scheduler
            abandon()  # Dask may go on trying
            foreign = "what answers there is another program, or another version of Dask"
            why = first_line(reason) if isinstance(reason, TimeoutError) else foreign
            raise _no_scheduler(scheduler, why) from None
        self.slots = sys.maxsize  # workers come and go: the scheduler knows best
        self._futures: list[Any] = []
        self._same: set[str] = set()  # workers with the same software
        self._refused: str | None = None  # the sentence about one that has not
        self._comparing = threading.Lock()
        self._closing = threading.Event()
        self._compare(there)  # which takes long if a worker does not respond
        self._heard = time.monotonic()  # when the scheduler responded last
        self._peopled = self._heard  # when there was a worker last
        if not there:
            self._peopled -= SOON  # to be reported at once
        self._refuse()
        self.workers = max(1, len(there))
        threading.Thread(target=self._poll, daemon=True).start()

    def submit(self, job: Job) -> Future[Trained]:
        done: Future[Trained] = Future()
        done.set_running_or_notify_cancel()
        key = f"onepass-{job.method}-{job.name}-{len(self._futures)}"
        remote = self._client.submit(
            _work_on_cluster, job, self._threads, fingerprint(), key=key, pure=False
        )
        self._futures.append(remote)
        remote.add_done_callback(lambda finished: self._pass_on(finished, done))
        return done

    def _pass_on(self, remote: Any, done: Future[Trained]) -> None:
        from distributed.scheduler import KilledWorker

        try:
            done.set_result(self._checked(remote.result(timeout=2 * SILENT)))
        except KilledWorker as reason:
            done.set_exception(WorkerDiedError(first_line(reason)))
        except CancelledError:
            gone = InputError(
                f"the Dask scheduler at {self._address} is gone: start it, and give the same"
                " command again"
            )
            done.set_exception(gone)
        except ForeignWorkerError as reason:
            done.set_exception(InputError(self._sentence(*reason.args)))
        except Exception as reason:
            # A worker that lacks one of our modules fails with an error of Python's.
            with suppress(Exception):
                self._compare(within(CONNECT, self._client.nthreads))
            done.set_exception(InputError(self._refused) if self._refused is not None else reason)
        except BaseException as reason:
            done.set_exception(reason)

    def _checked(self, returned: Any) -> Trained:
        """What a worker returned, if it was made with our software."""
        try:
            records, made, address, theirs = returned
        except (TypeError, ValueError):
            raise InputError(
                f"a Dask worker at {self._address} has another version of onepass: install there"
                " what is installed here"
            ) from None
        if difference(fingerprint(), theirs) is not None:
            raise ForeignWorkerError(address, theirs)
        return records, made

    def steps(self) -> Mapping[str, int]:
        return {}

    def held_up(self) -> str | None:
        self._refuse()
        silent, deserted = time.monotonic() - self._heard, time.monotonic() - self._peopled
        again = "and give the same command again"
        if silent > SILENT:
            raise InputError(
                f"the Dask scheduler at {self._address} has not answered for {_time(SILENT)}: start"
                f" it anew, {again}"
            )
        if deserted > DESERTED:
            raise InputError(
                f"there has been no Dask worker at {self._address} for {_time(DESERTED)}: start"
                f" one, {again}"
            )
        if silent > SOON:
            return (
                f"the Dask scheduler at {self._address} does not answer; waiting for up to"
                f" {_time(SILENT)}"
            )
        if deserted > SOON:
            return (
                f"there is no Dask worker at {self._address}; waiting for one for up to"
                f" {_time(DESERTED)}"
            )
        return None

    def _poll(self) -> None:
        """Note which workers there are, until the end.

        Where the scheduler does not respond, this thread waits, and `held_up` reports how long.
        """
        while not self._closing.wait(POLL):
            with suppress(Exception):  # `held_up` notices that there was no response
                there = self._client.nthreads()
                if self._closing.is_set():
                    return
                self._heard = time.monotonic()
                if there:
                    self._peopled, self.workers = self._heard, len(there)
                # Not in this thread: a new worker imports torch before it responds.
                threading.Thread(target=self._compare, args=(there,), daemon=True).start()

    def _compare(self, there: Mapping[str, int]) -> None:
        """Compare the versions of workers that are new with ours."""
        self._same &= set(there)
        new = [address for address in there if address not in self._same]
        if not new or not self._comparing.acquire(blocking=False):
            return
        try:
            reports = within(
                REPORT, lambda: self._client.run(_report(), workers=new, on_error="return")
            )
        except Exception:  # one has gone, or is busy: there is a next time, and fleets compare, too
            return
        finally:
            self._comparing.release()
        for address, theirs in reports.items():
            if isinstance(theirs, dict) and difference(fingerprint(), theirs) is None:
                self._same.add(address)
            elif isinstance(theirs, (dict, str)):  # anything else: it was not reached
                self._refused = self._sentence(address, theirs)

    def _sentence(self, address: str, theirs: Fingerprint | str) -> str:
        if isinstance(theirs, str):
            has = f"cannot import ours ({theirs})"
        else:
            has = f"has {difference(fingerprint(), theirs)}"
        return (
            f"the Dask worker at {address} has other software: it {has}; install there what is"
            " installed here, and start it anew"
        )

    def _refuse(self) -> None:
        if self._refused is not None:
            raise InputError(self._refused)

    def stop(self, *, at_once: bool) -> None:
        self._closing.set()
        if at_once:
            abandon()  # a thread of Dask's may still wait for a result
            with suppress(Exception):  # whatever it raises, this command ends
                within(CLOSE, lambda: self._client.cancel(self._futures, force=True))
        try:
            within(2 * CLOSE, lambda: self._client.close(timeout=CLOSE))
        except Exception:
            abandon()


def _time(seconds: float) -> str:
    """
    >>> _time(300), _time(6 * 3600)
    ('5 minutes', '6 hours')
    """
    if seconds >= 7200:
        return f"{seconds / 3600:g} hours"
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g} seconds"


def check_address(scheduler: str) -> None:
    """Raise unless a program listens there; Dask itself would log a lot about it."""
    address = r"tcp://(?:\[(?P<six>[^]]+)\]|(?P<four>[^:/]+)):(?P<port>\d{1,5})"
    found = re.fullmatch(address, scheduler)
    if found is None:
        raise InputError(
            f"'{scheduler}' is not the address of a Dask scheduler: write tcp://HOST:PORT"
        )
    place = found["six"] or found["four"], int(found["port"])
    try:
        socket.create_connection(place, timeout=10).close()
    except (OSError, OverflowError, ValueError) as reason:  # ValueError: odd characters in a name
        raise _no_scheduler(scheduler, getattr(reason, "strerror", None) or reason) from None


def _no_scheduler(address: str, why: object) -> InputError:
    return InputError(
        f"no Dask scheduler answers at {address} ({why}): start one, or leave out --scheduler"
    )


def _work_on_cluster(
    job: Job, threads: int, expected: Fingerprint
) -> tuple[list[Record], Provenance, str, Fingerprint]:
    """Train a fleet if this worker has the driver's software.

    Returned are its records and their provenance, this worker's address and its software.
    """
    from distributed import get_worker

    address = get_worker().address
    if difference(expected, fingerprint()) is not None:
        raise ForeignWorkerError(address, fingerprint())
    torch.set_num_threads(threads)
    keep_freed_memory()
    return *work(job), address, fingerprint()
