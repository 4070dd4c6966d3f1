"""Links, pipes and endless files in a study from elsewhere: nothing is written through them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onepass.errors import InputError
from onepass.files import temporary_name
from onepass.protocol import Snapshot
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.folder import FILE, PROGRESS
from onepass.studies.progress import Progress, ProgressFile
from onepass.studies.rescue import rescue
from tests.commands import TINY, exit_code
from tests.fuzzing import limited
from tests.studies.stored import GRID, MADE, assert_refused, fill, record, records_in, study


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's beside the study, which stays as it is."""
    path = tmp_path / "victim"
    path.write_bytes(b"mine")
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_bytes() == b"mine"
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_what_a_study_says_about_itself_goes_through_no_link(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / PROGRESS
    for name in (path.name, ".onepass-partial-progress", temporary_name(path.name)):
        (tmp_path / name).symlink_to(victim)
    progress = ProgressFile(tmp_path)
    progress._written = 0
    progress.show(Progress(5.0, {}))
    assert not path.is_symlink()
    assert json.loads(path.read_text())["left"] == 5
    progress.remove()
    assert not path.exists()


def test_a_checkpoint_that_is_a_link_is_replaced_and_what_it_leads_to_stays(
    victim: Path, tmp_path: Path
) -> None:
    snapshot = Snapshot(1, 4, {"theta": torch.ones(3)}, {})
    for suffix in ("json", "safetensors"):
        (tmp_path / f"0001-00000004.{suffix}").symlink_to(victim)
    keeper = Checkpoints(tmp_path, "fleet")
    assert keeper.last() is None
    keeper.keep(snapshot)
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert keeper.last() is not None


def test_a_file_of_arrays_that_is_a_link_is_replaced_and_what_it_leads_to_stays(
    victim: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "study")
    (found,) = (tmp_path / "study" / "arrays").iterdir()
    (tmp_path / "other" / "arrays").mkdir(parents=True)
    (tmp_path / "other" / "arrays" / found.name).symlink_to(victim)
    with pytest.raises(InputError, match="holds 1 files of results"), study(tmp_path / "other"):
        pass
    (tmp_path / "other" / "arrays" / found.name).unlink()
    with study(tmp_path / "other") as opened:
        (tmp_path / "other" / "arrays" / found.name).symlink_to(victim)
        opened.plan([GRID])
        opened.add({unit.id: record(unit) for unit in GRID}, MADE)
    assert len(records_in(tmp_path / "other")) == 2


@pytest.mark.parametrize("name", [FILE, "lock", "arrays", "checkpoints", f"checkpoints/{'0' * 16}"])
@pytest.mark.parametrize("there", [True, False])
def test_a_study_is_written_to_no_place_that_a_link_leads_to(
    there: bool, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "study")
    (tmp_path / "study" / "checkpoints" / ("0" * 16)).mkdir(parents=True)
    path, target = tmp_path / "study" / name, tmp_path / "target"
    path.rename(target) if there else shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)
    before = {found: found.lstat().st_mtime_ns for found in tmp_path.rglob("*")}
    assert exit_code(*TINY, "--out", str(tmp_path / "study")) == 2
    said = capsys.readouterr().err
    assert f"{path} is a link" in said
    assert said.count("\n") == 1
    assert {found: found.lstat().st_mtime_ns for found in tmp_path.rglob("*")} == before
    if there:
        assert len(records_in(tmp_path / "study")) == 2, "it may be read"


def test_the_folder_of_a_study_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "study").symlink_to(tmp_path / "disk")
    fill(tmp_path / "study")
    assert len(records_in(tmp_path / "disk")) == 2


KINDS = ["a link", "a pipe", "a link to nothing", "a link to an empty file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["-journal", "-wal"])
def test_a_journal_that_is_no_plain_file_is_refused(
    kind: str, end: str, victim: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "study")
    path, target = tmp_path / "study" / f"{FILE}{end}", tmp_path / "target"
    if kind == "a link to an empty file":
        target.touch()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if kind == "a link" else target)
    assert_refused(tmp_path / "study", f"{end} beside it is no plain file: move it away")
    with pytest.raises(InputError, match="is no plain file"), limited(10):
        rescue(tmp_path / "study", tmp_path / "rescued")
    assert not target.exists() or target.read_bytes() == b""


def endless(path: Path, kind: str) -> None:
    """What a reader would never come to the end of, or not before memory is used up."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)


ENDLESS = pytest.mark.parametrize("kind", ["a pipe", "a device", "a sparse file"])


@ENDLESS
def test_a_progress_file_without_an_end_says_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    endless(tmp_path / ".onepass-progress.json", kind)
    with limited(10):
        assert exit_code("status", str(tmp_path)) == 0
    assert "2 of" in capsys.readouterr().out


@ENDLESS
def test_arrays_without_an_end_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    (path,) = (tmp_path / "arrays").iterdir()
    endless(path, kind)
    with limited(10):
        assert exit_code("table", str(tmp_path)) == 2
    why = "too large" if kind == "a sparse file" else "not a plain file"
    assert f"{path} cannot be used (it is {why})" in capsys.readouterr().err


@ENDLESS
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_checkpoint_without_an_end_is_not_used(suffix: str, kind: str, tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, "fleet")
    keeper.keep(Snapshot(1, 4, {"theta": torch.ones(3)}, {}))
    keeper.keep(Snapshot(1, 8, {"theta": torch.ones(3)}, {}))
    endless(tmp_path / f"0001-00000008.{suffix}", kind)
    with limited(10):
        found = keeper.last()
    assert found is not None
    assert found.batches == 4


def test_a_pipe_with_the_name_of_a_study_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / FILE)
    assert exit_code(*TINY, "--out", str(tmp_path)) == 2
    assert "it is no plain file" in capsys.readouterr().err
    assert (tmp_path / FILE).is_fifo()
