"""What a killed process left beside the file of a study: a write-ahead log or a rollback journal.

SQLite applies either to whatever file it finds there, even to one that was copied there later. That
would hide or destroy results, so it is tried out on a copy first.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from onepass.errors import InputError

LOG, JOURNAL = "-wal", "-journal"  # of older versions, and of this one
_MAGIC = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names files to remove
_COUNTER = slice(24, 28)  # in the header: how many transactions changed the file
LARGEST = 2**32  # bytes that are copied: 100 000 units have less, and a file of holes has any size

Results = Callable[[sqlite3.Connection], set[tuple[str, str]]]  # of every record


class DamagedError(Exception):
    """Why a store cannot be used."""


def left(path: Path) -> list[Path]:
    """What a process that was killed left beside the file; raises for what is no plain file.

    SQLite would wait for a pipe, and write to the file that a link leads to.
    """
    found = []
    for beside in (path.with_name(path.name + end) for end in (LOG, JOURNAL)):
        with suppress(FileNotFoundError):
            about = beside.lstat()
            if not stat.S_ISREG(about.st_mode):
                raise DamagedError(f"{beside.name} beside it is no plain file: move it away")
            if about.st_size:
                found.append(beside)
    return found


@contextmanager
def copied(*paths: Path) -> Iterator[Path]:
    """Copies of files, in a temporary folder."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for file, path in zip(files, paths, strict=True):
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise DamagedError(f"{path.name} is larger than that of any study")
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onepass-")))
            for file, path in zip(files, paths, strict=True):
                with (folder / path.name).open("xb") as copy:
                    shutil.copyfileobj(file, copy)
        except OSError as reason:
            raise InputError(
                f"{paths[0]} cannot be copied to the folder for temporary files"
                f" ({reason.strerror or reason}): make room there, or set TMPDIR to another folder"
            ) from None
        yield folder


def private(copy: Path) -> sqlite3.Connection:
    """A connection to a copy that no other process knows.

    It locks nothing: the folder for temporary files may be on a file system that cannot.
    """
    connection = sqlite3.connect(
        f"{copy.absolute().as_uri()}?vfs=unix-none", uri=True, isolation_level=None
    )
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # so that a log needs no shared memory
    return connection


@contextmanager
def recovered(path: Path, results: Results) -> Iterator[Path]:
    """A copy of the file with what was left applied to it; raises where that is of another file."""
    for beside in left(path):
        with beside.open("rb") as file:
            file.seek(max(0, beside.stat().st_size - len(_MAGIC)))
            if beside.name.endswith(JOURNAL) and file.read() == _MAGIC:
                raise DamagedError(f"{beside.name} beside it names other files: move it away")
    with copied(path, *left(path)) as folder:
        _apply(path, folder / path.name, results)
        yield folder / path.name


def _apply(path: Path, copy: Path, results: Results) -> None:
    before = _counter(copy)
    with closing(private(copy)) as connection:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # this applies it
        found = _sound(results, connection)
    names = " and ".join(beside.name for beside in left(path))
    journal = path.with_name(path.name + JOURNAL)
    if found is None or (journal in left(path) and before - _counter(copy) not in (0, 1)):
        raise DamagedError(
            f"{names} beside it is of another state of the study, or damaged: move it away"
        )
    if journal not in left(path):  # a log only adds, a journal may take back what was not finished
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as alone:
            hidden = (_sound(results, alone) or set()) - found
        if hidden:
            raise DamagedError(
                f"{names} beside it is older than it and would hide {len(hidden)} results: move it"
                " away"
            )


def _sound(results: Results, connection: sqlite3.Connection) -> set[tuple[str, str]] | None:
    try:
        return results(connection)
    except Exception:  # whatever is wrong with it: a file may be sound only together with its log
        return None


def _counter(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(28)[_COUNTER], "big")
