"""The result store: one SQLite file a study, and a folder of arrays beside it.

Everything in it is raw; tables and metrics are computed from it. Only the driving process writes. Every row carries a checksum of its values,
the study knows how many rows there are, and arrays are named with their hash, so a damaged store is refused instead of giving wrong numbers.
Nothing here needs torch: looking at a study is quick.

    study    what is to be done: the recipe, and how runs are packed into fleets
    units    every unit of work, and its place in the plan: the row `place` of fleet `fleet`
    records  what came out of a unit
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from onepass.errors import InputError
from onepass.metrics import Array, Record
from onepass.studies.files import TEMPORARY, StorageError, cannot_write, canonical, check_writable, digest, make_folder, write

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


@dataclass(frozen=True)
class Unit:
    """A unit of work: one run of one method, named by the hash of its resolved configuration."""

    configuration: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        return digest(canonical(self.configuration))[:16]

    @property
    def method(self) -> str:
        return str(self.configuration["method"])

    @property
    def part(self) -> str:
        return str(self.configuration["part"])

    @property
    def seed(self) -> int:
        return int(self.configuration["seed"])

    @property
    def hyperparameters(self) -> dict[str, float]:
        return dict(self.configuration["hyperparameters"])


@dataclass(frozen=True)
class Provenance:
    """Where and with what a result was made."""

    device: str
    versions: Mapping[str, str]
    revision: str


@dataclass(frozen=True)
class Entry:
    """A unit in the store: its place in the plan, and how it failed, if it did."""

    unit: Unit
    fleet: int
    place: int
    traceback: str | None = None


@dataclass(frozen=True)
class Stored:
    """What came out of a unit, with its provenance."""

    unit: str
    arrays: str  # the file that holds them, which is also named by its hash
    violations: list[int] | None
    seconds: float
    state_bytes: int
    diverged: bool
    provenance: Provenance
    finished: str


@dataclass
class Contents:
    """All rows of a store."""

    study: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    records: dict[str, Stored] = field(default_factory=dict)


def fleet_name(units: Sequence[str]) -> str:
    """What a fleet of these units, in this order, is called."""
    return digest(canonical(list(units)))[:16]


class Store:
    """A study's results in a folder. `Store.write_to` opens it for the driving process, `Store.read` for anybody."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection
        self._arrays: dict[str, dict[str, NDArray[Any]]] = {}
        self.contents = self._load()

    # ---- opening

    @classmethod
    @contextmanager
    def write_to(cls, folder: Path, create: Mapping[str, Any] | None = None) -> Iterator[Store]:
        """Open a study for writing, which one process at a time may do; a folder without one becomes one with the contents `create`."""
        path = folder / FILE
        if create is None and not _is_file(path):
            raise no_study(folder)
        check_writable(path)
        make_folder(folder / "arrays")
        lock = _take_lock(folder)
        try:
            with _refusing(path):
                _remove_leftovers(folder)
                connection = _connect(f"{path.absolute().as_uri()}?mode=rwc")
            with closing(connection):
                with _refusing(path):
                    _begin_writing(connection, path, create)
                yield cls(folder, connection)
        finally:
            os.close(lock)

    @classmethod
    @contextmanager
    def read(cls, folder: Path) -> Iterator[Store]:
        """Open a study to look at it; nothing is changed, and somebody may be writing to it at the same time."""
        path = folder / FILE
        if not _is_file(path):
            raise no_study(folder)
        # Where nobody is writing and no write-ahead log was left, the file can be read as it is, even in a folder that is read-only.
        alone = not running(folder) and not path.with_name(path.name + "-wal").exists()
        with _refusing(path):
            connection = _connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}")
        with closing(connection), closing(_connect(":memory:")) as copy:
            with _refusing(path):
                current = _begin_reading(connection, copy)
            yield cls(folder, current)

    def _load(self) -> Contents:
        with _refusing(self.folder / FILE):
            contents = Contents()
            self._connection.execute("BEGIN")  # one view of all tables, even if somebody is writing
            for key, value in self._rows("study"):
                contents.study[key] = json.loads(value)
            for identity, configuration, fleet, place, traceback in self._rows("units"):
                entry = Entry(Unit(json.loads(configuration)), fleet, place, traceback)
                contents.entries[identity] = entry
            for unit, arrays, violations, seconds, state_bytes, diverged, device, versions, revision, finished in self._rows("records"):
                provenance = Provenance(device, json.loads(versions), revision)
                stored = Stored(unit, arrays, json.loads(violations), seconds, state_bytes, bool(diverged), provenance, finished)
                contents.records[unit] = stored
            counted = {"units": len(contents.entries), "records": len(contents.records)}
            if contents.study["counts"] != counted or not contents.records.keys() <= contents.entries.keys():
                raise _DamagedError(f"it should have {contents.study['counts']} rows and has {counted}")
            self._connection.execute("COMMIT")
            return contents

    def _rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        for *values, checksum in self._connection.execute(f"SELECT {', '.join(TABLES[table])}, checksum FROM {table}"):
            if checksum != _checksum(table, values):
                raise _DamagedError(f"a row of its table '{table}' was altered")
            yield tuple(values)

    # ---- reading

    def record(self, unit: str) -> Record:
        """The raw record of a finished unit."""
        stored, entry = self.contents.records[unit], self.contents.entries[unit]
        arrays = self._arrays_of(stored.arrays)
        try:
            found = {name: arrays.get(f"{unit}/{name}") for name in ("accuracy", "initial", "curve", "memory_accuracy")}
            return Record(
                seed=entry.unit.seed,
                hyperparameters=entry.unit.hyperparameters,
                accuracy=_array(found["accuracy"]),
                initial=_array(found["initial"]),
                curve=_array(found["curve"]),
                memory_accuracy=None if found["memory_accuracy"] is None else _array(found["memory_accuracy"]),
                violations=stored.violations,
                seconds=stored.seconds,
                state_bytes=stored.state_bytes,
                diverged=stored.diverged,
            )
        except ValueError:
            raise _damaged(self.folder / "arrays" / stored.arrays, f"the accuracies of {unit} are missing") from None

    def _arrays_of(self, name: str) -> dict[str, NDArray[Any]]:
        if name not in self._arrays:
            path = self.folder / "arrays" / name
            try:
                content = path.read_bytes()
            except OSError as reason:
                raise _damaged(path, reason.strerror or str(reason)) from None
            if name != _arrays_name(content):
                raise _damaged(path, "it was truncated or altered")
            try:
                self._arrays[name] = safetensors.numpy.load(content)
            except SafetensorError as reason:
                raise _damaged(path, str(reason)) from None
        return self._arrays[name]

    def open_fleets(self) -> dict[int, list[Entry]]:
        """What is planned and neither finished nor failed, fleet by fleet in the order of the plan."""
        fleets: dict[int, list[Entry]] = {}
        for identity, entry in self.contents.entries.items():
            if identity not in self.contents.records and entry.traceback is None:
                fleets.setdefault(entry.fleet, []).append(entry)
        return {number: sorted(fleets[number], key=lambda e: e.place) for number in sorted(fleets)}

    # ---- writing

    def note(self, **values: Any) -> None:
        """Set what the study knows about itself."""
        with self._change() as contents:
            self._set(contents, values)

    def _set(self, contents: Contents, values: Mapping[str, Any]) -> None:
        contents.study.update(values)
        for key, value in values.items():
            self._put("study", (key, _ordered(value)))

    def restart(self, **study: Any) -> None:
        """Become another study, which only one without results may."""
        with self._change() as contents:
            for table in ("study", "units"):
                self._connection.execute(f"DELETE FROM {table}")
            contents.study, contents.entries = {"counts": None}, {}
            self._set(contents, study)

    def plan(self, fleets: Iterable[Sequence[Unit]]) -> None:
        """Give units their places: each sequence is a new fleet."""
        with self._change() as contents:
            for number, units in enumerate(fleets, start=_next_fleet(contents)):
                for place, unit in enumerate(units):
                    self._place(contents, Entry(unit, number, place))

    def fail(self, units: Iterable[str], traceback: str) -> None:
        """Record that units have failed for good."""
        with self._change() as contents:
            for identity in units:
                entry = contents.entries[identity]
                self._place(contents, Entry(entry.unit, entry.fleet, entry.place, traceback))

    def forgive(self) -> None:
        """Let units that failed be tried again."""
        failed = [entry for entry in self.contents.entries.values() if entry.traceback is not None]
        if failed:
            with self._change() as contents:
                for entry in failed:
                    self._place(contents, Entry(entry.unit, entry.fleet, entry.place))

    def add(self, records: Mapping[str, Record], provenance: Provenance) -> None:
        """Store what came out of some units of the plan, all of it or nothing."""
        arrays: dict[str, NDArray[Any]] = {}
        for unit, record in records.items():
            arrays |= {f"{unit}/{name}": np.ascontiguousarray(getattr(record, name)) for name in ("accuracy", "initial", "curve")}
            if record.memory_accuracy is not None:
                arrays[f"{unit}/memory_accuracy"] = np.ascontiguousarray(record.memory_accuracy)
        content = safetensors.numpy.save(arrays)
        name = _arrays_name(content)
        write(self.folder / "arrays" / name, content)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._change() as contents:
            for unit, record in records.items():
                violations = None if record.violations is None else list(record.violations)
                stored = Stored(unit, name, violations, float(record.seconds), record.state_bytes, record.diverged, provenance, now)
                self._insert_record(contents, stored)

    def take(self, others: Sequence[Store], **study: Any) -> list[int]:
        """Copy the finished units that are not here from other stores, all of them or none, and set what the study knows about itself.

        Returns how many came from each.
        """
        for other in others:
            for name in {stored.arrays for unit, stored in other.contents.records.items() if unit not in self.contents.records}:
                other._arrays_of(name)  # damaged files are refused before anything is changed
        counts = []
        with self._change() as contents:
            for other in others:
                new = [unit for unit in other.contents.records if unit not in contents.records]
                for name in {other.contents.records[unit].arrays for unit in new}:
                    write(self.folder / "arrays" / name, (other.folder / "arrays" / name).read_bytes())
                first = _next_fleet(contents)
                for unit in new:
                    theirs = other.contents.entries[unit]
                    known = contents.entries.get(unit, Entry(theirs.unit, first + theirs.fleet, theirs.place))
                    self._place(contents, Entry(known.unit, known.fleet, known.place))
                    self._insert_record(contents, other.contents.records[unit])
                counts.append(len(new))
            self._set(contents, study)
        return counts

    def _place(self, contents: Contents, entry: Entry) -> None:
        contents.entries[entry.unit.id] = entry
        self._put("units", (entry.unit.id, canonical(entry.unit.configuration), entry.fleet, entry.place, entry.traceback))

    def _insert_record(self, contents: Contents, stored: Stored) -> None:
        made = stored.provenance
        row = (
            *(stored.unit, stored.arrays, canonical(stored.violations), stored.seconds, stored.state_bytes, int(stored.diverged)),
            *(made.device, canonical(dict(made.versions)), made.revision, stored.finished),
        )
        self._put("records", row, "INSERT")  # a unit that has a record already is a mistake, not an update
        contents.records[stored.unit] = stored

    def _put(self, table: str, values: Sequence[Any], verb: str = "INSERT OR REPLACE") -> None:
        _put(self._connection, table, values, verb)

    @contextmanager
    def _change(self) -> Iterator[Contents]:
        """One transaction; the contents in memory change only if it succeeds."""
        changed = Contents(dict(self.contents.study), dict(self.contents.entries), dict(self.contents.records))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield changed
            counts = {"units": len(changed.entries), "records": len(changed.records)}
            if counts != changed.study["counts"]:
                changed.study["counts"] = counts
                self._put("study", ("counts", canonical(counts)))
            self._connection.execute("COMMIT")
        except sqlite3.Error as reason:
            self._roll_back()
            raise cannot_write(self.folder / FILE, reason) from None
        except BaseException:
            self._roll_back()
            raise
        self.contents = changed

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.execute("ROLLBACK")


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
    path = path.resolve()
    ours = path.name.startswith(FILE) or path.name in ("lock", "progress.json")
    if (ours and (path.parent / FILE).exists()) or (path.parent.name == "arrays" and (path.parent.parent / FILE).exists()):
        raise InputError(f"{path} belongs to a study: choose another place")


