"""A folder with other things in it: the user's files stay, and what a killed process left goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.files import TEMPORARY, digest, temporary_name
from onepass.studies import checkpoint, database, locking
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.folder import FILE, check_target
from onepass.studies.store import Store
from tests.commands import TINY, exit_code
from tests.studies.stored import fill, records_in, study


def test_a_run_leaves_the_users_own_files_in_its_folder_as_they_are(tmp_path: Path) -> None:
    names = [
        *("checkpoints/model.pt", "checkpoints/run-1/0001-00000004.json"),
        *("checkpoints/0123456789abcdef/notes.json", "progress.json", ".partial-x"),
        *(".partial-progress.json", ".onepass-partial-notes", "lock"),
        *("arrays/mine.npy", "arrays/.partial-y"),
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert exit_code(*TINY, "--out", str(tmp_path), "--checkpoint-every", "1") == 0
    assert [(tmp_path / name).read_text() for name in names] == names
    assert exit_code("table", str(tmp_path)) == 0


def test_only_checkpoints_are_removed_with_the_checkpoints(tmp_path: Path) -> None:
    fleet = tmp_path / "checkpoints" / digest("fleet")[:16]
    fleet.mkdir(parents=True)
    for name in ("0001-00000004.json", "0001-00000004.safetensors", "notes.json"):
        (fleet / name).touch()
    Checkpoints(fleet, "fleet").discard()
    assert [path.name for path in fleet.iterdir()] == ["notes.json"]
    checkpoint.discard_all(tmp_path / "checkpoints")
    assert (fleet / "notes.json").exists()
    (fleet / "notes.json").unlink()
    checkpoint.discard_all(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


def test_tables_go_to_no_file_that_a_study_owns(tmp_path: Path) -> None:
    fill(tmp_path)
    inside = ("arrays/t.json", f"checkpoints/{'0' * 16}/t.json", ".onepass-progress.json")
    for name in ("lock", FILE, f"{FILE}-journal", "arrays", "checkpoints", *inside):
        with pytest.raises(InputError, match="belongs to a study"):
            check_target(tmp_path / name)
    check_target(tmp_path / "progress.json")


def test_what_a_killed_process_left_is_gone_after_the_next_run_and_files_of_others_stay(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    (tmp_path / "checkpoints" / ("0" * 16)).mkdir(parents=True)
    (tmp_path / "checkpoints" / "mine").mkdir()
    folders = (".", "arrays", f"checkpoints/{'0' * 16}", "checkpoints/mine")
    places = [tmp_path / folder for folder in folders]
    names = (temporary_name("t"), f"{temporary_name('t')}-{'0' * 16}")
    left = [place / name for place in places for name in names]
    others = [place / f"{TEMPORARY}notes" for place in places]
    for path in (*left, *others):
        path.touch()
    with study(tmp_path):
        pass
    assert [path.exists() for path in left] == [False] * 6 + [True] * 2
    assert all(path.exists() for path in others)


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from onepass.studies import tables
from tests.studies.stored import fill
tables.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
fill(Path({folder!r}))
"""


def test_what_a_killed_creation_left_is_gone_after_the_next_run(tmp_path: Path) -> None:
    script = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], timeout=100)
    assert ended.returncode == -signal.SIGKILL
    assert any(path.name.startswith(TEMPORARY) for path in tmp_path.iterdir())
    fill(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "lock", "arrays"}


@pytest.mark.usefixtures("locks_that_do_nothing")
def test_of_two_processes_that_create_a_study_at_once_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naming = database._name

    def too_late(temporary: Path, path: Path) -> None:
        monkeypatch.setattr(database, "_name", naming)
        fill(tmp_path)
        naming(temporary, path)

    monkeypatch.setattr(database, "_name", too_late)
    with pytest.raises(InputError, match="another process is working"), study(tmp_path):
        pass
    assert len(records_in(tmp_path)) == 2


def test_a_reader_never_sees_a_study_that_is_half_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating = threading.Event()
    naming = database._name

    def slowly(temporary: Path, path: Path) -> None:
        creating.set()
        time.sleep(0.3)
        naming(temporary, path)

    monkeypatch.setattr(database, "_name", slowly)
    writer = threading.Thread(target=fill, args=(tmp_path,))
    writer.start()
    creating.wait(10)
    with Store.read(tmp_path) as opened:
        assert opened.contents.study["recipe"]
    writer.join()


def test_a_study_whose_creation_takes_long_is_said_to_be_just_being_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CREATION", 0.1)
    with locking.held(tmp_path):
        for content in (None, b""):
            if content is not None:
                (tmp_path / FILE).write_bytes(content)
            with pytest.raises(InputError, match="is just being created"), Store.read(tmp_path):
                pass
