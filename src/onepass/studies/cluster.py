"""A Dask cluster as a place to train: which workers it has, whether they have the same software.

Every question to it has a time limit."""

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

CONNECT = 15.0  # seconds for a scheduler to answer the first time
LOOK = 2.0  # seconds between two looks at who is there
ASK = 60.0  # seconds for a new worker to tell its versions: it imports torch first
SILENT = 300.0  # seconds without a word of the scheduler: it is gone
DESERTED = 6 * 3600.0  # seconds without a worker: none will come
SOON = 10.0  # seconds after which either is said
CLOSE = 5.0  # seconds for good-byes

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


def _question() -> Callable[[], Fingerprint | str]:
    """What a worker is asked: its fingerprint, or why it cannot tell.

    Dask sends a function inside another one as code. One that it sends by its name ends a worker
    that cannot import it, and nobody learns why.
    """

    def ask() -> Fingerprint | str:
        try:
            from onepass.studies import cluster

            return cluster.fingerprint()
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}"

    return ask


def _silence_dask() -> None:
    """What it would log about a scheduler that is gone, with tracebacks, is said in a sentence."""
    for name in ("distributed", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def difference(ours: Fingerprint, theirs: Mapping[str, object]) -> str | None:
    """The first thing that is not the same.

    >>> difference({"python": "3.11", "numpy": "2.0"}, {"python": "3.11", "numpy": "1.26"})
    'numpy 1.26, not 2.0'
    """
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    return (
        f"{differing[0]} {theirs.get(differing[0], 'unknown')}, not {ours[differing[0]]}"
        if differing
        else None
    )


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
        self._address, self._threads = scheduler, threads
        check_address(scheduler)
        try:
            self._client = within(
                CONNECT, lambda: Client(scheduler, timeout=2 * CONNECT, set_as_default=False)
            )
            there = within(CONNECT, self._client.nthreads)
        except Exception as reason:  # whatever Dask makes of what answers, but is no scheduler
            abandon()  # Dask may go on asking
            foreign = "what answers there is another program, or another version of Dask"
            why = first_line(reason) if isinstance(reason, TimeoutError) else foreign
            raise InputError(
                f"no Dask scheduler answers at {scheduler} ({why}): start one, or leave out --scheduler"
            ) from None
        self.slots = sys.maxsize  # workers come and go: the scheduler knows best
        self._futures: list[Any] = []
        self._same: set[str] = set()  # workers with the same software
        self._refused: str | None = None  # the sentence about one that has not
        self._asking, self._closing = threading.Lock(), threading.Event()
        self._compare(there)  # which takes long if a worker does not answer
        self._answered = time.monotonic()  # when the scheduler was heard last
        self._peopled = self._answered  # when there was a worker last
        if not there:
            self._peopled -= SOON  # to be said at once
        self._refuse()
        self.workers = max(1, len(there))
        threading.Thread(target=self._look, daemon=True).start()

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
            done.set_exception(
                InputError(
                    f"the Dask scheduler at {self._address} is gone: start it, and give the same command again"
                )
            )
        except ForeignWorkerError as reason:
            done.set_exception(InputError(self._sentence(*reason.args)))
        except Exception as reason:
            with suppress(
                Exception
            ):  # a worker that lacks one of our modules fails in its own words
                self._compare(within(CONNECT, self._client.nthreads))
            done.set_exception(InputError(self._refused) if self._refused is not None else reason)
        except BaseException as reason:
            done.set_exception(reason)

    def _checked(self, answer: Any) -> Trained:
        """What a worker returned, if it was made with our software."""
        try:
            records, made, address, theirs = answer
        except (TypeError, ValueError):
            raise InputError(
                f"a Dask worker at {self._address} has another version of onepass: install there what is installed here"
            ) from None
        if difference(fingerprint(), theirs) is not None:
            raise ForeignWorkerError(address, theirs)
        return records, made

    def steps(self) -> Mapping[str, int]:
        return {}

    def held_up(self) -> str | None:
        self._refuse()
        now, again = time.monotonic(), "and give the same command again"
        if now - self._answered > SILENT:
            raise InputError(
                f"the Dask scheduler at {self._address} has not answered for {_time(SILENT)}: start it anew, {again}"
            )
        if now - self._peopled > DESERTED:
            raise InputError(
                f"there has been no Dask worker at {self._address} for {_time(DESERTED)}: start one, {again}"
            )
        if now - self._answered > SOON:
            return f"the Dask scheduler at {self._address} does not answer; waiting for up to {_time(SILENT)}"
        if now - self._peopled > SOON:
            return f"there is no Dask worker at {self._address}; waiting for one for up to {_time(DESERTED)}"
        return None

    def _look(self) -> None:
        """Note which workers there are, until the end.

        Where the scheduler does not answer, this thread waits, and `held_up` sees for how long.
        """
        while not self._closing.wait(LOOK):
            with suppress(Exception):  # that nothing was heard is noticed
                there = self._client.nthreads()
                if self._closing.is_set():
                    return
                self._answered = time.monotonic()
                if there:
                    self._peopled, self.workers = self._answered, len(there)
                # Not here: a new worker imports torch before it answers.
                threading.Thread(target=self._compare, args=(there,), daemon=True).start()

    def _compare(self, there: Mapping[str, int]) -> None:
        """Ask workers that are new for their versions."""
        self._same &= set(there)
        new = [address for address in there if address not in self._same]
        if not new or not self._asking.acquire(blocking=False):
            return
        try:
            answers = within(
                ASK, lambda: self._client.run(_question(), workers=new, on_error="return")
            )
        except Exception:  # one has gone, or is busy: it is asked again, and every fleet asks, too
            return
        finally:
            self._asking.release()
        for address, theirs in answers.items():
            if isinstance(theirs, dict) and difference(fingerprint(), theirs) is None:
                self._same.add(address)
            elif isinstance(theirs, (dict, str)):  # anything else: it was not reached
                self._refused = self._sentence(address, theirs)

    def _sentence(self, address: str, theirs: Fingerprint | str) -> str:
        has = (
            f"cannot import ours ({theirs})"
            if isinstance(theirs, str)
            else f"has {difference(fingerprint(), theirs)}"
        )
        return f"the Dask worker at {address} has other software: it {has}; install there what is installed here, and start it anew"

    def _refuse(self) -> None:
        if self._refused is not None:
            raise InputError(self._refused)

    def stop(self, *, at_once: bool) -> None:
        self._closing.set()
        if at_once:
            abandon()  # a thread of Dask's may still wait for a result
            with suppress(Exception):  # whatever the cluster says, we are leaving
                within(CLOSE, lambda: self._client.cancel(self._futures, force=True))
        try:
            within(2 * CLOSE, lambda: self._client.close(timeout=CLOSE))
        except Exception:
            abandon()


def _time(seconds: float) -> str:
    """In words.

    >>> _time(300), _time(6 * 3600)
    ('5 minutes', '6 hours')
    """
    return (
        f"{seconds / 3600:g} hours"
        if seconds >= 7200
        else f"{seconds / 60:g} minutes"
        if seconds >= 120
        else f"{seconds:g} seconds"
    )


def check_address(scheduler: str) -> None:
    """Something must listen there; Dask itself is wordy about it."""
    found = re.fullmatch(
        r"tcp://(?:\[(?P<six>[^]]+)\]|(?P<four>[^:/]+)):(?P<port>\d{1,5})", scheduler
    )
    if found is None:
        raise InputError(
            f"'{scheduler}' is not the address of a Dask scheduler: write tcp://HOST:PORT"
        )
    try:
        socket.create_connection(
            (found["six"] or found["four"], int(found["port"])), timeout=10
        ).close()
    except (
        OSError,
        OverflowError,
        ValueError,
    ) as reason:  # the last one: a name with odd characters
        why = getattr(reason, "strerror", None) or reason
        raise InputError(
            f"no Dask scheduler answers at {scheduler} ({why}): start one, or leave out --scheduler"
        ) from None


def _work_on_cluster(
    job: Job, threads: int, expected: Fingerprint
) -> tuple[list[Record], Provenance, str, Fingerprint]:
    """Train a fleet if this worker has the driver's software, which is returned with the records."""
    from distributed import get_worker

    address = get_worker().address
    if difference(expected, fingerprint()) is not None:
        raise ForeignWorkerError(address, fingerprint())
    torch.set_num_threads(threads)
    keep_freed_memory()
    return *work(job), address, fingerprint()
