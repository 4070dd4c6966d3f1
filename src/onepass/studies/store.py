"""The result store: one SQLite file per study, and a folder of arrays beside it.

Everything in it is raw; tables and metrics are computed from it. Only the driving process writes.
Every row carries a checksum of its values, the study knows how many rows there are, and arrays are
named with their hash, so a damaged store is refused instead of giving wrong numbers. Nothing here
needs torch, so that a study is quick to look at.

    study    what is to be done: the recipe, and how runs are packed into fleets
    units    every unit of work, and its place in the plan: the row `place` of fleet `fleet`
    records  what came out of a unit
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onepass.files import cannot_write, canonical
from onepass.metrics import Record
from onepass.studies import schema
from onepass.studies.arrays import Arrays, tasks_of
from onepass.studies.concurrent import ChangeDetector
from onepass.studies.database import reading, refusing, writing
from onepass.studies.folder import FILE, damaged
from onepass.studies.recovery import DamagedError
from onepass.studies.tables import ordered, put, rows
from onepass.studies.units import (
    Contents,
    Entry,
    Provenance,
    Stored,
    Unit,
    by_fleet,
    entry_of,
    entry_row,
    fleet_name,
    parsed,
    stored_of,
    stored_row,
)

__all__ = ["Entry", "Provenance", "Store", "Unit", "fleet_name"]


class Store:
    """The results of a study, in a folder.

    `Store.write_to` opens it for the one driving process, `Store.read` for any number of readers.
    """

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        detector: ChangeDetector | None = None,
        contents: Contents | None = None,
    ) -> None:
        self.folder = folder
        self._connection = connection
        self._detector = detector
        self._arrays = Arrays(folder)
        # Of each part, as the records have it; studies of one recipe may share it.
        self.tasks: dict[str, int] = {}
        self.contents = self._load() if contents is None else contents

    # ---- opening

    @classmethod
    @contextmanager
    def write_to(cls, folder: Path, create: Mapping[str, Any] | None = None) -> Iterator[Store]:
        """Open a study for writing, which one process at a time may do.

        A folder without a study becomes one with the contents `create`.
        """
        with writing(folder, create) as (connection, detector):
            yield cls(folder, connection, detector)

    @classmethod
    @contextmanager
    def read(cls, folder: Path) -> Iterator[Store]:
        """Open a study for reading, while another process may be writing. Nothing is changed."""
        with reading(folder) as connection:
            yield cls(folder, connection)

    def _load(self) -> Contents:
        with refusing(self.folder / FILE):
            contents = Contents()
            # One view of all tables, even if another process is writing.
            self._connection.execute("BEGIN")
            for key, value in rows(self._connection, "study"):
                contents.study[key] = parsed(value)
            schema.check(schema.Study, "its table 'study'", contents.study)
            for row in rows(self._connection, "units"):
                contents.entries[row[0]] = entry_of(row)
            for row in rows(self._connection, "records"):
                contents.records[row[0]] = stored_of(row)
            counted = {"units": len(contents.entries), "records": len(contents.records)}
            unplanned = contents.records.keys() - contents.entries.keys()
            if contents.study["counts"] != counted or unplanned:
                raise DamagedError(
                    f"it should have {contents.study['counts']} rows and has {counted}"
                )
            self._connection.execute("COMMIT")
            return contents

    # ---- reading

    def record(self, unit: str) -> Record:
        """The raw record of a finished unit."""
        stored = self.contents.records[unit]
        done = self.contents.entries[unit].unit
        arrays = self._arrays.of(unit, stored.arrays)
        try:
            lengths = {done.part: tasks_of(arrays, stored.violations)}
            if stored.violations is not None and not stored.diverged:
                lengths[f"violations of {done.part}"] = len(stored.violations)
            for what, length in lengths.items():
                if self.tasks.setdefault(what, length) != length:
                    raise DamagedError("other records of the study have another number of tasks")
        except DamagedError as reason:
            raise damaged(self._arrays.folder / stored.arrays, f"{unit}: {reason}") from None
        grown = arrays.get("state_by_task")
        return Record(
            seed=done.seed,
            hyperparameters=done.hyperparameters,
            accuracy=arrays["accuracy"],
            initial=arrays["initial"],
            curve=arrays["curve"],
            memory_accuracy=arrays.get("memory_accuracy"),
            violations=stored.violations,
            seconds=stored.seconds,
            state_bytes=stored.state_bytes,
            diverged=stored.diverged,
            state_by_task=None if grown is None else [int(n) for n in grown],
        )

    def check_arrays(self) -> None:
        """Raise unless the arrays of every record are there, whatever is in them."""
        if self.contents.records:  # a copy of a study that has just begun may lack the folder
            self._arrays.check_all_there(one.arrays for one in self.contents.records.values())

    def trained_together(self, unit: str) -> int:
        """How many runs were rows of the fleet that made this record: a fleet has one file."""
        return len(self._arrays.units(self.contents.records[unit].arrays))

    def open_fleets(self) -> dict[int, list[Entry]]:
        """What is planned and neither finished nor failed, by fleet, in the order of the plan."""
        return by_fleet(
            entry
            for identity, entry in self.contents.entries.items()
            if identity not in self.contents.records and entry.traceback is None
        )

    # ---- writing

    def note(self, **values: Any) -> None:
        """Set what the study knows about itself."""
        with self._change() as contents:
            self._set(contents, values)

    def restart(self, **study: Any) -> None:
        """Become another study, which only one without results may."""
        with self._change() as contents:
            for table in ("study", "units"):
                self._connection.execute(f"DELETE FROM {table}")
            contents.study = {"counts": None}
            contents.entries = {}
            self._set(contents, study)

    def plan(self, fleets: Iterable[Sequence[Unit]]) -> None:
        """Give units their places: each sequence is a new fleet."""
        with self._change() as contents:
            self._plan(contents, fleets)

    def fail(self, units: Iterable[str], traceback: str) -> None:
        """Record that units have failed for good."""
        with self._change() as contents:
            for identity in units:
                entry = replace(contents.entries[identity], traceback=traceback)
                self._place(contents, entry)

    def forgive(self) -> None:
        """Let units that failed be tried again."""
        failed = [entry for entry in self.contents.entries.values() if entry.traceback is not None]
        if failed:
            with self._change() as contents:
                for entry in failed:
                    self._place(contents, replace(entry, traceback=None))

    def add(self, records: Mapping[str, Record], provenance: Provenance) -> None:
        """Store what came out of some units of the plan, all of it or nothing."""
        name = self._arrays.add(records)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._change() as contents:
            for unit, record in records.items():
                stored = Stored(
                    unit,
                    name,
                    None if record.violations is None else list(record.violations),
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
        """Copy the finished units that are not here from other stores, all of them or none.

        Besides, plan `fleets`, and set what the study knows about itself. Returns how many came
        from each store. Their records must have been read: damaged ones are refused before
        anything is changed.
        """
        counts = []
        with self._change() as contents:
            for other in others:
                new = [unit for unit in other.contents.records if unit not in contents.records]
                for name in {other.contents.records[unit].arrays for unit in new}:
                    self._arrays.write(other._arrays.read(name))
                theirs = sorted({other.contents.entries[unit].fleet for unit in new})
                numbers = dict(zip(theirs, contents.free_fleets(), strict=False))
                for unit in new:
                    entry = contents.entries.get(unit)
                    if entry is None:
                        entry = other.contents.entries[unit]
                        entry = replace(entry, fleet=numbers[entry.fleet])
                    self._place(contents, replace(entry, traceback=None))
                    self._insert_record(contents, other.contents.records[unit])
                counts.append(len(new))
            self._plan(contents, fleets)
            self._set(contents, study)
        return counts

    def _set(self, contents: Contents, values: Mapping[str, Any]) -> None:
        contents.study.update(values)
        for key, value in values.items():
            put(self._connection, "study", (key, ordered(value)))

    def _plan(self, contents: Contents, fleets: Iterable[Sequence[Unit]]) -> None:
        for number, units in zip(contents.free_fleets(), fleets, strict=False):
            for place, unit in enumerate(units):
                self._place(contents, Entry(unit, number, place))

    def _place(self, contents: Contents, entry: Entry) -> None:
        put(self._connection, "units", entry_row(entry))
        contents.entries[entry.unit.id] = entry

    def _insert_record(self, contents: Contents, stored: Stored) -> None:
        # A unit that has a record already is a mistake, not an update.
        put(self._connection, "records", stored_row(stored), "INSERT")
        contents.records[stored.unit] = stored

    @contextmanager
    def _change(self) -> Iterator[Contents]:
        """One transaction; the contents in memory change only if it succeeds.

        Rows are counted in the database.
        """
        if self._detector is None:
            raise TypeError("this store is open for reading")
        changed = self.contents.copy()
        try:
            self._detector.begin()
            yield changed
            counts = {
                table: self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("units", "records")
            }
            if counts != changed.study["counts"]:
                changed.study["counts"] = counts
                put(self._connection, "study", ("counts", canonical(counts)))
            self._connection.execute("COMMIT")
        except BaseException as reason:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            if isinstance(reason, sqlite3.Error):
                raise cannot_write(self.folder / FILE, reason) from None
            raise
        self.contents = changed
        self._detector.check()
