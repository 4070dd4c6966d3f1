"""One call at a time: other threads see a learner before a batch or after it."""

from __future__ import annotations

import os
import threading
from collections import deque

from onepass.errors import InputError
from onepass.interrupts import Held, Opened

# Which lock each waiting thread waits for: two learners may call each other, in callbacks.
_waiting: dict[int, Exclusive] = {}
_changing = threading.Lock()


class Exclusive:
    """A context for one thread at a time, first come, first served; a thread may enter again.

    The order matters: a plain lock is taken back at once by a loop that learns, and other threads
    would starve. Interrupts wait until the outermost call is over (`onepass.interrupts`).
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._own = threading.Lock()  # for the few instructions that change what follows
        self._owner: int | None = None  # the thread inside
        self._depth = 0
        self._queue: deque[tuple[threading.Lock, int]] = deque()  # threads that wait
        self._held: list[Held] = []

    def __enter__(self) -> None:
        shield = Held()
        shield.__enter__()
        try:
            self._enter(threading.get_ident())
        except BaseException:
            shield.__exit__()
            raise
        self._held.append(shield)

    def __exit__(self, *_: object) -> None:
        shield = self._held.pop()
        self._depth -= 1
        if self._depth == 0:
            self._pass_on()
        shield.__exit__()

    def _enter(self, me: int) -> None:
        if self._process != os.getpid():
            self._after_fork(me)
        if self._owner != me:
            with self._own:
                alone = self._owner is None
                if alone:
                    self._owner = me
                else:
                    turn = threading.Lock()
                    turn.acquire()
                    self._queue.append((turn, me))
            if not alone:
                self._wait(turn, me)
        self._depth += 1

    def _wait(self, turn: threading.Lock, me: int) -> None:
        try:
            with _changing:
                _waiting[me] = self
                circular = self._waits_for(me)
            if circular:
                how = "call one from the watch or the module of the other in a single thread only"
                raise InputError(f"two learners wait for each other: {how}")
            with Opened():
                turn.acquire()
        except BaseException:
            with self._own:
                waiting = (turn, me) in self._queue
                if waiting:
                    self._queue.remove((turn, me))
            if not waiting:  # the turn had come already
                self._pass_on()
            raise
        finally:
            _waiting.pop(me, None)

    def _waits_for(self, me: int) -> bool:
        """Whether the thread inside waits for another learner, and so on, up to one of `me`."""
        lock: Exclusive | None = self
        while lock is not None:
            owner = lock._owner
            if owner is None or owner == me:
                return owner == me and lock is not self
            waits = _waiting.get(owner)
            lock = None if waits is lock else waits  # its turn has just come
        return False

    def _pass_on(self) -> None:
        with self._own:
            turn, self._owner = self._queue.popleft() if self._queue else (None, None)
        if turn is not None:
            turn.release()

    def _after_fork(self, me: int) -> None:
        """In a child there is only the thread that forked: others do not wait and will not end."""
        if self._owner not in (None, me):
            what = "this process was forked while another thread used the learner"
            raise InputError(f"{what}: fork between two calls, or load a saved file in the child")
        self._process, self._own, self._queue = os.getpid(), threading.Lock(), deque()


def _in_child() -> None:
    """A child has none of the threads that wait."""
    global _changing
    _waiting.clear()
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
