"""What tests of studies share: expected results, locks, a Dask scheduler, the web, the cache."""

from __future__ import annotations

import fcntl
import tarfile
from collections.abc import Iterator
from functools import partial
from hashlib import md5
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from onepass.streams import cifar
from onepass.studies import cluster
from onepass.studies.results import Result
from tests.studies.data_sets import Quiet, serve
from tests.studies.small_study import go, small


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The results of the small study when nothing happens to it."""
    return go(tmp_path_factory.mktemp("expected"), small("van,a-gem"))[0]


@pytest.fixture
def locks_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"CONNECT": 2.0, "SOON": 0.2, "POLL": 0.1, "SILENT": 60.0}.items():
        monkeypatch.setattr(cluster, name, seconds)


@pytest.fixture
def empty() -> Iterator[Any]:
    """A scheduler in this process that has no workers."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=0, processes=False, dashboard_address=None, protocol="tcp", host="127.0.0.1"
    ) as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEPASS_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are served."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        # The argument: seconds until it notices that it shall end.
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def archives(web: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-100 with one image per class in either part, on the web in its binary version."""
    folder, address = web
    for part in cifar.EACH:
        monkeypatch.setitem(cifar.EACH, part, 1)
    records = b"".join(bytes([0, label]) + bytes(3072) for label in range(100))
    (folder / "records").write_bytes(records)
    path = folder / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for part in cifar.EACH:
            archive.add(folder / "records", f"cifar-100-binary/{part}.bin")
    monkeypatch.setitem(cifar.ARCHIVES, path.name, md5(path.read_bytes()).hexdigest())
    mirrors = [(address, {name: checksum}) for name, checksum in cifar.ARCHIVES.items()]
    serve(monkeypatch, "cifar100", mirrors)
    return path
