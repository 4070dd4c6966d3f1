"""The result store: one SQLite file a study, and a folder of arrays beside it.

Everything in it is raw; tables and metrics are computed from it. Only the driving process writes. Every row carries a checksum of its values,
the study knows how many rows there are, and arrays are named with their hash, so a damaged store is refused instead of giving wrong numbers.
Nothing here needs torch: looking at a study is quick.

    study    what is to be done: the recipe, and how runs are packed into fleets
    units    every unit of work, and its place in the plan: the row `place` of fleet `fleet`
    records  what came out of a unit
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from onepass.files import cannot_write, canonical, digest, header_is_short, read_plain, write_here
from onepass.metrics import Record
from onepass.studies import schema
from onepass.studies.concurrent import Guard
from onepass.studies.database import (
    FILE,
    TABLES,
    damaged,
    ordered,
    put,
    reading,
    refusing,
    rows,
    writing,
)
from onepass.studies.recovery import DamagedError

LARGEST_ARRAYS = 2**28  # bytes: 256 runs of 17 tasks have two millions


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
        """The learning rate first, whoever wrote them in whatever order."""
        return dict(
            sorted(
                self.configuration["hyperparameters"].items(),
                key=lambda item: (item[0] != "learning_rate", item[0]),
            )
        )


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

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        guard: Guard | None = None,
        contents: Contents | None = None,
    ) -> None:
        self.folder = folder
        self._connection, self._guard = connection, guard
        self._arrays: dict[str, dict[str, NDArray[Any]]] = {}
        self.tasks: dict[
            str, int
        ] = {}  # of each part, as the records have it; studies of one recipe may share it
        self.contents = self._load() if contents is None else contents

    # ---- opening

    @classmethod
    @contextmanager
    def write_to(cls, folder: Path, create: Mapping[str, Any] | None = None) -> Iterator[Store]:
        """Open a study for writing, which one process at a time may do; a folder without one becomes one with the contents `create`."""
        with writing(folder, create) as opened:
            yield cls(folder, opened.connection, opened.guard)

    @classmethod
    @contextmanager
    def read(cls, folder: Path) -> Iterator[Store]:
        """Open a study to look at it; nothing is changed, and somebody may be writing to it at the same time."""
        with reading(folder) as connection:
            yield cls(folder, connection)

    def _load(self) -> Contents:
        with refusing(self.folder / FILE):
            contents = Contents()
            self._connection.execute(
                "BEGIN"
            )  # one view of all tables, even if another process is writing
            for key, value in rows(self._connection, "study"):
                contents.study[key] = parsed(value)
            schema.check(schema.Study, "its table 'study'", contents.study)
            for row in rows(self._connection, "units"):
                identity, entry = entry_of(row)
                contents.entries[identity] = entry
            for row in rows(self._connection, "records"):
                contents.records[row[0]] = stored_of(row)
            counted = {"units": len(contents.entries), "records": len(contents.records)}
            if (
                contents.study["counts"] != counted
                or not contents.records.keys() <= contents.entries.keys()
            ):
                raise DamagedError(
                    f"it should have {contents.study['counts']} rows and has {counted}"
                )
            self._connection.execute("COMMIT")
            return contents

    # ---- reading

    def record(self, unit: str) -> Record:
        """The raw record of a finished unit."""
        stored, entry = self.contents.records[unit], self.contents.entries[unit]
        arrays = self._arrays_of(stored.arrays)
        mine = {
            key.removeprefix(f"{unit}/"): value
            for key, value in arrays.items()
            if key.startswith(f"{unit}/")
        }
        try:
            lengths = {entry.unit.part: schema.tasks_of(mine, stored.violations)}
            if stored.violations is not None and not stored.diverged:
                lengths[f"violations of {entry.unit.part}"] = len(stored.violations)
            if any(
                self.tasks.setdefault(what, length) != length for what, length in lengths.items()
            ):
                raise DamagedError("other records of the study have another number of tasks")
        except DamagedError as reason:
            raise damaged(self.folder / "arrays" / stored.arrays, f"{unit}: {reason}") from None
        remembered, grown = mine.get("memory_accuracy"), mine.get("state_by_task")
        return Record(
            seed=entry.unit.seed,
            hyperparameters=entry.unit.hyperparameters,
            accuracy=mine["accuracy"],
            initial=mine["initial"],
            curve=mine["curve"],
            memory_accuracy=remembered,
            violations=stored.violations,
            seconds=stored.seconds,
            state_bytes=stored.state_bytes,
            diverged=stored.diverged,
            state_by_task=None if grown is None else [int(n) for n in grown],
        )

    def _arrays_of(self, name: str) -> dict[str, NDArray[Any]]:
        if name not in self._arrays:
            path, content = self.folder / "arrays" / name, self._content_of(name)
            if not header_is_short(content):
                raise damaged(path, "it has too many arrays")
            try:
                self._arrays[name] = safetensors.numpy.load(content)
            except (
                SafetensorError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                OverflowError,
            ) as reason:
                raise damaged(path, str(reason) or type(reason).__name__) from None
        return self._arrays[name]

    def _content_of(self, name: str) -> bytes:
        path = self.folder / "arrays" / name
        try:
            content = read_plain(path, LARGEST_ARRAYS)
        except OSError as reason:
            raise damaged(path, reason.strerror or str(reason)) from None
        if name != _arrays_name(content):
            raise damaged(path, "it was truncated or altered")
        return content

    def check_arrays(self) -> None:
        """Raise unless the arrays of every record are there, whatever is in them."""
        if not self.contents.records:
            return  # a copy of a study that has just begun may lack the empty folder
        folder = self.folder / "arrays"
        try:
            there = set(os.listdir(folder))
        except OSError as reason:
            raise damaged(folder, reason.strerror or str(reason)) from None
        for stored in self.contents.records.values():
            if stored.arrays not in there:
                raise damaged(folder / stored.arrays, "it is not there")

    def trained_together(self, unit: str) -> int:
        """How many runs were rows of the fleet that made this record: a fleet has one file of arrays."""
        return len(
            {key.partition("/")[0] for key in self._arrays_of(self.contents.records[unit].arrays)}
        )

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
            put(self._connection, "study", (key, ordered(value)))

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
            self._plan(contents, fleets)

    def _plan(self, contents: Contents, fleets: Iterable[Sequence[Unit]]) -> None:
        for number, units in zip(_free_fleets(contents), fleets, strict=False):
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
            arrays |= {
                f"{unit}/{name}": np.ascontiguousarray(getattr(record, name))
                for name in ("accuracy", "initial", "curve")
            }
            if record.memory_accuracy is not None:
                arrays[f"{unit}/memory_accuracy"] = np.ascontiguousarray(record.memory_accuracy)
            if record.state_by_task is not None:
                arrays[f"{unit}/state_by_task"] = np.array(record.state_by_task)
        content = safetensors.numpy.save(arrays)
        name = _arrays_name(content)
        write_here(self.folder / "arrays" / name, content)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._change() as contents:
            for unit, record in records.items():
                violations = None if record.violations is None else list(record.violations)
                stored = Stored(
                    unit,
                    name,
                    violations,
                    float(record.seconds),
                    record.state_bytes,
                    record.diverged,
                    provenance,
                    now,
                )
                self._insert_record(contents, stored)

    def take(
        self, others: Sequence[Store], fleets: Iterable[Sequence[Unit]] = (), **study: Any
    ) -> list[int]:
        """Copy the finished units that are not here from other stores, all of them or none, and set what the study knows about itself.

        `fleets` are planned besides. Returns how many came from each. Their records have been read:
        damaged ones are refused before anything is changed.
        """
        counts = []
        with self._change() as contents:
            for other in others:
                new = [unit for unit in other.contents.records if unit not in contents.records]
                for name in {other.contents.records[unit].arrays for unit in new}:
                    write_here(self.folder / "arrays" / name, other._content_of(name))
                numbers = dict(
                    zip(
                        sorted({other.contents.entries[unit].fleet for unit in new}),
                        _free_fleets(contents),
                        strict=False,
                    )
                )
                for unit in new:
                    theirs = other.contents.entries[unit]
                    known = contents.entries.get(
                        unit, Entry(theirs.unit, numbers[theirs.fleet], theirs.place)
                    )
                    self._place(contents, Entry(known.unit, known.fleet, known.place))
                    self._insert_record(contents, other.contents.records[unit])
                counts.append(len(new))
            self._plan(contents, fleets)
            self._set(contents, study)
        return counts

    def _place(self, contents: Contents, entry: Entry) -> None:
        schema.check(
            schema.Place,
            "the place of a unit",
            {"fleet": entry.fleet, "place": entry.place, "traceback": entry.traceback},
        )
        contents.entries[entry.unit.id] = entry
        put(
            self._connection,
            "units",
            (
                entry.unit.id,
                canonical(entry.unit.configuration),
                entry.fleet,
                entry.place,
                entry.traceback,
            ),
        )

    def _insert_record(self, contents: Contents, stored: Stored) -> None:
        made = stored.provenance
        row = (
            *(
                stored.unit,
                stored.arrays,
                canonical(stored.violations),
                stored.seconds,
                stored.state_bytes,
                int(stored.diverged),
            ),
            *(made.device, canonical(dict(made.versions)), made.revision, stored.finished),
        )
        put(
            self._connection, "records", row, "INSERT"
        )  # a unit that has a record already is a mistake, not an update
        contents.records[stored.unit] = stored

    @contextmanager
    def _change(self) -> Iterator[Contents]:
        """One transaction; the contents in memory change only if it succeeds.

        Rows are counted in the database.
        """
        if self._guard is None:
            raise TypeError("this store is open for reading")
        changed = Contents(
            dict(self.contents.study), dict(self.contents.entries), dict(self.contents.records)
        )
        try:
            self._guard.begin()
            yield changed
            counts = {
                table: self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("units", "records")
            }
            if counts != changed.study["counts"]:
                changed.study["counts"] = counts
                put(self._connection, "study", ("counts", canonical(counts)))
            self._connection.execute("COMMIT")
        except sqlite3.Error as reason:
            self._roll_back()
            raise cannot_write(self.folder / FILE, reason) from None
        except BaseException:
            self._roll_back()
            raise
        self.contents = changed
        self._guard.check()

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.execute("ROLLBACK")


def entry_of(row: Sequence[Any]) -> tuple[str, Entry]:
    """A row of the table `units`, checked."""
    identity, text, fleet, place, traceback = row
    configuration = parsed(text)
    schema.check(schema.Configuration, "the configuration of a unit", configuration)
    schema.check(
        schema.Place,
        "the place of a unit",
        {"fleet": fleet, "place": place, "traceback": traceback},
    )
    entry = Entry(
        Unit(configuration),
        fleet,
        place,
        None if traceback is None else schema.printable(traceback),
    )
    if identity != entry.unit.id:
        raise DamagedError("a unit is not named by its configuration")
    return identity, entry


def stored_of(row: Sequence[Any]) -> Stored:
    """A row of the table `records`, checked."""
    values = schema.named(TABLES["records"], row)
    values |= {name: parsed(values[name]) for name in ("violations", "versions")}
    schema.check(schema.Outcome, "a record", values)
    made = Provenance(values["device"], values["versions"], values["revision"])
    plain = {
        name: values[name]
        for name in ("unit", "arrays", "violations", "seconds", "state_bytes", "finished")
    }
    return Stored(**plain, diverged=bool(values["diverged"]), provenance=made)


def parsed(text: Any) -> Any:
    """What a value in a row says."""
    if not isinstance(text, str):
        raise DamagedError("a value is not text")
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise DamagedError(f"{name} is no number")


def _arrays_name(content: bytes) -> str:
    return f"{digest(content)[:32]}.safetensors"


def _free_fleets(contents: Contents) -> Iterator[int]:
    """Numbers that no fleet has, the smallest ones first: a stored one may be any."""
    taken = {entry.fleet for entry in contents.entries.values()}
    return (number for number in count() if number not in taken)
