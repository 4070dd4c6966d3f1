"""A Dask cluster: the same records as here, even if a worker is killed in the middle of a fleet."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onepass.cli import main
from onepass.errors import InputError
from onepass.metrics import Record
from onepass.report.watch import Watch
from onepass.studies import cluster as cluster_module
from onepass.studies import study
from onepass.studies.executors import Executor, executor
from onepass.studies.recipe import load
from onepass.studies.store import Store
from tests.fuzzing import limited
from tests.toys import Silent

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
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
    ) as made:
        yield made


def records(
    folder: Path, scheduler: str | None, disturb: threading.Thread | None = None
) -> dict[str, Record]:
    with study.opened(folder, RECIPE) as (store, recipe), executor(1, 1, scheduler) as where:
        if disturb is not None:
            disturb.start()
        study.run(recipe, store, study.Means(workers=2, checkpoint_every=20), where, Silent())
    with Store.read(folder) as store:
        return every(store)


def every(store: Store) -> dict[str, Record]:
    return {unit: store.record(unit) for unit in store.contents.records}


def kill_a_worker_in_mid_unit(
    cluster: distributed.LocalCluster, folder: Path, killed: list[int]
) -> None:
    deadline = time.monotonic() + 120
    while not list(
        (folder / "checkpoints").glob("*/*.json")
    ):  # somebody is in the middle of a fleet
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
    killer = threading.Thread(
        target=kill_a_worker_in_mid_unit, args=(cluster, tmp_path / "there", killed)
    )
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


@pytest.mark.parametrize(
    "address",
    [
        "",
        "garbage",
        "tcp://",
        "tcp://host:port",
        "tls://127.0.0.1:9",
        "inproc://x",
        "tcp://127.0.0.1:9/x",
    ],
)
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


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"CONNECT": 2.0, "SOON": 0.2, "LOOK": 0.1, "SILENT": 60.0}.items():
        monkeypatch.setattr(cluster_module, name, seconds)


@pytest.fixture
def empty() -> Iterator[distributed.LocalCluster]:
    """A scheduler in this process that has no workers."""
    with distributed.LocalCluster(
        n_workers=0, processes=False, dashboard_address=None, protocol="tcp", host="127.0.0.1"
    ) as made:
        yield made


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
        with (
            pytest.raises(
                InputError, match=f"no Dask scheduler answers at {address} .no answer within 2 s"
            ),
            executor(1, 1, address),
        ):
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
    with (
        study.opened(tmp_path, RECIPE) as (store, recipe),
        pytest.raises(
            InputError, match=r"there has been no Dask worker at .* for 0\.5 seconds: start one"
        ),
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
        assert (
            where.held_up()
            == f"the Dask scheduler at {empty.scheduler_address} does not answer; waiting for up to 60 seconds"
        )
        monkeypatch.setattr(cluster_module, "SILENT", 0.5)
        with pytest.raises(InputError, match=r"has not answered for 0\.5 seconds: start it anew"):
            where.held_up()
    over.set()


@pytest.mark.usefixtures("quick_limits")
def test_a_worker_that_takes_long_to_tell_its_versions_is_not_taken_for_a_silent_scheduler(
    cluster: distributed.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LOOK", 60.0)
    monkeypatch.setattr(cluster_module.Cluster, "_compare", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(cluster_module, "SOON", 0.4)
    with executor(1, 1, cluster.scheduler_address) as where:
        assert where.held_up() is None


@contextmanager
def another_version(scheduler: Any, folder: Path, file: str, line: str) -> Iterator[str]:
    """The address of a worker whose package has one line more in a file."""
    package = folder / "other" / "onepass"
    shutil.copytree(
        Path(cluster_module.__file__).parents[1],
        package,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (package / file).open("a") as source:
        source.write(f"{line}\n")
    with workers(scheduler, folder, package):
        yield next(iter(scheduler.workers))


@contextmanager
def workers(
    scheduler: Any, folder: Path, package: Path, count: int = 1
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a package that work for a scheduler without any, and that nobody starts again."""
    command = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        scheduler.address,
        "--nthreads",
        "1",
        "--no-nanny",
        "--no-dashboard",
    ]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        deadline = time.monotonic() + 60
        while len(scheduler.workers) < count:
            assert all(worker.poll() is None for worker in started)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.wait()


@pytest.fixture
def foreign(
    request: pytest.FixtureRequest, empty: distributed.LocalCluster, tmp_path: Path
) -> Iterator[str]:
    """The address of a worker with another version, by default one with another comment."""
    with another_version(
        empty.scheduler, tmp_path, *getattr(request, "param", ("metrics.py", "# another version"))
    ) as address:
        yield address


