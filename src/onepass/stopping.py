"""Ctrl-C and SIGTERM: the first one stops a command in good order, the second one ends it at once.

The second one does so whatever the command waits for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NoReturn, TypeVar

APART = 0.1  # seconds: tools like `timeout` send one signal twice, to a process and to its group
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
AGAIN = b"\0"  # a request to send the interrupt again; no signal has this number

Returned = TypeVar("Returned")

_abandoned = threading.Event()  # something was left behind that may never end


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came."""


def exit_code(stop: KeyboardInterrupt) -> int:
    return CODES[signal.SIGTERM if isinstance(stop, TerminatedError) else signal.SIGINT]


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl-C does, once; the second signal ends all processes.

    Python runs signal handlers only in the main thread, which may be the one that hangs. So a
    thread listens where the interpreter reports each signal as soon as it arrives.

    An interrupt can come where Python ignores errors, as in the callback of a weak reference. The
    thread then sends it again.
    """
    listening, reporting = os.pipe()
    os.set_blocking(reporting, False)
    first: list[signal.Signals] = []
    hook = sys.unraisablehook

    def ignored(lost: sys.UnraisableHookArgs) -> None:
        if first and isinstance(lost.exc_value, KeyboardInterrupt):
            first.clear()
            os.write(reporting, AGAIN)  # nothing more: locks may be held here
        else:
            hook(lost)

    def interrupt(number: int, _: object) -> None:
        if not first:
            first.append(signal.Signals(number))
            raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError

    threading.Thread(target=_listen, args=(listening,), daemon=True).start()
    # A shell's background processes ignore Ctrl-C, and go on doing so.
    heard = [kind for kind in CODES if signal.getsignal(kind) is not signal.SIG_IGN]
    handlers = {kind: signal.signal(kind, interrupt) for kind in heard}
    former = signal.set_wakeup_fd(reporting, warn_on_full_buffer=False)
    sys.unraisablehook = ignored
    try:
        yield
    except TerminatedError:
        raise SystemExit(CODES[signal.SIGTERM]) from None
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(former)
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        os.close(reporting)


def _listen(reports: int) -> None:
    first: float | None = None
    kind, sent = signal.SIGINT, 0
    with open(reports, "rb", buffering=0) as source:
        while report := source.read(1):
            if report == AGAIN:
                time.sleep(APART / 10)  # until the code that ignores errors has ended
                sent += 1
                signal.pthread_kill(threading.main_thread().ident or 0, kind)
            elif report[0] not in CODES:
                continue
            elif sent:
                sent -= 1  # ours
            elif first is None:
                kind, first = signal.Signals(report[0]), time.monotonic()
            elif time.monotonic() - first > APART:
                leave(CODES[signal.Signals(report[0])])


def within(seconds: float, call: Callable[[], Returned]) -> Returned:
    """Return or raise what a call does; raise a TimeoutError if it takes longer.

    The call is then left behind in a thread, which does not keep the process from ending.
    """
    outcome: list[Callable[[], Returned]] = []

    def attempt() -> None:
        try:
            value = call()
            outcome.append(lambda: value)
        except BaseException as reason:
            error = reason

            def fail() -> Returned:
                raise error

            outcome.append(fail)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]()


def abandon() -> None:
    """Note that a thread or process was left behind: the command does not wait for it to end."""
    _abandoned.set()


def end(code: object) -> NoReturn:
    """End the command with an exit code, without waiting for what was abandoned.

    From now on SIGTERM alone ends it at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Python's end it would show a traceback
    if _abandoned.is_set():
        leave(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)  # type: ignore[arg-type]


def leave(code: int) -> NoReturn:
    """End this process now, and the processes that it started, stopped ones included."""
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):
            child.kill()
    tracker = _resource_tracker()
    # Also those that Python has begun to start and does not know yet.
    for pid in _descendants(os.getpid()):
        _send(pid, signal.SIGCONT if pid == tracker else signal.SIGKILL)
    wake_helpers()
    kill_fork_server()
    with suppress(Exception):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # the progress bar hides the cursor
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            within(1, stream.flush)
    os._exit(code)


def kill_fork_server() -> None:
    """End Python's fork server and the processes that it started; what waits for it gets an error.

    Without the server Python takes all of them for ended, and one that just began is unknown to it.
    """
    helper = fork_server()
    if helper is not None:
        _send(helper, signal.SIGSTOP)  # so that it starts no others
        for pid in (*_descendants(helper), helper):
            _send(pid, signal.SIGKILL)


def wake_helpers() -> None:
    """Let a stopped resource tracker of Python's go on, and end a stopped fork server.

    Otherwise they would outlive this process.
    """
    _send(_resource_tracker(), signal.SIGCONT)
    if is_stopped(fork_server()):
        kill_fork_server()


def _descendants(of: int) -> list[int]:
    """The processes that one has started, and those that they started; none without Linux."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [of]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _resource_tracker() -> int | None:
    pid: int | None = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    return pid


def fork_server() -> int | None:
    pid: int | None = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid


def _send(pid: int | None, kind: signal.Signals) -> None:
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, kind)


def cpu_seconds(pid: int) -> float | None:
    """The time that a process has computed; None if it is gone, or this is no Linux."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the number that Linux gives this clock
    except (OSError, OverflowError):
        return None


def is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal; a frozen cgroup cannot be seen here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):  # it is gone, or this is no Linux
        return False
