"""Threads that ask while another one learns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def asking(ask: Callable[[], object], threads: int = 3) -> Iterator[list[int]]:
    """Threads that ask again and again meanwhile, and how many calls each of them has made.

    Their errors are raised at the end.
    """
    stop, counts, errors = threading.Event(), [0] * threads, list[BaseException]()

    def work(number: int) -> None:
        try:
            while not stop.is_set():
                ask()
                counts[number] += 1
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield counts
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    for error in errors:
        raise error


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
