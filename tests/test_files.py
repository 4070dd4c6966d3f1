"""Writing files: whole or not at all, with their rights, and a kill leaves nothing for long."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepass import files
from onepass.errors import InputError
from tests.failing import failing


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o077, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("had", [0o600, 0o640, 0o644, 0o664, 0o400])
def test_a_file_keeps_its_mode(had: int, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.write_bytes(b"old")
    path.chmod(had)
    files.write(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", had)


def test_a_new_file_obeys_the_umask(umask: int, tmp_path: Path) -> None:
    files.write(tmp_path / "new", b"")
    files.write_json(tmp_path / "new.json", {})
    assert (mode(tmp_path / "new"), mode(tmp_path / "new.json")) == (0o666 & ~umask, 0o666 & ~umask)


def test_a_private_file_is_private_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "saved", list[int]()
    path.touch(0o600)
    flush = os.fsync

    def noted(handle: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        flush(handle)

    monkeypatch.setattr(files.os, "fsync", noted)
    files.write(path, b"secret")
    assert seen[0] == 0o600


def test_the_group_gains_nothing_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    path.touch()
    path.chmod(0o664)
    real = path.stat()
    other = os.stat_result((*real[:5], real.st_gid + 1, *real[6:10]))
    monkeypatch.setattr(files.os, "fchown", failing(errno.EPERM))
    handle = os.open(path, os.O_RDWR)
    files._hand_on(other, handle)
    os.close(handle)
    assert mode(path) == 0o604


KILLED = """
import os, sys
from pathlib import Path
from onepass import files
files.os.fsync = lambda _: os.kill(os.getpid(), 9)
files.write(Path(sys.argv[1]), b"half")
"""


def kill_while_writing(path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9


def test_what_a_killed_process_left_is_removed_by_the_next_write_to_the_same_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "saved"
    files.write(path, b"old")
    for _ in range(2):
        kill_while_writing(path)
        assert len(list(tmp_path.glob(".onepass-partial-*"))) == 1, "a second kill adds none"
    assert path.read_bytes() == b"old"
    files.write(path, b"new")
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("saved", b"new")]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    handle, temporary = files._begin(path.resolve(), 0o600)
    os.write(handle, b"theirs")
    files.write(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert temporary.read_bytes() == b"theirs"
    os.close(handle)
    files.remove_if_abandoned(temporary)
    assert not temporary.exists()


def test_files_with_other_names_are_never_taken_for_leftovers(tmp_path: Path) -> None:
    names = (".partial-x", ".onepass-partial-notes", f".onepass-partial-{'0' * 16}", "saved")
    mine = [tmp_path / name for name in names]
    for path in mine:
        path.write_bytes(b"mine")
        files.remove_if_abandoned(path)
        assert path.read_bytes() == b"mine"
    link = tmp_path / files.temporary_name("saved")
    link.symlink_to(mine[0])
    files.remove_if_abandoned(link)
    assert link.is_symlink()


def test_where_files_cannot_be_locked_they_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    for content in (b"one", b"two"):
        files.write(tmp_path / "saved", content)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("saved", b"two")]


def test_links_in_a_circle_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for call in (lambda path: files.write(path, b""), files.check_writable):
        with pytest.raises(InputError, match=r"cannot (follow|write)"):
            call(tmp_path / "a")


def test_json_has_null_for_what_is_no_finite_number(tmp_path: Path) -> None:
    files.write_json(tmp_path / "t.json", {"a": float("nan"), "b": [float("inf"), 1, (2.5,)]})
    assert json.loads((tmp_path / "t.json").read_text()) == {"a": None, "b": [None, 1, [2.5]]}
