"""The SQLite file of a study: its tables and their version, opening it for one writer and for readers, and refusing it when it is damaged.

Every row carries a checksum of its values; `put` writes it and `rows` checks it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.errors import InputError
from onepass.files import (
    TEMPORARY,
    StorageError,
    canonical,
    check_writable,
    digest,
    make_folder,
    new_folder,
    remove_if_abandoned,
    resolved,
    temporary_name,
)
from onepass.studies.concurrent import Guard
from onepass.studies.locking import LOCK, can_lock, held, running
from onepass.studies.recovery import DamagedError, left, recovered

FILE = "study.sqlite"
APPLICATION = 0x6F6E6570  # "onep": what SQLite's header says the file is
VERSION = 1
PROGRESS = ".onepass-progress.json"  # what the driving process says about itself once a second
ARRAYS = re.compile(r"[0-9a-f]{32}\.safetensors")
FLEET = re.compile(r"[0-9a-f]{16}")
LARGEST_VALUE = 2**24  # bytes of one value in a row: a recipe has thousands
CREATION = 2.0  # seconds that a reader waits for a study that is just being created

TABLES = {
    "study": ("key", "value"),
    "units": ("id", "configuration", "fleet", "place", "traceback"),
    "records": (
        "unit",
        "arrays",
        "violations",
        "seconds",
        "state_bytes",
        "diverged",
        "device",
        "versions",
        "revision",
        "finished",
    ),
}

JSON = {"study": ["value"], "units": ["configuration"], "records": ["violations", "versions"]}
# Lists and dictionaries in the JSON of a table. Each takes up to two hundred bytes, and 100 000 units
# have half a million.
NESTED = 2**21

# How a store of version n becomes one of version n + 1: a function of a connection, inside a transaction.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}


@dataclass(frozen=True)
class Writing:
    """What the one process that may write works with."""

    connection: sqlite3.Connection
    guard: Guard


@contextmanager
def writing(folder: Path, create: Mapping[str, Any] | None) -> Iterator[Writing]:
    """A connection for the one process that may write; a folder without a study becomes one that knows `create` about itself."""
    path = resolved(folder / FILE)
    if create is None and not _is_file(path):
        raise no_study(folder)
    check_writable(path)
    _refuse_links(folder)
    with ExitStack() as stack:
        with new_folder(folder):
            stack.enter_context(held(folder))
        make_folder(folder / "arrays")
        _remove_leftovers(folder)
        with refusing(path):
            if path.exists() and not path.is_file():
                raise DamagedError("it is no plain file")
            if not path.exists() or not path.stat().st_size:
                _create(path, folder, create)
            _check_what_was_left(path)
            connection = _connect(f"{path.absolute().as_uri()}?mode=rw")
        with closing(connection):
            with refusing(path):
                _begin_writing(connection)
                guard = Guard(path, connection)
            try:
                yield Writing(connection, guard)
            except BaseException:
                with suppress(InputError):  # what ended the study is said, not this
                    guard.check()
                raise
            guard.check()


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """A connection to look at a study with, while another process may be writing.

    Nothing is changed.
    """
    path = resolved(folder / FILE)
    _wait_for_creation(path, folder)
    with ExitStack() as stack:
        with refusing(path):
            busy, place = running(folder), path
            if not busy and left(path):
                place = stack.enter_context(recovered(path, _results))
            connection = stack.enter_context(closing(_connect_to_read(place, alone=not busy)))
            current = _begin_reading(connection, stack.enter_context(closing(_connect(":memory:"))))
        yield current


def _wait_for_creation(path: Path, folder: Path) -> None:
    patience = time.monotonic() + CREATION
    while not _is_file(path) or not path.stat().st_size:
        if not running(folder):
            if _is_file(path):
                return  # an empty file, which is refused like any other damage
            raise no_study(folder)
        if time.monotonic() > patience:
            raise InputError(f"the study in {folder} is just being created: try again in a moment")
        time.sleep(0.05)


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


def _check_what_was_left(path: Path) -> None:
    if left(path):
        with recovered(path, _results):
            pass


def _results(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Unit and arrays of every record; raises for a damaged store."""
    _check(connection)
    counts = {key: json.loads(value) for key, value in rows(connection, "study")}["counts"]
    found = {(row[0], row[1]) for row in rows(connection, "records")}
    if counts != {"units": len(list(rows(connection, "units"))), "records": len(found)}:
        raise DamagedError("rows are missing")
    return found


def rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """All rows of a table, each checked."""
    room = NESTED
    for row in connection.execute(f"SELECT {', '.join(TABLES[table])}, checksum FROM {table}"):
        if not is_sound(table, row):
            raise DamagedError(f"a row of its table '{table}' was altered")
        room -= nested(table, row)
        if room < 0:
            raise DamagedError(f"its table '{table}' has more in it than a study")
        yield row[:-1]


def nested(table: str, row: Sequence[Any]) -> int:
    """How many lists and dictionaries the JSON in a row may have."""
    texts = (row[TABLES[table].index(name)] for name in JSON[table])
    return sum(text.count("[") + text.count("{") for text in texts if isinstance(text, str))


def is_sound(table: str, row: Sequence[Any]) -> bool:
    """Does the last value of a row agree with the others?"""
    return bool(row[-1] == _checksum(table, row[:-1]))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as reason:  # a name that is too long, a folder that may not be entered
        raise InputError(f"cannot read {path} ({reason.strerror}): choose another folder") from None


