"""Studies that were written to deceive: any value, with right checksums and names."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from onepass.files import canonical, digest

FILE = "study.sqlite"
COLUMNS = {
    "study": ("key", "value"),
    "units": ("id", "configuration", "fleet", "place", "traceback"),
    "records": (
        *("unit", "arrays", "violations", "seconds", "state_bytes"),
        *("diverged", "device", "versions", "revision", "finished"),
    ),
}
NESTED = ("configuration", "violations", "versions")  # stored as text
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 2**31, 2**63 - 1, 10**400),
    *(0.5, -1.0, 1e308, float("nan"), float("inf")),
    *("", "van", "\x1b[2J", "\ud800", "../../x", "9" * 5000, "x" * 20_000),
    *([], [1], [None], ["van"], [[]], [1e308, -1e308], [2**31] * 40, DEEP),
    *({}, {"van": None}, {"learning_rate": "x"}, {"learning_rate": [1e400]}),
)


@dataclass
class Study:
    """All that is in a study, as plain data."""

    study: dict[str, Any]
    units: list[dict[str, Any]]
    records: list[dict[str, Any]]
    arrays: dict[str, dict[str, np.ndarray[Any, Any]]]
    raw: dict[str, bytes] = field(default_factory=dict)  # files of arrays as bytes


def taken_from(folder: Path) -> Study:
    connection = sqlite3.connect(folder / FILE)
    rows = {
        name: [
            dict(zip(columns, row, strict=False))
            for row in connection.execute(f"SELECT * FROM {name}")
        ]
        for name, columns in COLUMNS.items()
    }
    connection.close()
    for unit in rows["units"]:
        unit["configuration"] = json.loads(unit["configuration"])
    for record in rows["records"]:
        record |= {name: json.loads(record[name]) for name in ("violations", "versions")}
    arrays = {
        path.name: safetensors.numpy.load(path.read_bytes())
        for path in (folder / "arrays").iterdir()
    }
    return Study(
        {row["key"]: json.loads(row["value"]) for row in rows["study"]},
        rows["units"],
        rows["records"],
        arrays,
    )


def written_to(folder: Path, study: Study) -> None:
    """Write it with right checksums; units and files of arrays are named by their contents."""
    study = copy.deepcopy(study)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "arrays").mkdir(parents=True)
    for unit in study.units:
        changed = unit.pop("changed", False)
        if changed and isinstance(unit["id"], str) and len(unit["id"]) == 16:
            unit["id"] = digest(text(unit["configuration"]))[:16]
    names = {}
    for name, arrays in study.arrays.items():
        content = study.raw.get(name) or safetensors.numpy.save(
            {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        )
        names[name] = f"{digest(content)[:32]}.safetensors"
        (folder / "arrays" / names[name]).write_bytes(content)
    for record in study.records:
        if isinstance(record["arrays"], str):
            record["arrays"] = names.get(record["arrays"], record["arrays"])
    connection = sqlite3.connect(folder / FILE, isolation_level=None)
    for name, columns in COLUMNS.items():
        connection.execute(
            f"CREATE TABLE {name} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}, checksum)"
        )
    connection.execute(f"PRAGMA application_id = {0x6F6E6570}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute("BEGIN")
    for key, value in study.study.items():
        put(connection, "study", [key, json.dumps(value)])
    for table, rows in (("units", study.units), ("records", study.records)):
        for row in rows:
            put(
                connection, table, [text(row[c]) if c in NESTED else row[c] for c in COLUMNS[table]]
            )
    connection.execute("COMMIT")
    connection.close()


def text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def put(connection: sqlite3.Connection, table: str, row: list[Any]) -> None:
    """What cannot be in a row of SQLite is there as text."""
    row = [value if _is_plain(value) else json.dumps(value) for value in row]
    row = [int(value) if isinstance(value, bool) else value for value in row]
    row = [None if isinstance(value, float) and value != value else value for value in row]
    try:
        checksum = digest(canonical([table, *row]))
    except ValueError:  # an infinite number
        checksum = digest(text([table, *row]))
    places = ", ".join("?" * (len(row) + 1))
    connection.execute(f"INSERT INTO {table} VALUES ({places})", (*row, checksum))


def _is_plain(value: Any) -> bool:
    """Whether a row of SQLite can hold it."""
    if isinstance(value, str):
        return not any("\ud800" <= sign <= "\udfff" for sign in value)
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or isinstance(value, float)


Mutation = tuple[str, Callable[[Study], None]]


def mutations() -> Iterator[Mutation]:
    """Every place of a study with every value."""
    recipe = [
        *("name", "stream", "stream_options", "methods", "seeds", "cv_seeds", "network"),
        *("hidden", "stem", "batch_norm", "initialisation", "batch_size", "memory_per_task"),
        *("memory", "memory_includes_current_task", "union_softmax", "gradients", "tf32"),
        *("grids", "options"),
    ]
    inside = ("method", "part", "seed", "hyperparameters", "hidden", "stream")
    places: list[tuple[str, Callable[[Study], Any], Any]] = [
        *((f"recipe.{key}", lambda s: s.study["recipe"], key) for key in recipe),
        *((f"study.{key}", lambda s: s.study, key) for key in ("recipe", "packing", "counts")),
        *((f"counts.{key}", lambda s: s.study["counts"], key) for key in ("units", "records")),
        ("packing.van", lambda s: s.study["packing"], "van"),
        ("packing.van.ev", lambda s: s.study["packing"]["van"], "ev"),
        ("grids.van", lambda s: s.study["recipe"]["grids"], "van"),
        ("grids.van.learning_rate", lambda s: s.study["recipe"]["grids"]["van"], "learning_rate"),
        *((f"units.{key}", lambda s: s.units[0], key) for key in COLUMNS["units"]),
        *((f"records.{key}", lambda s: s.records[0], key) for key in COLUMNS["records"]),
        *((f"configuration.{key}", lambda s: _changed(s.units[0]), key) for key in inside),
        ("learning_rate", lambda s: _changed(s.units[0])["hyperparameters"], "learning_rate"),
        ("versions.torch", lambda s: s.records[0]["versions"], "torch"),
    ]
    for name, where, key in places:
        for value in VALUES:
            yield f"{name}={repr(value)[:30]}", partial(_set, where, key, value)
        yield f"no {name}", partial(_remove, where, key)
    yield from _of_arrays()


def _set(where: Callable[[Study], Any], key: Any, value: Any, study: Study) -> None:
    where(study)[key] = value


def _changed(unit: dict[str, Any]) -> dict[str, Any]:
    unit["changed"] = True
    return unit["configuration"]  # type: ignore[no-any-return]


def _remove(where: Callable[[Study], Any], key: str, study: Study) -> None:
    values = where(study)
    if key in COLUMNS["records"] or key in COLUMNS["units"]:
        values[key] = None  # a column is always there
    else:
        values.pop(key, None)


SHAPES = ((), (0,), (1,), (0, 0), (1, 1), (2, 5), (17, 16), (17, 17, 1), (1, 17), (200, 200))


def _of_arrays() -> Iterator[Mutation]:
    for name in ("accuracy", "initial", "curve", "memory_accuracy", "state_by_task"):
        for what, made in {
            **{f"zeros{shape}": np.zeros(shape) for shape in SHAPES},
            **{f"{number}": np.full((17, 17), number) for number in (np.nan, np.inf, -1.0, 1e308)},
            **{kind: np.ones((17, 17), kind) for kind in ("int64", "uint8", "float16", "bool")},
            **{f"state {kind}": np.full(17, -1, kind) for kind in ("int64", "int8")},
            "none": None,
        }.items():
            yield f"{name} is {what}", partial(_set_array, name, made)
    other = b'H\0\0\0\0\0\0\0{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    for what, content in {
        "no header": b"",
        "a huge header": (2**40).to_bytes(8, "little"),
        "another kind": other.ljust(80) + b"\0\0",
    }.items():
        yield f"arrays with {what}", partial(_set_file, content)


def _set_file(content: bytes, study: Study) -> None:
    study.raw[study.records[0]["arrays"]] = content


def many_tensors() -> bytes:
    """A file of half a million empty tensors."""
    of_one = '"{:x}":{{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}'.format
    header = ("{" + ",".join(of_one(number) for number in range(500_000)) + "}").encode()
    return len(header).to_bytes(8, "little") + header


def _set_array(name: str, made: Any, study: Study) -> None:
    record = study.records[-1]
    arrays = study.arrays[record["arrays"]]
    if made is None:
        arrays.pop(f"{record['unit']}/{name}", None)
    else:
        arrays[f"{record['unit']}/{name}"] = made
