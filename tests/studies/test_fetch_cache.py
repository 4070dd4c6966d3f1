"""The cache of data sets: the user's own files stay, and what a killed process left goes."""

from __future__ import annotations

import os
from hashlib import md5
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.files import TEMPORARY, temporary_name
from onepass.streams import mnist
from onepass.studies import fetch
from tests.studies.data_sets import forbid, refusal, serve


def test_what_is_in_the_cache_is_not_fetched_again(archives: Path, cache: Path) -> None:
    first = fetch.locate("cifar100", None)
    archives.unlink()
    assert fetch.locate("cifar100", None) == first


def test_a_cache_that_cannot_be_written_to_is_named(
    archives: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=r"^cannot write to .*set ONEPASS_CACHE"):
        fetch.locate("cifar100", None)


@pytest.mark.parametrize("data_set", fetch.DATA_SETS)
def test_a_cache_that_cannot_be_read_is_named(
    data_set: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    with monkeypatch.context() as patch:
        forbid(patch, cache)
        why = "cannot be read (Permission denied): set ONEPASS_CACHE"
        assert f"the cache {cache / data_set} {why}" in refusal(data_set, None)
    monkeypatch.setenv("ONEPASS_CACHE", "x" * 300)
    assert "cannot be read (File name too long): set ONEPASS_CACHE" in refusal(data_set, None)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "loop"))
    assert "cannot write to" in refusal(data_set, None)


def test_a_users_own_folder_in_the_cache_is_left_alone(archives: Path, cache: Path) -> None:
    (cache / "cifar100" / "deep").mkdir(parents=True)
    names = ["notes.txt", "deep/results.csv"]
    for name in names:
        (cache / "cifar100" / name).write_text(name)
    fetch.locate("cifar100", None)
    assert [(cache / "cifar100" / name).read_text() for name in names] == names
    assert (cache / "cifar100" / archives.name).read_bytes() == archives.read_bytes()
    assert [path.name for path in cache.iterdir()] == ["cifar100"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_users_own_file_in_the_cache_is_left_alone(
    kind: str, archives: Path, cache: Path, tmp_path: Path
) -> None:
    cache.mkdir()
    (tmp_path / "mine").write_text("mine")
    path = cache / "cifar100"
    path.symlink_to(tmp_path / "mine") if kind == "link" else path.write_text("mine")
    with pytest.raises(InputError, match=r"cifar100 is not a folder.*: move it away"):
        fetch.locate("cifar100", None)
    assert path.read_text() == "mine"


def test_a_users_own_file_with_the_name_of_a_fetched_one_is_left_alone(
    web: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = web
    checksums = {f"{name}.gz": md5(name.encode()).hexdigest() for name in mnist.FILES}
    for name in mnist.FILES:
        (folder / f"{name}.gz").write_text(name)
    serve(monkeypatch, "mnist", [(address, checksums)])
    (cache / "mnist").mkdir(parents=True)
    first, *_ = mnist.FILES
    (cache / "mnist" / f"{first}.gz").write_text("mine")
    with pytest.raises(InputError, match="is there already and is another file: move it away"):
        fetch.locate("mnist", None)
    assert [path.read_text() for path in (cache / "mnist").iterdir()] == ["mine"]
    (cache / "mnist" / f"{first}.gz").write_text(first)
    fetch.locate("mnist", None)
    assert {path.name for path in (cache / "mnist").iterdir()} == checksums.keys()


def test_the_folder_of_a_fetched_data_set_obeys_the_umask(archives: Path, cache: Path) -> None:
    before = os.umask(0o027)
    try:
        fetch.locate("cifar100", None)
    finally:
        os.umask(before)
    assert (cache / "cifar100").stat().st_mode & 0o777 == 0o750


def test_what_a_killed_fetch_left_is_removed_by_the_next_one(archives: Path, cache: Path) -> None:
    prefix = temporary_name("cifar100")
    names = (f"{prefix}-killed00", f"{prefix}-atwork00", f"{TEMPORARY}notes")
    left, held, mine = (cache / name for name in names)
    for folder in (left, held, mine):
        (folder / "cifar100").mkdir(parents=True)
        (folder / "cifar100" / "part").write_bytes(b"x")
    link = cache / f"{prefix}-link0000"
    link.symlink_to(mine)
    with fetch._locked(held):
        fetch.locate("cifar100", None)
    assert not left.exists()
    assert set(cache.iterdir()) == {cache / "cifar100", held, mine, link}
    assert (mine / "cifar100" / "part").read_bytes() == b"x"


def test_a_fetch_is_not_disturbed_by_another_one(archives: Path, cache: Path) -> None:
    with fetch._staging(cache / "cifar100") as folder, fetch._staging(cache / "cifar100"):
        assert Path(folder).is_dir()
    assert list(cache.iterdir()) == []
