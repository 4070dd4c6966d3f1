"""A Dask cluster: the same records as here, even if a worker is killed in the middle of a fleet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.metrics import Record
from onepass.studies import study
from onepass.studies.executors import executor
from onepass.studies.recipe import load
from onepass.studies.store import Store
from toys import Silent

distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")

CHANGES = [
    "train_examples=400",
    "test_examples=20",
    "grids.van.learning_rate=0.1",
    "grids.a-gem.learning_rate=0.1",
    "options.a-gem.reference_batch=100",
]
RECIPE = load("quickstart", CHANGES, "van,a-gem", 2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    # Dask restarts a worker that dies; the fleet goes to whoever is there.
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1") as made:
        yield made


def records(folder: Path, scheduler: str | None, disturb: threading.Thread | None = None) -> dict[str, Record]:
    with study.opened(folder, RECIPE) as (store, recipe), executor(1, 1, scheduler) as where:
        if disturb is not None:
            disturb.start()
        study.run(recipe, store, study.Means(workers=2, checkpoint_every=20), where, Silent())
    with Store.read(folder) as store:
        return {unit: store.record(unit) for unit in store.contents.records}


def kill_a_worker_in_mid_unit(cluster: distributed.LocalCluster, folder: Path, killed: list[int]) -> None:
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("*/*.json")):  # somebody is in the middle of a fleet
        assert time.monotonic() < deadline
        time.sleep(0.02)
    busy = [worker for worker, tasks in cluster.scheduler.workers.items() if tasks.processing]
    pids = distributed.Client(cluster, set_as_default=False).run(os.getpid, workers=busy)
    killed.append(next(iter(pids.values())))
    os.kill(killed[0], signal.SIGKILL)


def test_a_cluster_tells_how_many_workers_it_has(cluster: distributed.LocalCluster) -> None:
    with executor(1, 1, cluster.scheduler_address) as where:
        assert where.workers == 2


def test_a_cluster_of_which_a_worker_is_killed_in_mid_unit_gives_the_same_records(cluster: distributed.LocalCluster, tmp_path: Path) -> None:
    expected = records(tmp_path / "here", None)
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker_in_mid_unit, args=(cluster, tmp_path / "there", killed))
    found = records(tmp_path / "there", cluster.scheduler_address, killer)
    killer.join()
    assert killed
    assert not Path(f"/proc/{killed[0]}").exists()
    assert found.keys() == expected.keys()
    for unit, record in found.items():
        assert record.same_as(expected[unit])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "tcp://no.such.host.invalid:8786", "tcp://127.0.0.1:99999"])
def test_a_scheduler_that_does_not_answer_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="no Dask scheduler answers at tcp"), executor(1, 1, address):
        pass


@pytest.mark.parametrize("address", ["", "garbage", "tcp://", "tcp://host:port", "tls://127.0.0.1:9", "inproc://x", "tcp://127.0.0.1:9/x"])
def test_what_is_no_address_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="write tcp://HOST:PORT"), executor(1, 1, address):
        pass


def test_a_study_stops_when_its_scheduler_is_gone(tmp_path: Path) -> None:
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1") as made:
        killer = threading.Timer(3, made.close)
        with pytest.raises(InputError, match="is gone: start it"):
            records(tmp_path, made.scheduler_address, killer)
        killer.join()


def test_studies_without_a_cluster_do_not_import_dask() -> None:
    code = """
import sys
import onepass.cli, onepass.studies.study, onepass.report.watch
sys.exit(any(name.split('.')[0] in ('distributed', 'dask', 'tensorboard') for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
