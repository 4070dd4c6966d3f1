"""A Dask cluster: the same records as here, even if a worker is killed in the middle of a fleet."""

from __future__ import annotations

import logging
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.report.watch import Watch
from onepass.studies import cluster as cluster_module
from onepass.studies import study
from onepass.studies.executors import executor
from onepass.studies.store import Store
from tests.commands import exit_code
from tests.fuzzing import limited
from tests.studies.clusters import CHANGES, RECIPE, records, workers
from tests.studies.small_study import Silent

distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    # Dask restarts a worker that dies; the fleet goes to any worker there is.
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
    ) as made:
        yield made


def kill_a_worker_in_mid_unit(
    cluster: distributed.LocalCluster, folder: Path, killed: list[int]
) -> None:
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("*/*.json")):  # a fleet is half trained
        assert time.monotonic() < deadline
        time.sleep(0.02)
    busy = [worker for worker, tasks in cluster.scheduler.workers.items() if tasks.processing]
    pids = distributed.Client(cluster, set_as_default=False).run(os.getpid, workers=busy)
    killed.append(next(iter(pids.values())))
    os.kill(killed[0], signal.SIGKILL)


def test_a_cluster_tells_how_many_workers_it_has(cluster: distributed.LocalCluster) -> None:
    with executor(1, 1, cluster.scheduler_address) as where:
        assert where.workers == 2


def test_a_cluster_of_which_a_worker_is_killed_in_mid_unit_gives_the_same_records(
    cluster: distributed.LocalCluster, tmp_path: Path
) -> None:
    expected = records(tmp_path / "here", None)
    killed: list[int] = []
    given = (cluster, tmp_path / "there", killed)
    killer = threading.Thread(target=kill_a_worker_in_mid_unit, args=given)
    found = records(tmp_path / "there", cluster.scheduler_address, killer)
    killer.join()
    assert killed
    assert not Path(f"/proc/{killed[0]}").exists()
    assert found.keys() == expected.keys()
    for unit, record in found.items():
        assert record.same_as(expected[unit])


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:9", "tcp://no.such.host.invalid:8786", "tcp://127.0.0.1:99999"]
)
def test_a_scheduler_that_does_not_answer_is_one_sentence(address: str) -> None:
    with (
        pytest.raises(InputError, match="no Dask scheduler answers at tcp"),
        executor(1, 1, address),
    ):
        pass


NO_ADDRESSES = [
    *("", "garbage", "tcp://", "tcp://host:port", "tls://127.0.0.1:9", "inproc://x"),
    "tcp://127.0.0.1:9/x",
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="write tcp://HOST:PORT"), executor(1, 1, address):
        pass


def test_a_study_stops_when_its_scheduler_is_gone(tmp_path: Path) -> None:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
    ) as made:
        killer = threading.Timer(3, made.close)
        with pytest.raises(InputError, match="is gone: start it"):
            records(tmp_path, made.scheduler_address, killer)
        killer.join()


