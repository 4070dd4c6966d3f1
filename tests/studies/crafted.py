"""Studies that were written to deceive: any value may be anything, and every checksum and name is right."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        3,
        2**31,
        2**63 - 1,
        10**400,
        0.5,
        -1.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "van", "\x1b[2J", "\ud800", "../../x", "9" * 5000, "x" * 20_000),
    *(
        [],
        [1],
        [None],
        ["van"],
        [[]],
        [1e308, -1e308],
        [2**31] * 40,
        DEEP,
        {},
        {"van": None},
        {"learning_rate": "x"},
        {"learning_rate": [1e400]},
    ),
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
    """Write it with right checksums; units and files of arrays get the names that their contents have now."""
    study = copy.deepcopy(study)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "arrays").mkdir(parents=True)
    for unit in study.units:
        if isinstance(unit["id"], str) and len(unit["id"]) == 16:
            unit["id"] = (
                digest(json.dumps(unit["configuration"], sort_keys=True, separators=(",", ":")))[
                    :16
                ]
                if unit.pop("changed", False)
                else unit["id"]
            )
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
    for unit in study.units:
        put(
            connection,
            "units",
            [text(unit[c]) if c == "configuration" else unit[c] for c in COLUMNS["units"]],
        )
    for record in study.records:
        put(
            connection,
            "records",
            [
                text(record[c]) if c in ("violations", "versions") else record[c]
                for c in COLUMNS["records"]
            ],
        )
    connection.execute("COMMIT")
    connection.close()


def text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def put(connection: sqlite3.Connection, table: str, row: list[Any]) -> None:
    """What cannot be in a row of SQLite is there as text."""
    row = [
        value
        if value is None
        or isinstance(value, bool | float)
        or (isinstance(value, int) and abs(value) < 2**63)
        or _is_text(value)
        else json.dumps(value)
        for value in row
    ]
    row = [int(value) if isinstance(value, bool) else value for value in row]
    row = [None if isinstance(value, float) and value != value else value for value in row]
    try:
        checksum = digest(canonical([table, *row]))
    except ValueError:  # an infinite number
        checksum = digest(json.dumps([table, *row], sort_keys=True, separators=(",", ":")))
    connection.execute(
        f"INSERT INTO {table} VALUES ({', '.join('?' * (len(row) + 1))})", (*row, checksum)
    )


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeError:
        return False


Mutation = tuple[str, Callable[[Study], None]]


def mutations() -> Iterator[Mutation]:
    """Every place of a study with every value."""
    recipe = [
        *(
            "name",
            "stream",
            "stream_options",
            "methods",
            "seeds",
            "cv_seeds",
            "network",
            "hidden",
            "stem",
            "batch_norm",
            "initialisation",
        ),
        *(
            "batch_size",
            "memory_per_task",
            "memory",
            "memory_includes_current_task",
            "union_softmax",
            "gradients",
            "tf32",
            "grids",
            "options",
        ),
    ]
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
        *(
            (f"configuration.{key}", lambda s: _changed(s.units[0]), key)
            for key in ("method", "part", "seed", "hyperparameters", "hidden", "stream")
        ),
        ("learning_rate", lambda s: _changed(s.units[0])["hyperparameters"], "learning_rate"),
        ("versions.torch", lambda s: s.records[0]["versions"], "torch"),
    ]
    for name, where, key in places:
        for value in VALUES:
            yield (
                f"{name}={repr(value)[:30]}",
                lambda s, where=where, key=key, value=value: where(s).__setitem__(key, value),
            )  # type: ignore[misc]
        yield f"no {name}", lambda s, where=where, key=key: _without(where(s), key)  # type: ignore[misc]
    yield from _of_arrays()


def _changed(unit: dict[str, Any]) -> dict[str, Any]:
    unit["changed"] = True
    return unit["configuration"]  # type: ignore[no-any-return]


def _without(values: dict[str, Any], key: str) -> None:
    if (
        key in ("id", "configuration", "unit", "arrays", "violations", "versions")
        or key in COLUMNS["records"]
        or key in COLUMNS["units"]
    ):
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
            yield f"{name} is {what}", lambda s, name=name, made=made: _set_array(s, name, made)  # type: ignore[misc]
    for what, content in {
        "no header": b"",
        "a huge header": (2**40).to_bytes(8, "little"),
        "another kind": b'H\0\0\0\0\0\0\0{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'.ljust(
            80
        )
        + b"\0\0",
    }.items():
        yield (
            f"arrays with {what}",
            lambda s, content=content: s.raw.update({s.records[0]["arrays"]: content}),
        )  # type: ignore[misc]


def _set_array(study: Study, name: str, made: Any) -> None:
    record = study.records[-1]
    arrays = study.arrays[record["arrays"]]
    if made is None:
        arrays.pop(f"{record['unit']}/{name}", None)
    else:
        arrays[f"{record['unit']}/{name}"] = made
