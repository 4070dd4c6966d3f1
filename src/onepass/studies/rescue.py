"""Rescuing: what is sound of a damaged study is copied into a new one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from onepass.errors import InputError
from onepass.files import MALFORMED, StorageError
from onepass.protocol import grid_points
from onepass.studies import schema
from onepass.studies.database import refusing
from onepass.studies.folder import FILE, no_study
from onepass.studies.recipe import MOST_UNITS, Recipe, from_stored
from onepass.studies.recovery import LARGEST, LOG, DamagedError, copied, left, private
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Store
from onepass.studies.tables import NESTED, TABLES, definition, is_sound, nested
from onepass.studies.units import Contents, Entry, Unit, by_fleet, entry_of, parsed, stored_of

_BAD = (DamagedError, *MALFORMED)
MOST_ROWS = 1_000_000  # that are read one by one
MOST_BAD = 100_000  # bad rows on end, after which the search stops where the end is unknown


@dataclass(frozen=True)
class Rescued:
    """How many results were taken over, how many units are still to do, and what was lost."""

    results: int
    to_do: int
    lost: list[str]


def rescue(folder: Path, into: Path) -> Rescued:
    """Copy every sound row and file of arrays into a new study; the damaged one stays as it is.

    The new one stays empty until all of it is stored: a rescue that was killed can be begun again.
    """
    with refusing(into / FILE):
        begun = (into / FILE).exists()
        if begun and not _is_without_units(into):
            raise _not_free(into)
    lost: list[str] = []
    with refusing(folder / FILE):
        if not (folder / FILE).is_file():
            raise no_study(folder)
        sound = _sound_rows(folder, lost)
    recipe = _recipe(folder, sound.study)
    new = {"recipe": recipe.stored()}
    unknown = sound.records.keys() - sound.entries.keys()
    possible = islice(_possible(recipe), MOST_UNITS if unknown else 0)
    known = {unit.id: Entry(unit, 0, 0) for unit in possible}
    contents = Contents(sound.study, known | sound.entries)
    with closing(sqlite3.connect(":memory:")) as none, Store.write_to(into, create=new) as store:
        if begun and store.contents != Contents(new | {"counts": {"units": 0, "records": 0}}):
            raise _not_free(into)
        contents.records = dict(sound.records)
        source = Store(folder, none, contents=contents)
        for name in sound.records:
            if not _is_sound(source, name, lost):
                del contents.records[name]
        to_do = by_fleet(
            entry for name, entry in sound.entries.items() if name not in contents.records
        )
        fleets = [[entry.unit for entry in fleet] for fleet in to_do.values()]
        packing = sound.study.get("packing", {})
        packing = {name: packing[name] for name in packing if name in recipe.methods}
        store.take([source], fleets, packing=packing)
        return Rescued(len(contents.records), sum(map(len, fleets)), lost)


def _is_without_units(folder: Path) -> bool:
    with suppress(InputError), Store.read(folder) as store:
        return not store.contents.entries
    return False


def _not_free(into: Path) -> InputError:
    return InputError(f"there is a study in {into} already: choose a folder without one")


def _recipe(folder: Path, study: dict[str, Any]) -> Recipe:
    """The recipe of a study, if that row is sound; a packing that is not is left out."""
    for extra in ({"packing": study.get("packing", {})}, {}):
        try:
            schema.check(
                schema.Study,
                "its recipe",
                {"recipe": study.get("recipe"), "counts": {"units": 0, "records": 0}, **extra},
            )
            study["packing"] = extra.get("packing", {})
            return from_stored(study["recipe"])
        except DamagedError:
            continue
    raise InputError(
        f"nothing of the study in {folder} can be rescued: the row with its recipe is lost"
    )


def _is_sound(source: Store, name: str, lost: list[str]) -> bool:
    if name not in source.contents.entries:
        lost.append(f"the result of {name}: its configuration is lost")
        return False
    try:
        source.record(name)
    except StorageError as reason:
        lost.append(f"the result of {name}: {str(reason).rpartition(': ')[0]}")
        return False
    return True


def _sound_rows(folder: Path, lost: list[str]) -> Contents:
    """The sound rows of the file alone, and of the file with the log beside it.

    Results are never removed, so both count.
    """
    found = Contents()
    logs = [path for path in left(folder / FILE) if path.name.endswith(LOG)]
    for files in ([folder / FILE], [folder / FILE, *logs]) if logs else ([folder / FILE],):
        with copied(*files) as place:
            _lengthen(place / FILE)
            damaged: list[str] = []
            for row in _rows(place / FILE, "study", damaged):
                with suppress(*_BAD):
                    found.study[row[0]] = parsed(row[1])
            for row in _rows(place / FILE, "units", damaged):
                with _noting("units", damaged):
                    found.entries[row[0]] = entry_of(row)
            for row in _rows(place / FILE, "records", damaged):
                with _noting("records", damaged):
                    found.records[row[0]] = stored_of(row)
            known = set(lost)
            lost += [what for what in damaged if what not in known]
    return found


@contextmanager
def _noting(table: str, damaged: list[str]) -> Iterator[None]:
    try:
        yield
    except _BAD as reason:
        damaged.append(f"a row of the table '{table}': {reason}")


def _lengthen(path: Path) -> None:
    """Give a file the length that its header states: SQLite reads nothing of a shorter one."""
    with path.open("r+b") as file:
        header = file.read(32)
        stated = int.from_bytes(header[16:18], "big") * int.from_bytes(header[28:], "big")
        file.truncate(max(path.stat().st_size, min(stated, LARGEST)))
        if len(header) == 32:
            file.seek(28)
            file.write(bytes(4))  # SQLite goes by the length of the file


def _rows(path: Path, table: str, lost: list[str]) -> Iterator[tuple[Any, ...]]:
    """The sound rows of a table; where a page is damaged, those on the others."""
    with closing(private(path)) as connection:
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("BEGIN")  # SQLite would lock the file anew for every row
            found = "SELECT sql FROM sqlite_master WHERE name = ?"
            if connection.execute(found, (table,)).fetchone() != (definition(table),):
                raise DamagedError("it is not there, or another one")
        except (sqlite3.Error, DamagedError) as reason:
            lost.append(f"the table '{table}': {reason}")
            return
        end: list[str] = []
        try:
            last = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0
        except sqlite3.Error as reason:  # its last page is damaged
            last, end = MOST_ROWS, [f"the end of the table '{table}': {reason}"]
        bad: list[str] = []  # since the last row that is sound
        room = NESTED
        one = f"SELECT {', '.join(TABLES[table])}, checksum FROM {table} WHERE rowid = ?"
        for number in range(1, min(last, MOST_ROWS) + 1):
            try:
                row = connection.execute(one, (number,)).fetchone()
                if row is not None and not is_sound(table, row):
                    raise DamagedError("it was altered")
                if row is not None and nested(table, row) > room:
                    raise DamagedError("there is more in it than a study has")
            except (sqlite3.Error, *_BAD) as reason:
                bad.append(f"row {number} of the table '{table}': {reason}")
                if end and len(bad) == MOST_BAD:
                    break
                continue
            if row is not None:
                lost += bad
                bad.clear()
                room -= nested(table, row)
                yield row[:-1]
        lost += end or bad


def _possible(recipe: Recipe) -> Iterator[Unit]:
    """Every unit that a study of this recipe may have."""
    for name in recipe.methods:
        yield from cross_validation(recipe, name)
        for point in grid_points(recipe.grids[name]):
            yield from evaluation(recipe, name, point)
