"""Locks that let one process at a time write to a study.

A writer holds two locks: on the file `lock`, as every version of onepass does, and on the folder
itself, which stays when that file is removed. The system releases both when the process ends,
however it ends. Where locks do not reach other machines, `ChangeDetector` notices other writers.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepass.errors import InputError
from onepass.files import cannot_write

LOCK = "lock"
PATIENCE = 1.0  # seconds: a process that only checks for a writer holds the lock for a moment, too


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the process that writes to the study in a folder, or raise."""
    handles: list[int] = []
    new = not os.path.lexists(folder / LOCK)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            handles.append(os.open(folder / LOCK, flags, 0o644))
            handles.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as reason:
            raise cannot_write(folder / LOCK, reason) from None
        try:
            _take(handles[0], folder)
            _try_other_kind(handles[0])
        except OSError as reason:
            if new:  # no process can hold it
                with suppress(OSError):
                    os.unlink(folder / LOCK)
            raise InputError(
                f"the file system of {folder} cannot lock files ({reason.strerror or reason}), so"
                " that two processes could write at once: choose a folder on a local disk, and"
                " copy the study there if there is one already"
            ) from None
        with suppress(OSError):  # some network file systems lock files only
            _take(handles[1], folder)
        yield
    finally:
        for handle in handles:
            os.close(handle)


def busy(folder: Path) -> InputError:
    """The sentence for a study that another process writes to."""
    return InputError(
        f"another process is working on the study in {folder}: wait for it, or choose another"
        " folder"
    )


def _take(handle: int, folder: Path) -> None:
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > patience:
                raise busy(folder) from None
            time.sleep(0.1)


def can_lock(handle: int) -> bool:
    """Whether SQLite can lock this file to read it; else it takes the file for busy, and waits."""
    try:
        _try_other_kind(handle, fcntl.LOCK_SH)
    except OSError:
        return False
    return True


def _try_other_kind(handle: int, kind: int = fcntl.LOCK_EX) -> None:
    """Raise an OSError where SQLite cannot lock: it locks by `fcntl`, and other bytes than this."""
    with suppress(BlockingIOError, PermissionError):  # it is locked, so that it can be
        fcntl.lockf(handle, kind | fcntl.LOCK_NB, 1)
        fcntl.lockf(handle, fcntl.LOCK_UN, 1)


def running(folder: Path) -> bool:
    """Whether a process is writing to this study now; False where that cannot be known."""
    return any(_locked(path) for path in (folder / LOCK, folder))


def _locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
