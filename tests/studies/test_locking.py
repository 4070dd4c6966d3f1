"""One process at a time writes to a study, also where files cannot be locked."""

from __future__ import annotations

import errno
import fcntl
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.studies import database, locking
from tests.commands import exit_code, refusal
from tests.failing import failing
from tests.studies.stored import GRID, fill, records_in, study


def test_a_second_driver_is_refused_though_the_file_lock_was_removed(tmp_path: Path) -> None:
    with study(tmp_path) as opened:
        (tmp_path / "lock").unlink()
        assert locking.running(tmp_path)
        with pytest.raises(InputError, match="another process is working"), study(tmp_path):
            pass
        opened.plan([GRID])
    assert not locking.running(tmp_path)


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
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for process in both:
        said, errors = process.communicate(timeout=100)
        assert errors == ""
        assert process.returncode == 0
        assert said.count("\n") <= 1
    assert len(records_in(tmp_path)) == 4


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
    monkeypatch.setattr(fcntl, kind, failing(code))
    for command in (["status"], ["table"], ["show"], ["verify"], ["companions"]):
        assert exit_code(*command, str(tmp_path)) in (0, 1), command
    capsys.readouterr()
    for command in (["run", "--out"], ["merge", str(tmp_path / "new")]):
        assert "cannot lock files" in refusal(capsys, *command, str(tmp_path))


@pytest.mark.parametrize("kind", ["flock", "lockf"])
@pytest.mark.parametrize("command", ["run", "merge", "rescue"])
def test_a_command_that_is_refused_where_files_cannot_be_locked_leaves_nothing(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fill(tmp_path / "old")
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(fcntl, kind, failing(errno.ENOLCK))
    for new in (tmp_path / "mine", tmp_path / "mine" / "new", tmp_path / "two" / "folders"):
        arguments = {
            "run": ["quickstart", "--out", str(new)],
            "merge": [str(new), str(old)],
            "rescue": [str(old), str(new)],
        }
        assert exit_code(command, *arguments[command]) == 2
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

    monkeypatch.setattr(database, "_connect", noted)
    monkeypatch.setattr(fcntl, "lockf", failing(errno.ENOLCK))
    assert len(records_in(tmp_path)) == 2
    asked = [uri.partition("?")[2] for uri in asked if uri.startswith("file:")]
    assert asked == ["mode=ro&immutable=1"]
