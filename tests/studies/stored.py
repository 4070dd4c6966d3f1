"""Studies with made-up results, for tests of what keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from onepass.errors import InputError
from onepass.metrics import Record
from onepass.studies import recovery
from onepass.studies.recipe import load
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Provenance, Store, Unit
from tests.fuzzing import limited

RECIPE = load("quickstart", ["grids.van.learning_rate=[0.1, 0.03]"], "van,a-gem", 2)
GRID = cross_validation(RECIPE, "van")
RUNS = evaluation(RECIPE, "van", {"learning_rate": 0.1})
MADE = Provenance("a processor", {"torch": "2"}, "abc")


def record(unit: Unit, value: float = 0.5) -> Record:
    a = np.full((3, 3), value)
    a[0, 2] = np.nan
    return Record(unit.seed, unit.hyperparameters, a, a[0], a, a, [0, 3, 1], 1.25, 1000, False)


@contextmanager
def study(folder: Path) -> Iterator[Store]:
    with Store.write_to(folder, create={"recipe": RECIPE.stored()}) as opened:
        yield opened


def as_older_versions(opened: Store) -> None:
    """Go on with a write-ahead log, as versions did that are older than the rollback journal."""
    opened._connection.execute("PRAGMA journal_mode = WAL")
    assert opened._detector is not None
    opened._detector._version = opened._detector._data_version()


def fill(folder: Path, units: list[Unit] = GRID, value: float = 0.5) -> Path:
    with study(folder) as opened:
        opened.plan([units])
        opened.add({unit.id: record(unit, value) for unit in units}, MADE)
    return folder


def journal_back_to(state: bytes) -> bytes:
    """The rollback journal that leads back to this state of the file.

    A process that is killed in the middle of a commit leaves one.
    """
    size, nonce = 4096, 7
    pages = [state[start : start + size] for start in range(0, len(state), size)]
    header = [len(pages), nonce, len(pages), 512, size]
    content = recovery._MAGIC + b"".join(number.to_bytes(4, "big") for number in header)
    content = content.ljust(512, b"\0")
    for number, page in enumerate(pages, start=1):
        checksum = nonce + sum(page[place] for place in range(size - 200, 0, -200))
        content += number.to_bytes(4, "big") + page + checksum.to_bytes(4, "big")
    return content


def records_in(folder: Path) -> dict[str, Record]:
    """The records of a study, each of which can be read."""
    with Store.read(folder) as opened:
        return {unit: opened.record(unit) for unit in opened.contents.records}


def assert_refused(folder: Path, why: str) -> None:
    """Neither a reader nor a writer gets the study."""
    for opening in (Store.read(folder), study(folder)):
        with pytest.raises(InputError, match=why), limited(), opening:
            pass


def results_in(folder: Path) -> set[str]:
    """The units that have a result, each the one that `fill` stores."""
    with Store.read(folder) as opened:
        for name, kept in opened.contents.records.items():
            unit = opened.contents.entries[name].unit
            assert unit.id == name
            assert opened.record(name).same_as(record(unit))
            assert (kept.provenance, kept.seconds, kept.state_bytes) == (MADE, 1.25, 1000)
        return set(opened.contents.records)
