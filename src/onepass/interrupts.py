"""Interrupts that wait: a Ctrl-C in the middle of a change is delivered when that is complete.

Python runs the handler of a signal between any two instructions of the main thread, so a
`KeyboardInterrupt` can come between two writes that belong together. Inside `Held` a signal is
only noted, and its handler is called at the end, when the change is complete.

Code of the user that runs inside, such as the forward pass of a module, is put into `Opened`. There
Ctrl-C raises at once if its handler is Python's own, and the code around it undoes what was begun.
A handler of the user's own always waits for the end: it may want to save what is being changed.
"""

from __future__ import annotations

# `signal` wraps it, at ten times the cost: steps can be short.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from types import FrameType
from typing import Any

# Those whose handlers commonly raise, or save what there is (cluster schedulers send them early).
SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_depth = 0  # how many `Held` the main thread is in
_open = False  # whether it is in `Opened` inside them
_pending: list[int] = []


class _StandIn:
    """Our handler of a signal, in the place of another one.

    It refers to that one itself: a handler of the user's own may call this one later on.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _depth == 0:
            self.handler(number, frame)
        else:
            if number not in _pending:
                _pending.append(number)
            if _open:
                _raise_interrupt()


_ours: dict[int, _StandIn] = {}  # by the number of the signal


class Held:
    """Signals that come inside are delivered at the end. It may be nested.

    It has no effect in threads other than the main thread.
    """

    __slots__ = ("_main", "_was")

    def __enter__(self) -> None:
        global _depth, _open
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            if _depth == 0:
                _install()
            self._was = _open
            _open = False
            _depth += 1  # from the next instruction on nothing is raised

    def __exit__(self, *_: object) -> None:
        global _depth, _open
        if self._main:
            _depth -= 1
            _open = self._was
            if _depth == 0:
                try:
                    _uninstall()
                finally:
                    _deliver()
            elif _open:
                _raise_interrupt()


class Opened:
    """Inside `Held`: a Ctrl-C that has come, or comes now, raises at once."""

    __slots__ = ("_main", "_was")

    def __enter__(self) -> None:
        global _open
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._was = _open
            _open = True
            _raise_interrupt()

    def __exit__(self, *_: object) -> None:
        global _open
        if self._main:
            _open = self._was


def _install() -> None:
    _pending.clear()
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        # Without a handler in Python, a signal is ignored or ends the process: it cannot raise.
        if isinstance(handler, _StandIn):  # an interrupt came while the handler was put back
            _ours[number] = handler
        elif callable(handler):
            if number not in _ours or _ours[number].handler is not handler:
                _ours[number] = _StandIn(handler)
            _signal.signal(number, _ours[number])


def _uninstall() -> None:
    # A handler that is back may raise here. Ours then stays for the others, and passes signals on.
    for number, ours in _ours.items():
        if _signal.getsignal(number) is ours:  # not one that the user has set inside
            _signal.signal(number, ours.handler)


def _raise_interrupt() -> None:
    """Raise a Ctrl-C that has come, in code of the user inside `Held`."""
    global _open
    if signal.SIGINT in _pending and _ours[signal.SIGINT].handler is signal.default_int_handler:
        _open = False  # no other interrupt while what was begun is undone
        _pending.remove(signal.SIGINT)
        raise KeyboardInterrupt


def _deliver() -> None:
    """Call the handler of each signal that has come, whatever the others raise."""
    if _pending:
        try:
            signal.raise_signal(_pending.pop(0))
        finally:
            _deliver()


def _in_child() -> None:
    """Forget the parent's main thread in a child that another thread has forked.

    A child has only the thread that forked it.
    """
    global _depth, _open, _main
    if threading.main_thread() is not _main:
        _main, _depth, _open = threading.main_thread(), 0, False
        _pending.clear()
        _uninstall()


_main = threading.main_thread()
os.register_at_fork(after_in_child=_in_child)