@pytest.mark.usefixtures("quick_limits")
def test_a_worker_with_another_version_that_joins_later_is_refused(
    empty: distributed.LocalCluster, tmp_path: Path
) -> None:
    with (
        pytest.raises(
            InputError,
            match=f"{empty.scheduler_address.rpartition(':')[0]}.* has other software: it has onepass",
        ),
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
    foreign: str, empty: distributed.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = f"the Dask worker at {foreign} has other software: it has onepass and torch source-[0-9a-f]+ and torch .*, not source-.*; install there"
    with pytest.raises(InputError, match=sentence), executor(1, 1, empty.scheduler_address):
        pass
    monkeypatch.setattr(
        cluster_module.Cluster, "_compare", lambda *_: None
    )  # it has joined a moment ago, and was not asked yet
    with pytest.raises(InputError, match=sentence):
        records(tmp_path / "study", empty.scheduler_address)
    assert not list((tmp_path / "study").glob("checkpoints/*")), "it refused before it trained"
    with Store.read(tmp_path / "study") as store:
        assert not store.contents.records


@pytest.mark.parametrize(
    "foreign", [("studies/cluster.py", "difference = lambda *_: None")], indirect=True
)
def test_what_a_worker_with_another_version_has_trained_is_not_stored(
    foreign: str, empty: distributed.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one does not look at its own version before it trains."""
    monkeypatch.setattr(cluster_module.Cluster, "_compare", lambda *_: None)
    with pytest.raises(
        InputError,
        match=f"the Dask worker at {foreign} has other software: it has onepass and torch",
    ):
        records(tmp_path / "study", empty.scheduler_address)
    assert list((tmp_path / "study").glob("checkpoints/*/*.json")), "it has trained"
    with Store.read(tmp_path / "study") as store:
        assert not store.contents.records


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
        with limited(120), pytest.raises(SystemExit) as ended:
            main([*command, "--out", str(out), "--scheduler", empty.scheduler_address])
    assert ended.value.code == 0
    sentence = (
        f"there is no Dask worker at {empty.scheduler_address}; waiting for one for up to 6 hours"
    )
    assert said == [sentence]
    assert capsys.readouterr().err.count(sentence) == 1
    with pytest.raises(SystemExit):
        main([*command, "--out", str(tmp_path / "here")])
    with Store.read(out) as found, Store.read(tmp_path / "here") as expected:
        assert len(found.contents.records) == 3
        assert all(record.same_as(expected.record(unit)) for unit, record in every(found).items())


BROKEN = [
    ("studies/cluster.py", "no Python"),
    ("studies/work.py", "raise RuntimeError"),
    ("engine/cpu.py", "raise OSError('no library')"),
]


@pytest.mark.parametrize("foreign", BROKEN, indirect=True)
def test_a_worker_that_cannot_import_the_package_is_refused_by_its_address(
    foreign: str, empty: distributed.LocalCluster
) -> None:
    sentence = f"the Dask worker at {foreign} has other software: it cannot import ours .(SyntaxError|RuntimeError|OSError): "
    with pytest.raises(InputError, match=sentence), executor(1, 1, empty.scheduler_address):
        pass


def test_dask_logs_nothing_into_the_output_of_a_study(empty: distributed.LocalCluster) -> None:
    """With it, the sentence about a scheduler that is gone came after tracebacks."""
    with executor(1, 1, empty.scheduler_address):
        assert not any(
            logging.getLogger(f"distributed.{name}").isEnabledFor(logging.ERROR)
            for name in ("client", "core", "utils")
        )


def test_a_result_that_was_made_with_other_software_is_not_taken(
    empty: distributed.LocalCluster,
) -> None:
    ours = cluster_module.fingerprint()
    assert {"python", "onepass", "torch", "numpy", "scipy"} < ours.keys()
    with executor(1, 1, empty.scheduler_address) as where:
        assert where._checked(([], None, "tcp://here:1", ours)) == ([], None)  # type: ignore[attr-defined]
        with pytest.raises(cluster_module.ForeignWorkerError, match="tcp://there:1"):
            where._checked(([], None, "tcp://there:1", ours | {"numpy": "1.0"}))  # type: ignore[attr-defined]
        with pytest.raises(InputError, match="has another version of onepass"):
            where._checked(([], None))  # type: ignore[attr-defined]
        assert "it has numpy 1.0, not" in where._sentence("tcp://there:1", ours | {"numpy": "1.0"})  # type: ignore[attr-defined]


def test_studies_without_a_cluster_do_not_import_dask() -> None:
    code = """
import sys
import onepass.cli, onepass.studies.study, onepass.report.watch
sys.exit(any(name.split('.')[0] in ('distributed', 'dask', 'tensorboard') for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