def no_study(folder: Path) -> InputError:
    return InputError(f"there is no study in {folder}: start one with 'onepass run RECIPE --out {folder}'")


class _DamagedError(Exception):
    pass


def _damaged(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} cannot be used ({' '.join(why.split())}): put back a copy of it, or choose another folder and run the study again")


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Whatever is wrong with the file is one sentence."""
    try:
        yield
    except InputError:
        raise
    except (_DamagedError, sqlite3.Error, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as reason:
        raise _damaged(path, str(reason) or type(reason).__name__) from None


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
            raise _DamagedError("it is empty")
        _create(connection, create)
    else:
        _migrate(connection, version)
    connection.execute("COMMIT")


def _begin_reading(connection: sqlite3.Connection, copy: sqlite3.Connection) -> sqlite3.Connection:
    """What to read from: the file, or a copy in memory that is brought up to date; the file itself is for the next writer."""
    version = _check(connection)
    if version == 0:
        raise _DamagedError("it is empty")
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
        raise _DamagedError("it is not a study of onepass")
    if version > VERSION:
        raise InputError(f"this study was written by a newer onepass (version {version} of the store, this one knows {VERSION}): update onepass")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise _DamagedError(str(found))
    return version


def _create(connection: sqlite3.Connection, study: Mapping[str, Any]) -> None:
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}, checksum)")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    for key, value in {**study, "counts": {"units": 0, "records": 0}}.items():
        _put(connection, "study", (key, _ordered(value)))


def _ordered(value: Any) -> str:
    """JSON that keeps the order of a recipe: of equal grid points the one written first is chosen."""
    return json.dumps(value, allow_nan=False)


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    for old in range(version, VERSION):
        MIGRATIONS[old](connection)
        connection.execute(f"PRAGMA user_version = {old + 1}")


def _put(connection: sqlite3.Connection, table: str, values: Sequence[Any], verb: str = "INSERT OR REPLACE") -> None:
    marks = ", ".join("?" * (len(values) + 1))
    connection.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, _checksum(table, values)))


def _checksum(table: str, values: Sequence[Any]) -> str:
    return digest(canonical([table, *values]))


def _arrays_name(content: bytes) -> str:
    return f"{digest(content)[:32]}.safetensors"


def _next_fleet(contents: Contents) -> int:
    return 1 + max((entry.fleet for entry in contents.entries.values()), default=-1)


def _array(found: NDArray[Any] | None) -> Array:
    if found is None:
        raise ValueError
    return np.asarray(found, dtype=np.float64)
