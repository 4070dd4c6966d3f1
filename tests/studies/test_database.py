"""The file of a study: its versions, and refusing what was edited."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.studies import tables
from onepass.studies.folder import FILE
from onepass.studies.store import Store
from tests.studies.stored import GRID, MADE, assert_refused, fill, record, study


def test_a_store_of_an_older_version_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    older = (tmp_path / FILE).read_bytes()

    def add_host(connection: sqlite3.Connection) -> None:
        """An imagined version 2 that knows who made the study."""
        tables.put(connection, "study", ("host", '"unknown"'))

    monkeypatch.setattr(tables, "VERSION", 2)
    monkeypatch.setitem(tables.MIGRATIONS, 1, add_host)
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
        patch.setattr(tables, "VERSION", 2)
        patch.setitem(tables.MIGRATIONS, 1, fail_half_way)
        with pytest.raises(InputError, match="disk I/O error"), study(tmp_path):
            pass
    with Store.read(tmp_path) as opened:
        assert len(opened.contents.records) == 2


def test_a_store_of_a_newer_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tables, "VERSION", 9)
        fill(tmp_path)
    assert_refused(tmp_path, "newer onepass")


def test_the_first_version_can_be_read_forever() -> None:
    """Version 1 wrote the file beside this test; whatever the schema becomes, it must open."""
    with Store.read(Path(__file__).with_name("version-1")) as opened:
        assert len(opened.contents.records) == 2
        for unit in opened.contents.records:
            found = opened.record(unit)
            assert found.accuracy.shape == (3, 3)
            assert found.violations == [0, 3, 1]
            assert found.seconds == 1.25
            assert opened.contents.records[unit].provenance == MADE


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM records WHERE unit = (SELECT unit FROM records LIMIT 1)", "rows"),
        ("DELETE FROM units", "rows"),
        ("UPDATE records SET seconds = 9.0", "'records' was altered"),
        ("UPDATE records SET diverged = 1", "'records' was altered"),
        ("UPDATE units SET configuration = replace(configuration, '1', '3')", "'units' was alter"),
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
    assert_refused(tmp_path, reason)


def test_a_store_that_was_emptied_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / FILE).write_bytes(b"")
    assert_refused(tmp_path, "it is empty")
