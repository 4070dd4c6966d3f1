"""A cache of data sets, and a mirror on this machine."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from functools import partial
from hashlib import md5
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fetching import Quiet, serve
from onepass.streams import cifar


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEPASS_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are served."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "web").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # It notices within 0.01 seconds that it shall end.
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield tmp_path / "web", f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def archives(web: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-100 with an image of each class in either part, on the web in its binary version."""
    folder, address = web
    for part in cifar.EACH:
        monkeypatch.setitem(cifar.EACH, part, 1)
    content = b"".join(bytes([0, label]) + bytes(3072) for label in range(100))
    (folder / "records").write_bytes(content)
    path = folder / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for part in cifar.EACH:
            archive.add(folder / "records", f"cifar-100-binary/{part}.bin")
    monkeypatch.setitem(cifar.ARCHIVES, path.name, md5(path.read_bytes()).hexdigest())
    mirrors = [(address, {name: checksum}) for name, checksum in cifar.ARCHIVES.items()]
    serve(monkeypatch, "cifar100", mirrors)
    return path
