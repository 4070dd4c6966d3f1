"""Other processes, other files, other file systems: nothing of theirs is touched, and nothing they do goes unnoticed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onepass.cli import main
from onepass.errors import InputError
from onepass.files import TEMPORARY, digest, temporary_name
from onepass.protocol import Snapshot
from onepass.studies import checkpoint, database, locking, recovery
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.database import FILE
from onepass.studies.rescue import rescue
from onepass.studies.store import Store
from onepass.studies.study import _Progress
from tests.fuzzing import limited
from tests.studies.stored import (
    GRID,
    MADE,
    RUNS,
    as_older_versions,
    fill,
    journal_back_to,
    record,
    study,
)

QUICK = [
    "--methods",
    "van",
    "--seeds",
    "1",
    "--workers",
    "1",
    "--set",
    "train_examples=20",
    "--set",
    "test_examples=10",
    "--set",
    "hidden=[4]",
]


def outcome(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def records(folder: Path) -> int:
    with Store.read(folder) as opened:
        return len([opened.record(unit) for unit in opened.contents.records])


# ---- a folder with other things in it


def test_a_run_leaves_the_users_own_files_in_its_folder_as_they_are(tmp_path: Path) -> None:
    hexadecimal = "0123456789abcdef"
    names = [
        *(
            "checkpoints/model.pt",
            "checkpoints/run-1/0001-00000004.json",
            f"checkpoints/{hexadecimal}/notes.json",
        ),
        *(
            "progress.json",
            ".partial-x",
            ".partial-progress.json",
            ".onepass-partial-notes",
            "lock",
            "arrays/mine.npy",
            "arrays/.partial-y",
        ),
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert (
        outcome("run", "quickstart", "--out", str(tmp_path), *QUICK, "--checkpoint-every", "1") == 0
    )
    assert [(tmp_path / name).read_text() for name in names] == names
    assert outcome("table", str(tmp_path)) == 0


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
    for name in (
        "lock",
        FILE,
        f"{FILE}-journal",
        "arrays",
        "arrays/t.json",
        "checkpoints",
        f"checkpoints/{'0' * 16}/t.json",
        ".onepass-progress.json",
    ):
        with pytest.raises(InputError, match="belongs to a study"):
            database.check_target(tmp_path / name)
    database.check_target(tmp_path / "progress.json")


# ---- links and pipes in a study from elsewhere


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's beside the study, which stays as it is."""
    path = tmp_path / "victim"
    path.write_bytes(b"mine")
    before = path.stat()
    yield path
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == (
        b"mine",
        before.st_mtime_ns,
        before.st_ino,
    )


def test_what_a_study_says_about_itself_goes_through_no_link(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        ".onepass-progress.json",
        ".onepass-partial-progress",
        temporary_name(".onepass-progress.json"),
    ]
    for name in names:
        (tmp_path / name).symlink_to(victim)
    progress = _Progress(tmp_path / names[0])
    progress._shown = 0
    progress.show([], 5.0)
    assert not (tmp_path / names[0]).is_symlink()
    assert json.loads((tmp_path / names[0]).read_text())["left"] == 5
    progress.remove()
    assert not (tmp_path / names[0]).exists()


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
    assert records(tmp_path / "other") == 2


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
    assert outcome("run", "quickstart", "--out", str(tmp_path / "study"), *QUICK) == 2
    said = capsys.readouterr().err
    assert f"{path} is a link" in said
    assert said.count("\n") == 1
    assert {found: found.lstat().st_mtime_ns for found in tmp_path.rglob("*")} == before
    if there:
        assert records(tmp_path / "study") == 2, "it may be read"


def test_the_folder_of_a_study_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "study").symlink_to(tmp_path / "disk")
    fill(tmp_path / "study")
    assert records(tmp_path / "disk") == 2


@pytest.mark.parametrize(
    "kind", ["a link", "a pipe", "a link to nothing", "a link to an empty file"]
)
@pytest.mark.parametrize("end", ["-journal", "-wal"])
def test_a_journal_that_is_no_plain_file_is_refused(
    kind: str, end: str, victim: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "study")
    path, target = tmp_path / "study" / f"{FILE}{end}", tmp_path / "target"
    if kind == "a link to an empty file":
        target.touch()
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to(victim if kind == "a link" else target)
    for opening in (Store.read(tmp_path / "study"), study(tmp_path / "study")):
        with (
            pytest.raises(InputError, match=f"{end} beside it is no plain file: move it away"),
            limited(10),
            opening,
        ):
            pass
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
        assert outcome("status", str(tmp_path)) == 0
    assert "2 of" in capsys.readouterr().out


