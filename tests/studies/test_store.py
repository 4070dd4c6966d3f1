"""The result store: raw records, whole or not at all, and never silently wrong."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onepass import files
from onepass.errors import InputError
from onepass.studies import locking
from onepass.studies.folder import FILE
from onepass.studies.recipe import load
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Entry, Store, Unit
from tests.commands import exit_code
from tests.failing import failing
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
    def names(method: str, *changes: str) -> set[str]:
        return {unit.id for unit in cross_validation(load("quickstart", list(changes)), method)}

    of_van = {unit.id for unit in GRID}
    assert len(of_van) == len(GRID)
    for change in ("batch_size=5", "hidden=[8]", "train_examples=60"):
        assert of_van.isdisjoint(names("van", change)), change
    for change in ("memory_per_task=7", "gradients=looped", "memory=ring", "union_softmax=false"):
        assert of_van <= names("van", change), change
    assert of_van <= names("van", "options.a-gem.reference_batch=9")
    assert names("a-gem").isdisjoint(names("a-gem", "memory_per_task=7"))


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


def units_of(fleets: dict[int, list[Entry]]) -> list[list[Unit]]:
    return [[entry.unit for entry in fleet] for fleet in fleets.values()]


def test_the_plan_survives_and_failed_units_are_tried_again_when_forgiven(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID[:1], GRID[1:]])
        opened.plan([RUNS])
        opened.fail([GRID[0].id], "Traceback: no")
    with study(tmp_path) as opened:
        assert units_of(opened.open_fleets()) == [GRID[1:], RUNS]
        assert opened.contents.entries[GRID[0].id].traceback == "Traceback: no"
        opened.forgive()
        assert units_of(opened.open_fleets()) == [GRID[:1], GRID[1:], RUNS]


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


# ---- a disk that fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_when_arrays_cannot_be_written_nothing_is_stored_and_it_works_later(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken, study(tmp_path) as opened:
        opened.plan([GRID])
        broken.setattr(files.os, "fsync", failing(code))
        with pytest.raises(InputError, match=r"cannot write .* make room"):
            opened.add({unit.id: record(unit) for unit in GRID}, MADE)
    with study(tmp_path) as opened:
        assert not opened.contents.records
        assert list((tmp_path / "arrays").iterdir()) == []
        opened.add({unit.id: record(unit) for unit in GRID}, MADE)
    assert len(results_in(tmp_path)) == 2


def test_when_the_disk_is_full_for_sqlite_what_was_stored_stays_and_it_works_later(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    many = evaluation(RECIPE.model_copy(update={"seeds": 50}), "van", {"learning_rate": 0.1})
    with study(tmp_path) as opened:
        (pages,) = opened._connection.execute("PRAGMA page_count").fetchone()
        opened._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(InputError, match="full"):
            opened.plan([many])
        assert len(opened.contents.entries) == 2
        assert opened.open_fleets() == {}
    with study(tmp_path) as opened:
        opened.plan([RUNS])
        assert len(opened.contents.entries) == 4
    assert len(results_in(tmp_path)) == 2


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    names = [
        *(".partial-x", "progress.json", "mine/.partial-notes", "arrays/.partial-x"),
        *("arrays/notes.safetensors", "checkpoints/model.pt", "lock"),
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
    without = ({"violations": None}, {"memory_accuracy": None})
    for change in ({"diverged": True}, {"violations": [0, 3, 2]}, {"seed": 4}, *without):
        assert not one.same_as(replace(one, **change)), change  # type: ignore[arg-type]
    altered = one.accuracy.copy()
    altered[1, 1] = np.nextafter(altered[1, 1], 1)
    assert not one.same_as(replace(one, accuracy=altered))


@pytest.mark.parametrize("harm", ["all", "one", "altered"])
def test_a_study_whose_arrays_are_gone_is_not_said_to_be_complete(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    with study(tmp_path) as opened:
        opened.plan([RUNS])
        opened.add({RUNS[0].id: record(RUNS[0])}, MADE)
    for path in (tmp_path / "arrays").iterdir():
        if harm == "one" and RUNS[0].id.encode() not in path.read_bytes():
            continue
        if harm == "altered":
            path.write_bytes(path.read_bytes() + b" ")
        else:
            path.unlink()
    assert exit_code("status", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert "cannot be used" in said.err
    assert not said.out


def test_a_study_without_results_needs_no_folder_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID])
    (tmp_path / "arrays").rmdir()
    assert exit_code("status", str(tmp_path)) == 0
    assert "0 of" in capsys.readouterr().out