def check_target(path: Path, study: Path | None = None) -> None:
    """Raise if `path` cannot be written to, or should not: the files of a study are its results.

    `study` is the folder of one that may be begun only later.
    """
    found = resolved(path)
    if study is not None and resolved(study).is_relative_to(found):
        raise InputError(f"{path} is the folder of the study, or above it: choose another place")
    for place in (found, *found.parents):
        ours = place.name.startswith((FILE, TEMPORARY)) or place.name in (
            LOCK,
            PROGRESS,
            "arrays",
            "checkpoints",
        )
        if ours and (
            os.path.lexists(place.parent / FILE)
            or (study is not None and place.parent == resolved(study))
        ):
            raise InputError(f"{path} belongs to a study: choose another place")
    check_writable(path)


def no_study(folder: Path) -> InputError:
    return InputError(
        f"there is no study in {folder}: start one with 'onepass run RECIPE --out {folder}'"
    )


def damaged(path: Path, why: str) -> StorageError:
    """The sentence for a file that is not what was written."""
    return StorageError(
        f"{path} cannot be used ({' '.join(why.split())}): put back a copy of it, or choose another folder and run the study again"
    )


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Whatever is wrong with the file is one sentence."""
    try:
        yield
    except InputError:
        raise
    except sqlite3.OperationalError as reason:
        if "locked" not in str(reason):
            raise damaged(path, str(reason)) from None
        raise InputError(
            f"another process holds {path} and does not let go of it: wait for it, or end it, and try again"
        ) from None
    except (
        DamagedError,
        sqlite3.Error,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as reason:
        raise damaged(path, str(reason) or type(reason).__name__) from None


def _refuse_links(folder: Path) -> None:
    """A study from elsewhere could lead with them to files of the user's."""
    own = (folder / name for name in (FILE, LOCK, "arrays", "checkpoints"))
    for path in (*own, *_fleets(folder)):
        if os.path.islink(path):
            raise InputError(
                f"{path} is a link, and a study is written to no other place: put there what it leads to, or choose another folder"
            )


def _fleets(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoints/*") if FLEET.fullmatch(path.name)]


def _remove_leftovers(folder: Path) -> None:
    """Files that a killed process had begun to write."""
    for place in (folder, folder / "arrays", *_fleets(folder)):
        for leftover in place.glob(f"{TEMPORARY}*"):
            remove_if_abandoned(leftover)


def _create(path: Path, folder: Path, create: Mapping[str, Any] | None) -> None:
    """Make the file of a study, whole before it has its name."""
    results = sum(bool(ARRAYS.fullmatch(file.name)) for file in (folder / "arrays").iterdir())
    if create is None or results:
        raise DamagedError(
            "it is empty"
            + (f", though arrays/ holds {results} files of results" if results else "")
        )
    if left(path):  # SQLite would remove them, and a log may hold all of a study
        names = " and ".join(beside.name for beside in left(path))
        raise DamagedError(f"{names} beside it is not of a new study: move it away")
    temporary = path.with_name(f"{temporary_name(path.name)}-{secrets.token_hex(8)}")
    try:
        with closing(_connect(f"{temporary.absolute().as_uri()}?mode=rwc")) as connection:
            connection.execute("PRAGMA journal_mode = MEMORY")  # a killed process leaves none
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                connection.execute(definition(table))
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            for key, value in {**create, "counts": {"units": 0, "records": 0}}.items():
                put(connection, "study", (key, ordered(value)))
            connection.execute("COMMIT")
        if not path.exists():
            _name(temporary, path)
        elif not path.stat().st_size:
            os.replace(temporary, path)
        else:
            raise InputError(
                f"another process is working on the study in {folder}: wait for it, or choose another folder"
            )
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path) -> None:
    """Give a file its name, which no other file may have."""
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError):  # it was quicker, on a machine that sees no locks
        raise InputError(
            f"another process is working on the study in {path.parent}: wait for it, or choose another folder"
        ) from None
    except OSError:  # a file system without hard links
        os.rename(temporary, path)


def definition(table: str) -> str:
    columns = TABLES[table]
    return f"CREATE TABLE {table} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}, checksum)"


def _begin_writing(connection: sqlite3.Connection) -> None:
    """Bring a store up to date.

    With a rollback journal, a study is one file whenever nothing is being written.
    """
    version = _check(connection)
    if version == 0:
        raise DamagedError("it is empty")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
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
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    return connection


def _check(connection: sqlite3.Connection) -> int:
    """The version of a sound store; 0 for an empty file."""
    connection.execute("PRAGMA trusted_schema = OFF")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if (
        version == 0
        and application == 0
        and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    ):
        return 0
    if application != APPLICATION:
        raise DamagedError("it is not a study of onepass")
    if version > VERSION:
        raise InputError(
            f"this study was written by a newer onepass (version {version} of the store, this one knows {VERSION}): update onepass"
        )
    for name, made in connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    ):
        if name not in TABLES or made != definition(name):  # a view could compute for ever
            raise DamagedError(f"its '{name}' is no table of a study")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedError(str(found))
    return version


def ordered(value: Any) -> str:
    """JSON that keeps the order of a recipe: of equal grid points the one written first is chosen."""
    return json.dumps(value, allow_nan=False)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for old in range(version, VERSION):
        MIGRATIONS[old](connection)
        connection.execute(f"PRAGMA user_version = {old + 1}")


def put(
    connection: sqlite3.Connection,
    table: str,
    values: Sequence[Any],
    verb: str = "INSERT OR REPLACE",
) -> None:
    """Write a row with its checksum."""
    marks = ", ".join("?" * (len(values) + 1))
    connection.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, _checksum(table, values)))


def _checksum(table: str, values: Sequence[Any]) -> str:
    return digest(canonical([table, *values]))
