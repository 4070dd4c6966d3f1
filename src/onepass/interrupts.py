"""Interrupts that wait: a Ctrl-C in the middle of a change is delivered once the change is whole.

Python runs the handler of a signal between any two instructions of the main thread, so a
`KeyboardInterrupt` can strike between two writes that belong together. Inside `Held` a signal is
remembered and delivered at the end. Code of the user that runs inside, such as the forward pass of
a module, is put into `Opened`: there an interrupt strikes at once, and the code around it undoes
what was begun, with interrupts held again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, at a tenth of its cost: steps can be short
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # whose handlers commonly raise

_main = threading.main_thread()
_depth = 0  # how many `Held` the main thread is in
_shut = False  # are signals remembered instead of delivered?
_before: dict[int, Any] = {}  # the handlers that ours stands in for
_pending: list[int] = []
_later: list[int] = []  # those whose handlers wait for the end of the outermost `Held`
_handling = False  # does a handler of the user run inside `Held`?
_struck: BaseException | None = None  # what a handler has raised inside `Held`


class Later(BaseException):
    """Raised inside a handler that uses what is being changed: it is called again once all is whole."""


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
        global _depth, _shut, _struck
        if self._main:
            _depth -= 1
            if _depth == 0:
                _struck = None
                while _later:
                    _pending.append(_later.pop(0))
            if not self._was:
                try:
                    _shut = False
                    _deliver()
                finally:
                    if _depth == 0:
                        _uninstall()
                    _shut = False  # around an inner one there is code of the user

    def in_handler(self) -> bool:
        """Was this entered by a handler that interrupts another `Held`?"""
        return _handling and self._main


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


def struck(error: BaseException) -> bool:
    """Did a handler of the user raise this? It is then passed on as it is."""
    return error is _struck


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
    global _shut, _handling, _struck
    if _shut:
        if number not in _pending:
            _pending.append(number)
        return
    outer, inside = _handling, _depth > 0
    # What was begun is undone without another interrupt. Code of the user may go on after this one.
    _shut = inside and (frame is None or str(frame.f_globals.get("__name__")).startswith("onepass."))
    if number in _pending:
        _pending.remove(number)
    try:
        _handling = inside
        _before[number](number, frame)
    except Later:
        _later.append(number)
    except BaseException as error:
        _struck = error if inside else None
        raise
    finally:
        _handling = outer
    _shut = False


def _deliver() -> None:
    try:
        while _pending and not _shut:
            if _signal.getsignal(_pending[0]) is not _handle:  # the user has set another one inside
                signal.raise_signal(_pending.pop(0))
            else:
                signal.raise_signal(_pending[0])  # which takes it off the list
    finally:
        if _pending and not _shut:
            _deliver()


def _in_child() -> None:
    """In a child that another thread has forked, calls of the main thread do not go on."""
    global _main, _depth, _shut, _handling
    if threading.main_thread() is not _main:
        _main, _depth, _shut, _handling = threading.main_thread(), 0, False, False
        _pending.clear()
        _later.clear()
        _uninstall()


os.register_at_fork(after_in_child=_in_child)
