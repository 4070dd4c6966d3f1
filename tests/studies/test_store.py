"""The result store: raw records, whole or not at all, and never silently wrong."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onepass import files
from onepass.errors import InputError
from onepass.studies import database, locking
from onepass.studies.database import FILE
from onepass.studies.recipe import load
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Store
from tests.studies.stored import GRID, MADE, RECIPE, RUNS, fill, record, results_in, study


def test_what_is_stored_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    with Store.read(fill(tmp_path)) as opened:
        for unit in GRID:
            found, expected = opened.record(unit.id), record(unit)
            assert found.same_as(expected)
            assert (found.seconds, found.state_bytes) == (expected.seconds, expected.state_bytes)
            assert opened.contents.records[unit.id].provenance == MADE
            assert opened.contents.entries[unit.id].unit == unit


def test_a_unit_is_named_by_everything_that_matters_to_its_result_and_by_nothing_else() -> None:
    names = {unit.id for unit in GRID}
    assert len(names) == len(GRID)
    for change in ("batch_size=5", "hidden=[8]", "train_examples=60"):
        assert names.isdisjoint(
            unit.id for unit in cross_validation(load("quickstart", [change]), "van")
        ), change
    for change in (
        "memory_per_task=7",
        "gradients=looped",
        "memory=ring",
        "options.a-gem.reference_batch=9",
        "union_softmax=false",
    ):
        assert names <= {
            unit.id for unit in cross_validation(load("quickstart", [change]), "van")
        }, change
    assert {unit.id for unit in cross_validation(RECIPE, "a-gem")}.isdisjoint(
        unit.id for unit in cross_validation(load("quickstart", ["memory_per_task=7"]), "a-gem")
    )


def test_a_unit_is_never_stored_twice(tmp_path: Path) -> None:
    fill(tmp_path)
    with study(tmp_path) as opened:
        with pytest.raises(InputError, match="UNIQUE"):
            opened.add({GRID[0].id: record(GRID[0], 0.9)}, MADE)
        assert len(opened.contents.records) == 2
    with Store.read(tmp_path) as opened:
        assert opened.record(GRID[0].id).same_as(record(GRID[0]))


def test_a_batch_of_records_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID])
        opened.add({GRID[0].id: record(GRID[0])}, MADE)
        with pytest.raises(InputError):
            opened.add({GRID[1].id: record(GRID[1]), GRID[0].id: record(GRID[0])}, MADE)
        assert list(opened.contents.records) == [GRID[0].id]
    with Store.read(tmp_path) as opened:
        assert list(opened.contents.records) == [GRID[0].id]


def test_the_plan_survives_and_failed_units_are_tried_again_when_forgiven(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID[:1], GRID[1:]])
        opened.plan([RUNS])
        opened.fail([GRID[0].id], "Traceback: no")
    with study(tmp_path) as opened:
        assert [[entry.unit for entry in fleet] for fleet in opened.open_fleets().values()] == [
            GRID[1:],
            RUNS,
        ]
        assert opened.contents.entries[GRID[0].id].traceback == "Traceback: no"
        opened.forgive()
        assert [[entry.unit for entry in fleet] for fleet in opened.open_fleets().values()] == [
            GRID[:1],
            GRID[1:],
            RUNS,
        ]


def test_one_process_at_a_time_may_write_and_readers_do_not_mind(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID])
        assert locking.running(tmp_path)
        with pytest.raises(InputError, match="another process is working"), study(tmp_path):
            pass
        with Store.read(tmp_path) as reader:
            assert len(reader.contents.entries) == 2
    assert not locking.running(tmp_path)


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    fill(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with Store.read(tmp_path) as opened:
        opened.record(GRID[0].id)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_study_of_an_older_version_whose_process_was_killed_is_read_from_its_log(
    tmp_path: Path,
) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.studies.stored import GRID, MADE, as_older_versions, record, study
with study(Path({str(tmp_path)!r})) as opened:
    as_older_versions(opened)
    opened.plan([GRID])
    opened.add({{unit.id: record(unit) for unit in GRID}}, MADE)
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / f"{FILE}-wal").exists()
    with Store.read(tmp_path) as opened:
        assert len(opened.contents.records) == 2
    with study(tmp_path) as opened:
        assert len(opened.contents.records) == 2


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no study"), Store.read(tmp_path):
        pass


# ---- versions


def test_a_store_of_an_older_version_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    older = (tmp_path / FILE).read_bytes()

    def add_host(connection: sqlite3.Connection) -> None:
        """An imagined version 2 that knows who made the study."""
        database.put(connection, "study", ("host", '"unknown"'))

    monkeypatch.setattr(database, "VERSION", 2)
    monkeypatch.setitem(database.MIGRATIONS, 1, add_host)
    with Store.read(tmp_path) as opened:
        assert opened.contents.study["host"] == "unknown"
        assert opened.record(GRID[0].id).same_as(record(GRID[0]))
    assert (tmp_path / FILE).read_bytes() == older, "readers leave the file as it is"
    with study(tmp_path) as opened:
        assert opened.contents.study["host"] == "unknown"
    with sqlite3.connect(tmp_path / FILE) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)

    def fail_half_way(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM records")
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(database, "VERSION", 2)
        patch.setitem(database.MIGRATIONS, 1, fail_half_way)
        with pytest.raises(InputError, match="disk I/O error"), study(tmp_path):
            pass
    with Store.read(tmp_path) as opened:
        assert len(opened.contents.records) == 2


def test_a_store_of_a_newer_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(database, "VERSION", 9)
        fill(tmp_path)
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with pytest.raises(InputError, match="newer onepass"), opening:
            pass


def test_the_first_version_can_be_read_forever() -> None:
    """The file beside this test was written by version 1; whatever the schema becomes, it must open."""
    with Store.read(Path(__file__).with_name("version-1")) as opened:
        assert len(opened.contents.records) == 2
        for unit in opened.contents.records:
            found = opened.record(unit)
            assert found.accuracy.shape == (3, 3)
            assert found.violations == [0, 3, 1]
            assert found.seconds == 1.25
            assert opened.contents.records[unit].provenance == MADE


# ---- damage


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM records WHERE unit = (SELECT unit FROM records LIMIT 1)", "rows"),
        ("DELETE FROM units", "rows"),
        ("UPDATE records SET seconds = 9.0", "'records' was altered"),
        ("UPDATE records SET diverged = 1", "'records' was altered"),
        (
            "UPDATE units SET configuration = replace(configuration, '0.1', '0.3')",
            "'units' was altered",
        ),
        ("UPDATE study SET value = replace(value, 'van', 'ewc')", "'study' was altered"),
        ("UPDATE units SET id = 'x' WHERE place = 0", "'units' was altered"),
        ("DROP TABLE records", "no such table"),
        ("PRAGMA application_id = 7", "not a study of onepass"),
    ],
)
def test_a_store_that_somebody_edited_is_refused(
    statement: str, reason: str, tmp_path: Path
) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(statement)
    connection.close()
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with pytest.raises(InputError, match=reason), opening:
            pass


def test_a_store_that_was_emptied_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / FILE).write_bytes(b"")
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with pytest.raises(InputError, match="it is empty"), opening:
            pass


# ---- a disk that fails


@pytest.fixture(params=[errno.ENOSPC, errno.EROFS, errno.EIO])
def broken_disk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    def break_it() -> None:
        def refuse(*_: object) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(files.os, "fsync", refuse)

    return break_it


def test_when_arrays_cannot_be_written_nothing_is_stored_and_it_works_later(
    broken_disk: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID])
        broken_disk()
        with pytest.raises(InputError, match=r"cannot write .* make room"):
            opened.add({unit.id: record(unit) for unit in GRID}, MADE)
    monkeypatch.undo()
    with study(tmp_path) as opened:
        assert not opened.contents.records
        assert list((tmp_path / "arrays").iterdir()) == []
        opened.add({unit.id: record(unit) for unit in GRID}, MADE)
    assert len(results_in(tmp_path)) == 2


def test_when_the_disk_is_full_for_sqlite_what_was_stored_stays_and_it_works_later(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    with study(tmp_path) as opened:
        opened._connection.execute(
            f"PRAGMA max_page_count = {opened._connection.execute('PRAGMA page_count').fetchone()[0]}"
        )
        with pytest.raises(InputError, match="full"):
            opened.plan(
                [evaluation(RECIPE.model_copy(update={"seeds": 50}), "van", {"learning_rate": 0.1})]
            )
        assert len(opened.contents.entries) == 2
        assert opened.open_fleets() == {}
    with study(tmp_path) as opened:
        opened.plan([RUNS])
        assert len(opened.contents.entries) == 4
    assert len(results_in(tmp_path)) == 2


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    names = [
        ".partial-x",
        "progress.json",
        "mine/.partial-notes",
        "arrays/.partial-x",
        "arrays/notes.safetensors",
        "checkpoints/model.pt",
        "lock",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    fill(tmp_path)
    with Store.read(tmp_path) as opened:
        assert len(opened.contents.records) == 2
    assert [(tmp_path / name).read_text() for name in names] == names


def test_a_folder_whose_name_cannot_be_is_one_sentence() -> None:
    with pytest.raises(InputError, match="too long"), Store.read(Path("x" * 300)):
        pass


def test_records_are_the_same_only_if_every_number_is() -> None:
    one = record(GRID[0])
    assert one.same_as(replace(one, seconds=7.0, state_bytes=1))
    for change in (
        {"diverged": True},
        {"violations": [0, 3, 2]},
        {"violations": None},
        {"memory_accuracy": None},
        {"seed": 4},
    ):
        assert not one.same_as(replace(one, **change)), change  # type: ignore[arg-type]
    altered = one.accuracy.copy()
    altered[1, 1] = np.nextafter(altered[1, 1], 1)
    assert not one.same_as(replace(one, accuracy=altered))
