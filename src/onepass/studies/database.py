"""Connections to the SQLite file of a study: for its one writer, and for readers.

A damaged file is refused in one sentence.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from onepass.errors import InputError
from onepass.files import (
    MALFORMED,
    check_writable,
    make_folder,
    new_folder,
    resolved,
    temporary_name,
)
from onepass.studies import tables
from onepass.studies.concurrent import ChangeDetector
from onepass.studies.folder import (
    ARRAYS,
    FILE,
    damaged,
    is_file,
    no_study,
    refuse_links,
    remove_leftovers,
)
from onepass.studies.locking import busy, can_lock, held, running
from onepass.studies.recovery import DamagedError, left, recovered

LARGEST_VALUE = 2**24  # bytes of one value in a row: a recipe has thousands
CREATION = 2.0  # seconds that a reader waits for a study that is just being created


@contextmanager
def writing(
    folder: Path, create: Mapping[str, Any] | None
) -> Iterator[tuple[sqlite3.Connection, ChangeDetector]]:
    """A connection for the one process that may write, and its detector of other writers.

    A folder without a study gets one that knows `create` about itself; with None it is refused.
    """
    path = resolved(folder / FILE)
    if create is None and not is_file(path):
        raise no_study(folder)
    check_writable(path)
    refuse_links(folder)
    with ExitStack() as stack:
        with new_folder(folder):
            stack.enter_context(held(folder))
        make_folder(folder / "arrays")
        remove_leftovers(folder)
        with refusing(path):
            if path.exists() and not path.is_file():
                raise DamagedError("it is no plain file")
            if not path.exists() or not path.stat().st_size:
                _create(path, folder, create)
            if left(path):
                with recovered(path, _results):  # raises for what SQLite must not apply
                    pass
            connection = _connect(f"{path.absolute().as_uri()}?mode=rw")
        with closing(connection):
            with refusing(path):
                _begin_writing(connection)
                detector = ChangeDetector(path, connection)
            try:
                yield connection, detector
            except BaseException:
                with suppress(InputError):  # the error that ended the study is raised, not this one
                    detector.check()
                raise
            detector.check()


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection for a reader, which changes nothing; another process may be writing."""
    path = resolved(folder / FILE)
    _wait_for_creation(path, folder)
    with ExitStack() as stack:
        with refusing(path):
            written, place = running(folder), path
            if not written and left(path):
                place = stack.enter_context(recovered(path, _results))
            connection = stack.enter_context(closing(_connect_to_read(place, alone=not written)))
            current = _begin_reading(connection, stack.enter_context(closing(_connect(":memory:"))))
        yield current


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise whatever is wrong with the file as one sentence."""
    try:
        yield
    except InputError:
        raise
    except sqlite3.OperationalError as reason:
        if "locked" not in str(reason):
            raise damaged(path, str(reason)) from None
        raise InputError(
            f"another process holds {path} and does not let go of it: wait for it, or end it, and"
            " try again"
        ) from None
    except (DamagedError, sqlite3.Error, OSError, *MALFORMED) as reason:
        raise damaged(path, str(reason) or type(reason).__name__) from None


def _wait_for_creation(path: Path, folder: Path) -> None:
    patience = time.monotonic() + CREATION
    while not is_file(path) or not path.stat().st_size:
        if not running(folder):
            if is_file(path):
                return  # an empty file, which is refused like any other damage
            raise no_study(folder)
        if time.monotonic() > patience:
            raise InputError(f"the study in {folder} is just being created: try again in a moment")
        time.sleep(0.05)


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    return connection


def _connect_to_read(path: Path, alone: bool) -> sqlite3.Connection:
    """A connection that makes no files, since a folder may be read-only.

    A file of an older version has a write-ahead log, for which SQLite makes files. So it is read as
    it is where no process writes; and so is one whose file system cannot lock.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with path.open("rb") as file:
        logged = file.read(19)[18:] == b"\x02"
        lockable = can_lock(file.fileno())
    connection = _connect(uri + ("&immutable=1" if (logged and alone) or not lockable else ""))
    try:
        connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:  # a journal or log in a folder that is read-only
        connection.close()
        return _connect(f"{uri}&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _begin_writing(connection: sqlite3.Connection) -> None:
    """Bring a store up to date, with a rollback journal: at rest a study is then one file."""
    version = tables.check(connection)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    tables.migrate(connection, version)
    connection.execute("COMMIT")


def _begin_reading(connection: sqlite3.Connection, copy: sqlite3.Connection) -> sqlite3.Connection:
    """The connection to read from.

    A file of an older version is read from a copy in memory that is brought up to date; the file
    itself is left to the next writer.
    """
    version = tables.check(connection)
    if version == tables.VERSION:
        return connection
    connection.backup(copy)
    copy.execute("BEGIN")
    tables.migrate(copy, version)
    copy.execute("COMMIT")
    return copy


def _results(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Unit and arrays of every record; raises for a damaged store."""
    tables.check(connection)
    study = {key: json.loads(value) for key, value in tables.rows(connection, "study")}
    found = {(row[0], row[1]) for row in tables.rows(connection, "records")}
    units = len(list(tables.rows(connection, "units")))
    if study["counts"] != {"units": units, "records": len(found)}:
        raise DamagedError("rows are missing")
    return found


def _create(path: Path, folder: Path, create: Mapping[str, Any] | None) -> None:
    """Make the file of a study, which gets its name only when it is complete."""
    results = sum(bool(ARRAYS.fullmatch(file.name)) for file in (folder / "arrays").iterdir())
    if results:
        raise DamagedError(f"it is empty, though arrays/ holds {results} files of results")
    if create is None:
        raise DamagedError("it is empty")
    if left(path):  # SQLite would remove them, and a log may hold all of a study
        names = " and ".join(beside.name for beside in left(path))
        raise DamagedError(f"{names} beside it is not of a new study: move it away")
    temporary = path.with_name(f"{temporary_name(path.name)}-{secrets.token_hex(8)}")
    try:
        with closing(_connect(f"{temporary.absolute().as_uri()}?mode=rwc")) as connection:
            connection.execute("PRAGMA journal_mode = MEMORY")  # a killed process leaves none
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            tables.create(connection, create)
            connection.execute("COMMIT")
        if not path.exists():
            _name(temporary, path)
        elif not path.stat().st_size:
            os.replace(temporary, path)
        else:
            raise busy(folder)
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path) -> None:
    """Give a file its name, which no other file may have."""
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # a machine that sees no locks was quicker
        raise busy(path.parent) from None
    except OSError:  # a file system without hard links
        os.rename(temporary, path)