@ENDLESS
def test_arrays_without_an_end_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    (path,) = (tmp_path / "arrays").iterdir()
    endless(path, kind)
    with limited(10):
        assert outcome("table", str(tmp_path)) == 2
    assert (
        f"{path} cannot be used (it is {'too large' if kind == 'a sparse file' else 'not a plain file'})"
        in capsys.readouterr().err
    )


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


def test_what_a_killed_process_left_is_gone_after_the_next_run_and_files_of_others_stay(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    (tmp_path / "checkpoints" / ("0" * 16)).mkdir(parents=True)
    (tmp_path / "checkpoints" / "mine").mkdir()
    places = [
        tmp_path / place for place in (".", "arrays", f"checkpoints/{'0' * 16}", "checkpoints/mine")
    ]
    left = [
        place / name
        for place in places
        for name in (temporary_name("t"), f"{temporary_name('t')}-{'0' * 16}")
    ]
    others = [place / f"{TEMPORARY}notes" for place in places]
    for path in (*left, *others):
        path.touch()
    with study(tmp_path):
        pass
    assert [path.exists() for path in left] == [False] * 6 + [True] * 2
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("end", ["-wal", "-journal"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_log_or_a_journal_without_its_file_is_left_alone(
    empty: bool, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if empty:
        (tmp_path / FILE).touch()
    (tmp_path / f"{FILE}{end}").write_bytes(b"mine")
    assert outcome("run", "quickstart", "--out", str(tmp_path), *QUICK) == 2
    assert f"{FILE}{end} beside it is not of a new study: move it away" in capsys.readouterr().err
    assert (tmp_path / f"{FILE}{end}").read_bytes() == b"mine"


def test_a_pipe_with_the_name_of_a_study_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / FILE)
    assert outcome("run", "quickstart", "--out", str(tmp_path), *QUICK) == 2
    assert "it is no plain file" in capsys.readouterr().err
    assert (tmp_path / FILE).is_fifo()


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from onepass.studies import database
from tests.studies.stored import fill
database.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
fill(Path({folder!r}))
"""


def test_what_a_killed_creation_left_is_gone_after_the_next_run(tmp_path: Path) -> None:
    script = KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], timeout=100)
    assert ended.returncode == -signal.SIGKILL
    assert any(path.name.startswith(TEMPORARY) for path in tmp_path.iterdir())
    fill(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "lock", "arrays"}


# ---- other processes


@pytest.fixture
def locks_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def test_a_second_driver_is_refused_though_the_file_lock_was_removed(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        (tmp_path / "lock").unlink()
        assert locking.running(tmp_path)
        with pytest.raises(InputError, match="another process is working"), study(tmp_path):
            pass
        opened.plan([GRID])
    assert not locking.running(tmp_path)


@pytest.mark.usefixtures("locks_that_do_nothing")
def test_a_driver_that_another_one_has_written_beside_stops_and_nothing_is_damaged(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    with study(tmp_path) as first, study(tmp_path) as second:
        first.plan([RUNS])
        for change in (
            lambda: second.plan([RUNS]),
            lambda: second.note(packing={}),
            lambda: second.plan([RUNS[:1]]),
        ):
            with pytest.raises(InputError, match="another process has written to the study in"):
                change()
        first.add({unit.id: record(unit) for unit in RUNS}, MADE)
    assert records(tmp_path) == 4


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
    assert records(tmp_path) == 2


TWO = """
import fcntl, sys
fcntl.flock = lambda *_: None
sys.path.insert(0, {root!r})
from pathlib import Path
from onepass.errors import InputError
from tests.studies.stored import GRID, MADE, RUNS, record, study
try:
    for _ in range(5):
        with study(Path({folder!r})) as opened:
            for unit in [*GRID, *RUNS]:
                if unit.id not in opened.contents.entries:
                    opened.plan([[unit]])
                if unit.id not in opened.contents.records:
                    opened.add({{unit.id: record(unit)}}, MADE)
except InputError as reason:
    print(reason)
"""


def test_two_processes_without_locks_store_every_unit_once_or_stop_with_a_sentence(
    tmp_path: Path,
) -> None:
    script = TWO.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        said, errors = process.communicate(timeout=100)
        assert errors == ""
        assert process.returncode == 0
        assert said.count("\n") <= 1
    assert records(tmp_path) == 4


# ---- what is done to the file


@pytest.mark.parametrize("when", ["before the end", "at the end"])
def test_a_file_that_is_removed_while_the_study_runs_is_put_back(when: str, tmp_path: Path) -> None:
    fill(tmp_path)

    def run() -> None:
        with study(tmp_path) as opened:
            opened.plan([RUNS])
            (tmp_path / FILE).unlink()
            if when == "before the end":
                with pytest.raises(InputError, match="was removed"):
                    opened.add({RUNS[0].id: record(RUNS[0])}, MADE)
                opened.add({RUNS[1].id: record(RUNS[1])}, MADE)

    with pytest.raises(
        InputError,
        match="was removed or replaced while the study ran; all that is finished was saved as",
    ):
        run()
    assert records(tmp_path) == (4 if when == "before the end" else 2)
    with study(tmp_path) as opened:
        assert len(opened.contents.entries) == 4


def test_a_private_file_that_is_put_back_is_private(tmp_path: Path) -> None:
    def run() -> None:
        with study(fill(tmp_path)) as opened:
            (tmp_path / FILE).chmod(0o600)
            opened.plan([RUNS])
            (tmp_path / FILE).unlink()

    with pytest.raises(InputError, match="was removed or replaced"):
        run()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_moved_while_the_study_runs_has_all_that_is_finished(
    tmp_path: Path,
) -> None:
    def run() -> None:
        with study(fill(tmp_path / "before")) as opened:
            (tmp_path / "before").rename(tmp_path / "after")
            opened.plan([RUNS])

    with pytest.raises(
        InputError, match=r"was removed or moved while .* give the same command with its new place"
    ):
        run()
    assert not (tmp_path / "before").exists()
    assert records(tmp_path / "after") == 2
    with study(tmp_path / "after") as opened:
        assert len(opened.contents.entries) == 4


def test_a_file_that_is_replaced_while_the_study_runs_stays_and_ours_is_saved_beside_it(
    tmp_path: Path,
) -> None:
    other = fill(tmp_path / "other")

    def run() -> None:
        with study(tmp_path / "ours") as opened:
            opened.plan([RUNS])
            shutil.copy(other / FILE, tmp_path / "new")
            os.replace(tmp_path / "new", tmp_path / "ours" / FILE)
            opened.add({unit.id: record(unit) for unit in RUNS}, MADE)

    with pytest.raises(InputError, match=r"saved as .*study.sqlite.kept"):
        run()
    assert (tmp_path / "ours" / FILE).read_bytes() == (other / FILE).read_bytes()
    os.replace(tmp_path / "ours" / f"{FILE}.kept", tmp_path / "ours" / FILE)
    assert records(tmp_path / "ours") == 2


def test_neither_the_users_nor_an_earlier_kept_file_is_replaced(tmp_path: Path) -> None:
    other = fill(tmp_path / "other") / FILE
    (tmp_path / f"{FILE}.kept").write_bytes(b"mine")
    (tmp_path / f"{FILE}.kept-2").symlink_to("nowhere")

    def run() -> None:
        with study(tmp_path):
            os.replace(shutil.copy(other, tmp_path / "new"), tmp_path / FILE)

    for number in (3, 4):
        with pytest.raises(InputError, match=rf"saved as .*study.sqlite.kept-{number}:"):
            run()
    assert (tmp_path / f"{FILE}.kept").read_bytes() == b"mine"
    assert (tmp_path / f"{FILE}.kept-2").is_symlink()


def test_a_run_whose_file_is_removed_ends_with_a_sentence_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adding = Store.add

    def remove_and_add(self: Store, *arguments: object) -> None:
        monkeypatch.setattr(Store, "add", adding)
        (tmp_path / FILE).unlink()
        adding(self, *arguments)  # type: ignore[arg-type]

    command = ("run", "quickstart", "--out", str(tmp_path), *QUICK)
    monkeypatch.setattr(Store, "add", remove_and_add)
    assert outcome(*command) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "was removed" in said
    assert "Traceback" not in said
    before = records(tmp_path)
    assert before > 0
    assert outcome(*command) == 0
    assert records(tmp_path) > before


def older_log(folder: Path) -> bytes:
    """The write-ahead log of an older state of a study that goes on afterwards."""
    with study(folder) as opened:
        as_older_versions(opened)
        opened.plan([GRID])
        opened.add({GRID[0].id: record(GRID[0])}, MADE)
        log = (folder / f"{FILE}-wal").read_bytes()
        opened.add({GRID[1].id: record(GRID[1])}, MADE)
    assert records(folder) == 2
    return log


def test_an_old_log_beside_a_newer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}-wal").write_bytes(older_log(tmp_path))
    before = (tmp_path / FILE).read_bytes()
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with (
            pytest.raises(
                InputError,
                match="wal beside it is older than it and would hide 1 results: move it away",
            ),
            opening,
        ):
            pass
    assert (tmp_path / FILE).read_bytes() == before
    (tmp_path / f"{FILE}-wal").unlink()
    assert records(tmp_path) == 2


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
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with (
            pytest.raises(InputError, match="journal beside it is of another state of the study"),
            opening,
        ):
            pass
    assert (tmp_path / FILE).read_bytes() == newest
    (tmp_path / FILE).write_bytes(next_one)
    assert records(tmp_path) == 2
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
    named = (
        (2**30 // 4096 + 1).to_bytes(4, "big")
        + name
        + len(name).to_bytes(4, "big")
        + sum(name).to_bytes(4, "big")
        + recovery._MAGIC
    )
    (tmp_path / f"{FILE}-journal").write_bytes(
        journal_back_to((tmp_path / FILE).read_bytes()) + named
    )
    for opening in (Store.read(tmp_path), study(tmp_path)):
        with pytest.raises(InputError, match="names other files"), opening:
            pass
    assert victim.read_bytes() == b"mine"
    shutil.copytree(tmp_path, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / FILE) as connection:
        connection.execute("SELECT * FROM units")
    connection.close()
    assert not victim.exists(), "what SQLite does with it: this test shows what it says"


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


# ---- results that are gone


@pytest.mark.parametrize("harm", ["all", "one", "altered"])
def test_a_study_whose_arrays_are_gone_is_not_said_to_be_complete(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    with study(tmp_path) as opened:
        opened.plan([RUNS])
        opened.add({RUNS[0].id: record(RUNS[0])}, MADE)
    runs = [
        path for path in (tmp_path / "arrays").iterdir() if RUNS[0].id.encode() in path.read_bytes()
    ]
    for path in runs if harm == "one" else (tmp_path / "arrays").iterdir():
        if harm == "altered":
            path.write_bytes(path.read_bytes() + b" ")
        else:
            path.unlink()
    assert outcome("status", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert "cannot be used" in said.err
    assert not said.out


def test_a_study_without_results_needs_no_folder_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with study(tmp_path) as opened:
        opened.plan([GRID])
    (tmp_path / "arrays").rmdir()
    assert outcome("status", str(tmp_path)) == 0
    assert "0 of" in capsys.readouterr().out


# ---- file systems that cannot lock


@pytest.mark.parametrize("kind", ["flock", "lockf"])
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_where_files_cannot_be_locked_a_study_is_read_and_writing_is_one_sentence(
    code: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, kind, refuse)
    for command in (["status"], ["table"], ["show"], ["verify"], ["companions"]):
        assert outcome(*command, str(tmp_path)) in (0, 1), command
    capsys.readouterr()
    for command in (
        ["run", "--out", str(tmp_path)],
        ["merge", str(tmp_path / "new"), str(tmp_path)],
    ):
        assert outcome(*command) == 2
        said = capsys.readouterr().err
        assert "cannot lock files" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("kind", ["flock", "lockf"])
@pytest.mark.parametrize("command", ["run", "merge", "rescue"])
def test_a_command_that_is_refused_where_files_cannot_be_locked_leaves_nothing(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fill(tmp_path / "old")
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, kind, refuse)
    for new in (tmp_path / "mine", tmp_path / "mine" / "new", tmp_path / "two" / "folders"):
        arguments = {
            "run": ["quickstart", "--out", str(new)],
            "merge": [str(new), str(old)],
            "rescue": [str(old), str(new)],
        }
        assert outcome(command, *arguments[command]) == 2
        assert sorted(tmp_path.rglob("*")) == before


def test_where_sqlite_cannot_lock_a_study_is_read_without_asking_it_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for half a minute: it takes ENOLCK for a file that is busy."""
    fill(tmp_path)
    asked: list[str] = []
    connect = database._connect

    def noted(uri: str) -> sqlite3.Connection:
        asked.append(uri)
        return connect(uri)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(database, "_connect", noted)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert records(tmp_path) == 2
    assert [uri.partition("?")[2] for uri in asked if uri.startswith("file:")] == [
        "mode=ro&immutable=1"
    ]


def test_a_study_of_an_older_version_is_read_from_a_folder_that_is_read_only(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert records(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