class Listening(Silent):
    """Remembers what the study waited for, and then has no more patience."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waited: set[str] = set()
        self._monkeypatch = monkeypatch

    def held_up(self, what: str | None) -> None:
        if what is not None:
            self.waited.add(what)
            self._monkeypatch.setattr(cluster_module, "DESERTED", 0.5)


@pytest.mark.usefixtures("quick_limits")
def test_a_scheduler_that_accepts_and_never_answers_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        why = f"no Dask scheduler answers at {address} .no answer within 2 s"
        with pytest.raises(InputError, match=why), executor(1, 1, address):
            pass


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b""])
def test_what_answers_but_is_no_scheduler_is_one_sentence_at_once(
    said: bytes, tmp_path: Path
) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if said:
                self.request.recv(100)
                self.request.sendall(said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        command = [sys.executable, "-m", "onepass", "run", "quickstart", "--out", str(tmp_path)]
        command += ["--scheduler", f"tcp://127.0.0.1:{server.server_address[1]}"]
        began = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        took = time.monotonic() - began
        server.shutdown()
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert "(what answers there is another program, or another version of Dask)" in line
    assert took < 15, "Dask would wait for 20 s before the process ends"


@pytest.mark.usefixtures("quick_limits")
def test_a_study_without_workers_says_so_and_stops_after_a_while(
    empty: distributed.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Listening(monkeypatch)
    why = r"there has been no Dask worker at .* for 0\.5 seconds: start one"
    with (
        study.opened(tmp_path, RECIPE) as (store, recipe),
        pytest.raises(InputError, match=why),
        executor(1, 1, empty.scheduler_address) as where,
    ):
        study.run(recipe, store, study.Means(), where, observer)
    assert observer.waited == {
        f"there is no Dask worker at {empty.scheduler_address}; waiting for one for up to 6 hours"
    }


@pytest.mark.usefixtures("quick_limits")
def test_a_scheduler_that_falls_silent_is_noticed(
    empty: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    with executor(1, 1, empty.scheduler_address) as where:
        monkeypatch.setattr(where._client, "nthreads", lambda: over.wait(60))  # type: ignore[attr-defined]
        time.sleep(0.7)
        waits = f"{empty.scheduler_address} does not answer; waiting for up to 60 seconds"
        assert where.held_up() == f"the Dask scheduler at {waits}"
        monkeypatch.setattr(cluster_module, "SILENT", 0.5)
        with pytest.raises(InputError, match=r"has not answered for 0\.5 seconds: start it anew"):
            where.held_up()
    over.set()


@pytest.mark.usefixtures("quick_limits")
def test_a_worker_that_takes_long_to_tell_its_versions_is_not_taken_for_a_silent_scheduler(
    cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "POLL", 60.0)
    monkeypatch.setattr(cluster_module.Cluster, "_compare", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(cluster_module, "SOON", 0.4)
    with executor(1, 1, cluster.scheduler_address) as where:
        assert where.held_up() is None


@pytest.mark.usefixtures("quick_limits")
def test_a_study_whose_workers_have_all_died_says_so_and_goes_on_with_a_new_one(
    empty: distributed.LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, package = tmp_path / "there", Path(cluster_module.__file__).parents[1]
    command = ["run", "quickstart", "--methods", "van", "--seeds", "2", "--checkpoint-every", "20"]
    command += [f"--set={change}" for change in CHANGES]
    saying = Watch.held_up
    said: list[str] = []

    with ExitStack() as later, workers(empty.scheduler, tmp_path, package, 2) as first:

        def notice(self: Watch, what: str | None) -> None:
            """Kill them in the middle of a fleet; once that was said, start another one."""
            saying(self, what)
            if what is not None and not said:
                said.append(what)
                later.enter_context(workers(empty.scheduler, tmp_path, package))
            elif not said and list(out.glob("checkpoints/*/*.json")):
                for worker in first:
                    worker.kill()

        monkeypatch.setattr(Watch, "held_up", notice)
        scheduler = empty.scheduler_address
        with limited(120):
            assert exit_code(*command, "--out", str(out), "--scheduler", scheduler) == 0
    sentence = f"there is no Dask worker at {scheduler}; waiting for one for up to 6 hours"
    assert said == [sentence]
    assert capsys.readouterr().err.count(sentence) == 1
    assert exit_code(*command, "--out", str(tmp_path / "here")) == 0
    with Store.read(out) as found, Store.read(tmp_path / "here") as expected:
        assert len(found.contents.records) == 3
        for unit in found.contents.records:
            assert found.record(unit).same_as(expected.record(unit))


def test_dask_logs_nothing_into_the_output_of_a_study(empty: distributed.LocalCluster) -> None:
    """With it, the sentence about a scheduler that is gone came after tracebacks."""
    with executor(1, 1, empty.scheduler_address):
        assert not any(
            logging.getLogger(f"distributed.{name}").isEnabledFor(logging.ERROR)
            for name in ("client", "core", "utils")
        )


def test_studies_without_a_cluster_do_not_import_dask() -> None:
    code = """
import sys
import onepass.cli, onepass.studies.study, onepass.report.watch
sys.exit(any(name.split('.')[0] in ('distributed', 'dask', 'tensorboard') for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
