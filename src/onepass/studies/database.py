"""The SQLite file of a study: its tables and their version, opening it for one writer and for readers, and refusing it when it is damaged.

Every row carries a checksum of its values; `put` writes it and `rows` checks it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from onepass.errors import InputError
from onepass.files import TEMPORARY, StorageError, cannot_write, canonical, check_writable, digest, make_folder

FILE = "study.sqlite"
APPLICATION = 0x6F6E6570  # "onep": what SQLite's header says the file is
VERSION = 1

TABLES = {
    "study": ("key", "value"),
    "units": ("id", "configuration", "fleet", "place", "traceback"),
    "records": ("unit", "arrays", "violations", "seconds", "state_bytes", "diverged", "device", "versions", "revision", "finished"),
}

# How a store of version n becomes one of version n + 1: a function of a connection, inside a transaction.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}


@contextmanager
def writing(folder: Path, create: Mapping[str, Any] | None) -> Iterator[sqlite3.Connection]:
    """A connection for the one process that may write; a folder without a study becomes one that knows `create` about itself."""
    path = folder / FILE
    if create is None and not _is_file(path):
        raise no_study(folder)
    check_writable(path)
    make_folder(folder / "arrays")
    lock = _take_lock(folder)
    try:
        with refusing(path):
            _remove_leftovers(folder)
            connection = _connect(f"{path.absolute().as_uri()}?mode=rwc")
        with closing(connection):
            with refusing(path):
                _begin_writing(connection, path, create)
            yield connection
    finally:
        os.close(lock)


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to look at a study with; nothing is changed, and somebody may be writing at the same time."""
    path = folder / FILE
    if not _is_file(path):
        raise no_study(folder)
    # Where nobody is writing and no write-ahead log was left, the file can be read as it is, even in a folder that is read-only.
    alone = not running(folder) and not path.with_name(path.name + "-wal").exists()
    with refusing(path):
        connection = _connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}")
    with closing(connection), closing(_connect(":memory:")) as copy:
        with refusing(path):
            current = _begin_reading(connection, copy)
        yield current


def rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """All rows of a table, each checked."""
    for *values, checksum in connection.execute(f"SELECT {', '.join(TABLES[table])}, checksum FROM {table}"):
        if checksum != _checksum(table, values):
            raise DamagedError(f"a row of its table '{table}' was altered")
        yield tuple(values)


def running(folder: Path) -> bool:
    """Is a process working on this study right now?"""
    try:
        handle = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as reason:  # a name that is too long, a folder that may not be entered
        raise InputError(f"cannot read {path} ({reason.strerror}): choose another folder") from None


def check_target(path: Path) -> None:
    """Raise if a table cannot be written to `path`, or should not: the files of a study are its results."""
    check_writable(path)
    path = Path(os.path.realpath(path))
    ours = path.name.startswith(FILE) or path.name in ("lock", "progress.json")
    if (ours and (path.parent / FILE).exists()) or (path.parent.name == "arrays" and (path.parent.parent / FILE).exists()):
        raise InputError(f"{path} belongs to a study: choose another place")


def no_study(folder: Path) -> InputError:
    return InputError(f"there is no study in {folder}: start one with 'onepass run RECIPE --out {folder}'")


class DamagedError(Exception):
    """Why a store cannot be used."""


def damaged(path: Path, why: str) -> StorageError:
    """The sentence for a file that is not what was written."""
    return StorageError(f"{path} cannot be used ({' '.join(why.split())}): put back a copy of it, or choose another folder and run the study again")


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Whatever is wrong with the file is one sentence."""
    try:
        yield
    except InputError:
        raise
    except (DamagedError, sqlite3.Error, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as reason:
        raise damaged(path, str(reason) or type(reason).__name__) from None


def _remove_leftovers(folder: Path) -> None:
    """Files that a killed process had begun to write."""
    for place in (folder, folder / "arrays", *folder.glob("checkpoints/*")):
        for leftover in place.glob(f"{TEMPORARY}*"):
            if leftover.is_file():
                leftover.unlink(missing_ok=True)


def _take_lock(folder: Path) -> int:
    path = folder / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as reason:
        raise cannot_write(path, reason) from None
    patience = time.monotonic() + 1  # who only asks whether somebody is working holds it for a moment, too
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system takes it back when the process ends, however it ends
            return handle
        except BlockingIOError:
            if time.monotonic() > patience:
                os.close(handle)
                raise InputError(f"another process is working on the study in {folder}: wait for it, or choose another folder") from None
            time.sleep(0.1)


def _begin_writing(connection: sqlite3.Connection, path: Path, create: Mapping[str, Any] | None) -> None:
    """Make a store of an empty file, or bring one up to date."""
    version = _check(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    if version == 0:
        if create is None or any(path.with_name("arrays").iterdir()):
            raise DamagedError("it is empty")
        _create(connection, create)
    else:
        _migrate(connection, version)
    connection.execute("COMMIT")


def _begin_reading(connection: sqlite3.Connection, copy: sqlite3.Connection) -> sqlite3.Connection:
    """What to read from: the file, or a copy in memory that is brought up to date; the file itself is for the next writer."""
    version = _check(connection)
    if version == 0:
        raise DamagedError("it is empty")
    if version == VERSION:
        return connection
    connection.backup(copy)
    copy.execute("BEGIN")
    _migrate(copy, version)
    copy.execute("COMMIT")
    return copy


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)


def _check(connection: sqlite3.Connection) -> int:
    """The version of a sound store; 0 for an empty file."""
    connection.execute("PRAGMA trusted_schema = OFF")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if version == 0 and application == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        return 0
    if application != APPLICATION:
        raise DamagedError("it is not a study of onepass")
    if version > VERSION:
        raise InputError(f"this study was written by a newer onepass (version {version} of the store, this one knows {VERSION}): update onepass")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedError(str(found))
    return version


def _create(connection: sqlite3.Connection, study: Mapping[str, Any]) -> None:
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}, checksum)")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    for key, value in {**study, "counts": {"units": 0, "records": 0}}.items():
        put(connection, "study", (key, ordered(value)))


def ordered(value: Any) -> str:
    """JSON that keeps the order of a recipe: of equal grid points the one written first is chosen."""
    return json.dumps(value, allow_nan=False)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for old in range(version, VERSION):
        MIGRATIONS[old](connection)
        connection.execute(f"PRAGMA user_version = {old + 1}")


def put(connection: sqlite3.Connection, table: str, values: Sequence[Any], verb: str = "INSERT OR REPLACE") -> None:
    """Write a row with its checksum."""
    marks = ", ".join("?" * (len(values) + 1))
    connection.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, _checksum(table, values)))


def _checksum(table: str, values: Sequence[Any]) -> str:
    return digest(canonical([table, *values]))
