"""Interrupts that wait: a Ctrl-C in the middle of a change is delivered once the change is whole.

Python runs the handler of a signal between any two instructions of the main thread, so a
`KeyboardInterrupt` can strike between two writes that belong together. Inside `Held` a signal is
remembered and delivered at the end. Code of the user that runs inside, such as the forward pass of
a module, is put into `Opened`: there an interrupt strikes at once, and the code around it undoes
what was begun, with interrupts held again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, at a tenth of its cost: steps can be short
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # whose handlers commonly raise

_depth = 0  # how many `Held` the main thread is in
_shut = False  # are signals remembered instead of delivered?
_before: dict[int, Any] = {}  # the handlers that ours stands in for
_pending: list[int] = []


class Held:
    """Signals that come inside are delivered at the end. It may be nested; other threads pass."""

    __slots__ = ("_main", "_was")

    def __enter__(self) -> None:
        global _depth, _shut
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            if not _shut:
                _install()
            self._was = _shut
            _shut = True  # from the next instruction on nothing is raised
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth, _shut
        if self._main:
            _depth -= 1
            _shut = self._was
            if not _shut:
                if _depth == 0:
                    _uninstall()
                _deliver()


class Opened:
    """Inside `Held`: signals that have come, or come now, are delivered at once."""

    __slots__ = ("_was",)

    def __enter__(self) -> None:
        global _shut
        self._was = _shut
        if _shut and threading.current_thread() is threading.main_thread():
            _shut = False
            _deliver()

    def __exit__(self, *_: object) -> None:
        global _shut
        if self._was and threading.current_thread() is threading.main_thread():
            _shut = True


def _install() -> None:
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        # Without a handler in Python, a signal is ignored or ends the process: it cannot raise.
        if callable(handler) and handler is not _handle:
            _before[number] = handler
            _signal.signal(number, _handle)


def _uninstall() -> None:
    # An interrupt here leaves our handler behind, which then passes signals on.
    for number, handler in _before.items():
        if _signal.getsignal(number) is _handle:  # not one that the user has set inside
            _signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    global _shut
    if _shut:
        if number not in _pending:
            _pending.append(number)
        return
    _shut = _depth > 0  # if the handler raises, what was begun is undone without another interrupt
    _before[number](number, frame)
    _shut = False


def _deliver() -> None:
    if _pending:
        number = _pending.pop(0)
        try:
            signal.raise_signal(number)
        finally:
            _deliver()
