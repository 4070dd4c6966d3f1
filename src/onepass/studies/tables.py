"""The tables of a study's SQLite file, their version, and rows with checksums.

Every row carries a checksum of its values; `put` writes it and `rows` checks it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onepass.errors import InputError
from onepass.files import canonical, digest
from onepass.studies.recovery import DamagedError

APPLICATION = 0x6F6E6570  # "onep": what SQLite's header says the file is
VERSION = 1

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
# Lists and dictionaries in the JSON of a table. Each takes up to two hundred bytes, and 100 000
# units have half a million.
NESTED = 2**21

# How a store of version n becomes one of version n + 1: functions of a connection in a transaction.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}


def definition(table: str) -> str:
    columns = TABLES[table]
    return f"CREATE TABLE {table} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}, checksum)"


def create(connection: sqlite3.Connection, study: Mapping[str, Any]) -> None:
    """Make the tables of a study without units, inside a transaction."""
    for table in TABLES:
        connection.execute(definition(table))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    for key, value in {**study, "counts": {"units": 0, "records": 0}}.items():
        put(connection, "study", (key, ordered(value)))


def check(connection: sqlite3.Connection) -> int:
    """Return the version of a sound store; raise for an empty, foreign, newer or damaged one."""
    connection.execute("PRAGMA trusted_schema = OFF")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION:
        made = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        foreign = version or application or made
        raise DamagedError("it is not a study of onepass" if foreign else "it is empty")
    if version > VERSION:
        raise InputError(
            f"this study was written by a newer onepass (version {version} of the store, this one"
            f" knows {VERSION}): update onepass"
        )
    there = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    for name, statement in connection.execute(there):
        if name not in TABLES or statement != definition(name):  # a view could compute for ever
            raise DamagedError(f"its '{name}' is no table of a study")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedError(str(found))
    if version == 0:
        raise DamagedError("it is empty")
    return version


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a store of an older version up to date, inside a transaction."""
    for old in range(version, VERSION):
        MIGRATIONS[old](connection)
        connection.execute(f"PRAGMA user_version = {old + 1}")


def rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield all rows of a table without their checksums, each checked."""
    room = NESTED
    for row in connection.execute(f"SELECT {', '.join(TABLES[table])}, checksum FROM {table}"):
        if not is_sound(table, row):
            raise DamagedError(f"a row of its table '{table}' was altered")
        room -= nested(table, row)
        if room < 0:
            raise DamagedError(f"its table '{table}' has more in it than a study")
        yield row[:-1]


def nested(table: str, row: Sequence[Any]) -> int:
    """An upper bound of the lists and dictionaries in the JSON of a row."""
    texts = (row[TABLES[table].index(name)] for name in JSON[table])
    return sum(text.count("[") + text.count("{") for text in texts if isinstance(text, str))


def is_sound(table: str, row: Sequence[Any]) -> bool:
    """Whether the last value of a row is the checksum of the others."""
    return bool(row[-1] == _checksum(table, row[:-1]))


def put(
    connection: sqlite3.Connection,
    table: str,
    values: Sequence[Any],
    verb: str = "INSERT OR REPLACE",
) -> None:
    """Write a row with its checksum."""
    marks = ", ".join("?" * (len(values) + 1))
    connection.execute(f"{verb} INTO {table} VALUES ({marks})", (*values, _checksum(table, values)))


def ordered(value: Any) -> str:
    """JSON that keeps the order of a recipe: of equal grid points the first one is chosen."""
    return json.dumps(value, allow_nan=False)


def _checksum(table: str, values: Sequence[Any]) -> str:
    return digest(canonical([table, *values]))
