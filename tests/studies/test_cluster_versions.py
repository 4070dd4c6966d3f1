"""Dask workers with other software: refused by their address, and what they train is not stored."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onepass.errors import InputError
from onepass.studies import cluster as cluster_module
from onepass.studies.executors import Executor, executor
from onepass.studies.store import Store
from tests.studies.clusters import records, workers

pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")


@contextmanager
def another_version(scheduler: Any, folder: Path, file: str, line: str) -> Iterator[str]:
    """The address of a worker whose package has one line more in a file."""
    package = folder / "other" / "onepass"
    ours = Path(cluster_module.__file__).parents[1]
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / file).open("a") as source:
        source.write(f"{line}\n")
    with workers(scheduler, folder, package):
        yield next(iter(scheduler.workers))


@pytest.fixture
def foreign(request: pytest.FixtureRequest, empty: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a worker with another version, by default one with another comment."""
    file, line = getattr(request, "param", ("metrics.py", "# another version"))
    with another_version(empty.scheduler, tmp_path, file, line) as address:
        yield address


@pytest.mark.usefixtures("quick_limits")
def test_a_worker_with_another_version_that_joins_later_is_refused(
    empty: Any, tmp_path: Path
) -> None:
    host = empty.scheduler_address.rpartition(":")[0]
    with (
        pytest.raises(InputError, match=f"{host}.* has other software: it has onepass"),
        executor(1, 1, empty.scheduler_address) as where,
        another_version(empty.scheduler, tmp_path, "metrics.py", "# another version"),
    ):
        _look_until_refused(where)


def _look_until_refused(where: Executor) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        where.held_up()
        time.sleep(0.1)


def test_a_worker_with_another_version_is_refused_by_its_address(
    foreign: str, empty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = "it has onepass and torch source-[0-9a-f]+ and torch .*, not source-.*; install there"
    sentence = f"the Dask worker at {foreign} has other software: {has}"
    with pytest.raises(InputError, match=sentence), executor(1, 1, empty.scheduler_address):
        pass
    # It has joined a moment ago, and was not asked yet.
    monkeypatch.setattr(cluster_module.Cluster, "_compare", lambda *_: None)
    with pytest.raises(InputError, match=sentence):
        records(tmp_path / "study", empty.scheduler_address)
    assert not list((tmp_path / "study").glob("checkpoints/*")), "it refused before it trained"
    with Store.read(tmp_path / "study") as store:
        assert not store.contents.records


@pytest.mark.parametrize(
    "foreign", [("studies/cluster.py", "difference = lambda *_: None")], indirect=True
)
def test_what_a_worker_with_another_version_has_trained_is_not_stored(
    foreign: str, empty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one does not look at its own version before it trains."""
    monkeypatch.setattr(cluster_module.Cluster, "_compare", lambda *_: None)
    sentence = f"the Dask worker at {foreign} has other software: it has onepass and torch"
    with pytest.raises(InputError, match=sentence):
        records(tmp_path / "study", empty.scheduler_address)
    assert list((tmp_path / "study").glob("checkpoints/*/*.json")), "it has trained"
    with Store.read(tmp_path / "study") as store:
        assert not store.contents.records


BROKEN = [
    ("studies/cluster.py", "no Python"),
    ("studies/work.py", "raise RuntimeError"),
    ("engine/cpu.py", "raise OSError('no library')"),
]


@pytest.mark.parametrize("foreign", BROKEN, indirect=True)
def test_a_worker_that_cannot_import_the_package_is_refused_by_its_address(
    foreign: str, empty: Any
) -> None:
    has = "it cannot import ours .(SyntaxError|RuntimeError|OSError): "
    sentence = f"the Dask worker at {foreign} has other software: {has}"
    with pytest.raises(InputError, match=sentence), executor(1, 1, empty.scheduler_address):
        pass


def test_a_result_that_was_made_with_other_software_is_not_taken(empty: Any) -> None:
    ours = cluster_module.fingerprint()
    assert {"python", "onepass", "torch", "numpy", "scipy"} < ours.keys()
    with executor(1, 1, empty.scheduler_address) as where:
        assert where._checked(([], None, "tcp://here:1", ours)) == ([], None)  # type: ignore[attr-defined]
        with pytest.raises(cluster_module.ForeignWorkerError, match="tcp://there:1"):
            where._checked(([], None, "tcp://there:1", ours | {"numpy": "1.0"}))  # type: ignore[attr-defined]
        with pytest.raises(InputError, match="has another version of onepass"):
            where._checked(([], None))  # type: ignore[attr-defined]
        assert "it has numpy 1.0, not" in where._sentence("tcp://there:1", ours | {"numpy": "1.0"})  # type: ignore[attr-defined]
