"""Logs and journals beside the file of a study: applied to the file they belong to, or refused."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from onepass.studies import recovery
from onepass.studies.folder import FILE
from tests.commands import TINY, exit_code
from tests.studies.stored import (
    GRID,
    MADE,
    RUNS,
    as_older_versions,
    assert_refused,
    fill,
    journal_back_to,
    record,
    records_in,
    study,
)


@pytest.mark.parametrize("end", ["-wal", "-journal"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_log_or_a_journal_without_its_file_is_left_alone(
    empty: bool, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if empty:
        (tmp_path / FILE).touch()
    (tmp_path / f"{FILE}{end}").write_bytes(b"mine")
    assert exit_code(*TINY, "--out", str(tmp_path)) == 2
    assert f"{FILE}{end} beside it is not of a new study: move it away" in capsys.readouterr().err
    assert (tmp_path / f"{FILE}{end}").read_bytes() == b"mine"


def older_log(folder: Path) -> bytes:
    """The write-ahead log of an older state of a study that goes on afterwards."""
    with study(folder) as opened:
        as_older_versions(opened)
        opened.plan([GRID])
        opened.add({GRID[0].id: record(GRID[0])}, MADE)
        log = (folder / f"{FILE}-wal").read_bytes()
        opened.add({GRID[1].id: record(GRID[1])}, MADE)
    assert len(records_in(folder)) == 2
    return log


def test_an_old_log_beside_a_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}-wal").write_bytes(older_log(tmp_path))
    before = (tmp_path / FILE).read_bytes()
    why = "wal beside it is older than it and would hide 1 results: move it away"
    assert_refused(tmp_path, why)
    assert (tmp_path / FILE).read_bytes() == before
    (tmp_path / f"{FILE}-wal").unlink()
    assert len(records_in(tmp_path)) == 2


def test_a_journal_is_applied_to_the_file_it_belongs_to_and_to_no_other(tmp_path: Path) -> None:
    fill(tmp_path)
    journal = journal_back_to((tmp_path / FILE).read_bytes())
    with study(tmp_path) as opened:
        opened.plan([RUNS])
    next_one = (tmp_path / FILE).read_bytes()
    with study(tmp_path) as opened:
        opened.add({unit.id: record(unit) for unit in RUNS}, MADE)
    newest = (tmp_path / FILE).read_bytes()
    (tmp_path / f"{FILE}-journal").write_bytes(journal)
    assert_refused(tmp_path, "journal beside it is of another state of the study")
    assert (tmp_path / FILE).read_bytes() == newest
    (tmp_path / FILE).write_bytes(next_one)
    assert len(records_in(tmp_path)) == 2
    assert (tmp_path / FILE).read_bytes() == next_one, "reading changes nothing"
    with study(tmp_path) as opened:
        assert len(opened.contents.entries) == 2
    assert not (tmp_path / f"{FILE}-journal").exists()


def test_a_journal_that_names_other_files_is_refused_and_they_stay(tmp_path: Path) -> None:
    """SQLite removes such a file once it has read the journal."""
    fill(tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    name = str(victim).encode()
    page, length, checksum = (
        number.to_bytes(4, "big") for number in (2**30 // 4096 + 1, len(name), sum(name))
    )
    journal = journal_back_to((tmp_path / FILE).read_bytes())
    journal += page + name + length + checksum + recovery._MAGIC
    (tmp_path / f"{FILE}-journal").write_bytes(journal)
    assert_refused(tmp_path, "names other files")
    assert victim.read_bytes() == b"mine"
    shutil.copytree(tmp_path, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / FILE) as connection:
        connection.execute("SELECT * FROM units")
    connection.close()
    assert not victim.exists(), "what SQLite does with it: this test shows what it says"


def test_a_study_of_an_older_version_is_read_from_a_folder_that_is_read_only(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(records_in(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
