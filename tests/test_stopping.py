"""Ctrl-C leaves nothing half done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from onepass.studies.executors import default_workers
from onepass.studies.store import Store


class Started:
    """The command line in a process group of its own, as a terminal would start it."""

    def __init__(self, folder: Path, *arguments: str, program: str | None = None) -> None:
        self._log = folder / "stderr"
        command = [program or str(Path(sys.executable).with_name("onepass")), *arguments]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # tests in the background of a shell do not hear Ctrl-C
            )
        self.pid = self._process.pid

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        """The living processes of the group."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # gone in the meantime
                continue
            if int(group) == self.pid and state != "Z":
                found.append(int(path.parent.name))
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; printed so far: {self.printed}"
            time.sleep(0.01)

    def end(self, kind: signal.Signals = signal.SIGINT) -> int:
        """Press Ctrl-C, which the whole group hears, or send another signal to the driving process; the exit code."""
        if kind == signal.SIGINT:
            os.killpg(self.pid, kind)
        else:
            os.kill(self.pid, kind)
        return self._process.wait(timeout=60)

    def wait(self) -> int:
        """The exit code, without any signal."""
        return self._process.wait(timeout=60)

    def clean_up(self) -> None:
        if self.processes():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*arguments: str) -> Started:
        started.append(Started(tmp_path, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.clean_up()


LONG = (
    "run quickstart --methods van,ewc,a-gem --seeds 2 --set train_examples=200 --set test_examples=20 --set grids.van.learning_rate=0.1"
    " --set grids.ewc.learning_rate=0.1 --set ewc.strength=10 --set grids.a-gem.learning_rate=0.1"
)


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        (1, signal.SIGINT),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.long),
        (2, signal.SIGTERM),
    ],
)
def test_after_an_interrupt_everything_finished_is_kept_and_nothing_else(
    workers: int, kind: signal.Signals, start: Callable[..., Started], tmp_path: Path
) -> None:
    out, table = tmp_path / "out", tmp_path / "tables" / "table.json"
    command = start(
        *LONG.split(), "--workers", str(workers), "--out", str(out), "--json", str(table)
    )
    command.wait_until(lambda: ": finished" in command.printed)
    assert command.end(kind) == (130 if kind == signal.SIGINT else 143)
    finished = {
        line.removesuffix(": finished")
        for line in command.printed.splitlines()
        if line.endswith(": finished")
    }
    assert 1 <= len(finished) <= workers
    assert re.fullmatch(
        rf"interrupted; [3-8] units are kept in {out}: the same command goes on",
        command.printed.splitlines()[-1],
    )
    assert "Traceback" not in command.printed
    assert {path.name for path in out.iterdir()} <= {
        "study.sqlite",
        "lock",
        "arrays",
        "checkpoints",
    }
    with Store.read(out) as store:
        assert {
            entry.unit.method
            for name, entry in store.contents.entries.items()
            if name in store.contents.records
        } >= finished
    assert not table.parent.exists()
    command.wait_until(lambda: not command.processes())


def test_workers_leave_an_interrupt_to_the_driving_process_even_while_they_start(
    start: Callable[..., Started],
) -> None:
    command = start(*LONG.split(), "--workers", "2")
    command.wait_until(
        lambda: len(command.processes()) == 5
    )  # itself, two workers, and Python's fork server and tracker of shared resources
    helpers = {*command.processes()} - {command.pid}
    for helper in helpers:
        os.kill(helper, signal.SIGINT)
    time.sleep(1)
    assert helpers <= {*command.processes()}
    assert command.end() == 130
    assert command.printed.endswith("interrupted; without --out nothing is kept\n")
    command.wait_until(lambda: not command.processes())


@pytest.mark.parametrize("wait", [0.5, pytest.param(2.0, marks=pytest.mark.long)])
def test_an_interrupt_in_the_first_seconds_does_not_wait_for_a_fleet(
    wait: float, start: Callable[..., Started], tmp_path: Path
) -> None:
    command = start(
        "run",
        "quickstart",
        "--methods",
        "ewc",
        "--set",
        "batch_size=1",
        "--workers",
        "2",
        "--out",
        str(tmp_path / "out"),
    )
    command.wait_until(lambda: (tmp_path / "out" / "study.sqlite").exists())
    time.sleep(wait)
    began = time.monotonic()
    assert command.end() == 130
    assert time.monotonic() - began < 10  # a fleet would take minutes
    command.wait_until(lambda: not command.processes())


def test_no_process_of_a_study_listens_to_a_network(start: Callable[..., Started]) -> None:
    command = start(*LONG.split(), "--workers", "2")
    command.wait_until(lambda: len(command.processes()) == 5)
    sockets = set()
    for path in (path for pid in command.processes() for path in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):  # closed in the meantime
            sockets.add(os.readlink(path))
    assert any(name.startswith("socket:") for name in sockets), "Python's own, which are files"
    rows = [
        row.split()
        for kind in ("tcp", "tcp6", "udp", "udp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    assert not sockets & {f"socket:[{row[9]}]" for row in rows}


def test_a_measurement_that_is_interrupted_leaves_no_process_behind(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    command = start(
        "bench",
        "--device",
        "cpu",
        "--methods",
        "van",
        "--rounds",
        "1000",
        "--json",
        str(tmp_path / "table.json"),
    )
    command.wait_until(
        lambda: len(command.processes()) > 3
    )  # itself, Python's fork server and tracker of shared resources, and more
    time.sleep(1)
    assert command.end() == 130
    assert command.printed == "interrupted; nothing is kept\n"
    assert not (tmp_path / "table.json").exists()
    command.wait_until(lambda: not command.processes())


BENCH = """
import sys
from onepass import stopping
from onepass.bench import processes
from onepass.__main__ import main

if sys.argv.pop(1) == "being stopped":  # a signal takes a moment to arrive
    stopping.is_stopped = processes.is_stopped = lambda pid: False
main()
"""


@pytest.mark.parametrize(
    ("starting", "how"), [(True, "stopped"), (False, "stopped"), (False, "being stopped")]
)
def test_stopped_processes_do_not_hold_up_or_outlive_a_measurement_that_is_interrupted(
    starting: bool, how: str, tmp_path: Path
) -> None:
    command = Started(
        tmp_path,
        "-c",
        BENCH,
        how,
        "bench",
        "--device",
        "cpu",
        "--methods",
        "van",
        "--rounds",
        "1000",
        program=sys.executable,
    )
    try:
        cores = default_workers("cpu")
        everybody = 5 if cores == 1 else cores + 6
        command.wait_until(lambda: len(command.processes()) >= (3 if starting else everybody))
        for pid in {*command.processes()} - {command.pid}:  # Python's helpers, too
            os.kill(pid, signal.SIGSTOP)
        assert command.end() == 130, command.printed
        assert command.printed == "interrupted; nothing is kept\n"
        command.wait_until(lambda: not command.processes())
    finally:
        command.clean_up()


IGNORED = """
import os, signal, sys, time, weakref
from onepass.stopping import interruptible

class Thing: ...

def strike(_):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(1)  # raises, and Python ignores what this function raises

thing = Thing()
kept = weakref.ref(thing, strike)
try:
    with interruptible():
        del thing
        time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("kind", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_is_not_lost_where_python_ignores_errors(kind: str, code: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", IGNORED, kind], capture_output=True, text=True, timeout=20
    )
    assert (told.returncode, told.stderr) == (code, "")


AT_THE_END = """
import atexit, os, signal, sys
from onepass import cli
from onepass.__main__ import main

def last():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("end", flush=True)

def interrupted():
    if sys.argv[2] == "raised":
        raise KeyboardInterrupt
    sys.exit(130)

atexit.register(last)
cli.main = interrupted
main()
"""


@pytest.mark.parametrize(
    ("kind", "code", "printed"), [("SIGINT", 130, "end\n"), ("SIGTERM", -signal.SIGTERM, "")]
)
@pytest.mark.parametrize("how", ["raised", "said"])
def test_an_interrupt_while_python_ends_shows_no_traceback(
    how: str, kind: str, code: int, printed: str
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", AT_THE_END, kind, how], capture_output=True, text=True, timeout=60
    )
    assert (told.returncode, told.stdout, told.stderr) == (code, printed, "")


BETWEEN = """
import sys, time
from onepass.__main__ import main
from onepass.studies import study

def wait(futures, **_):
    time.sleep(1)
    for future in futures:
        future._condition.acquire()  # as concurrent.futures.wait does
    raise KeyboardInterrupt

study.wait = wait
sys.argv = ["onepass", *"run quickstart --methods ewc --set batch_size=1 --workers".split(), sys.argv[1]]
main()
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_that_comes_while_a_future_is_locked_ends_the_command(workers: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", BETWEEN, str(workers)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 130
    assert told.stderr.endswith("interrupted; without --out nothing is kept\n")


def stop_helpers(command: Started, which: str) -> list[int]:
    """Stop (as SIGSTOP does) the worker processes of a command, or all of Python's helpers with them."""
    command.wait_until(lambda: len(command.processes()) == 5)
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in command.processes()
    }
    chosen = [
        pid
        for pid, parent in parents.items()
        if pid != command.pid and (which == "all" or parent != command.pid)
    ]
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    return chosen


@pytest.mark.parametrize(("which", "kind"), [("workers", signal.SIGINT), ("all", signal.SIGTERM)])
def test_stopped_processes_do_not_hold_up_an_interrupt(
    which: str, kind: signal.Signals, start: Callable[..., Started], tmp_path: Path
) -> None:
    command = start(*LONG.split(), "--workers", "2", "--out", str(tmp_path / "out"))
    stopped = stop_helpers(command, which)
    assert len(stopped) == (2 if which == "workers" else 4)
    if which == "workers":
        command.wait_until(lambda: "stopped worker processes" in command.printed)
    began = time.monotonic()
    assert command.end(kind) == (130 if kind == signal.SIGINT else 143)
    assert time.monotonic() - began < 15
    assert command.printed.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in command.printed
    command.wait_until(lambda: not command.processes())


FORKED = """
import multiprocessing, time
from onepass.stopping import kill_fork_server

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=time.sleep, args=(3600,))
    process.start()
    kill_fork_server()
    process.join(10)
    print(process.pid, process.exitcode)
"""


def test_processes_end_with_the_fork_server_that_started_them() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    pid, code = told.stdout.split()
    assert code == "255", "what Python says when it cannot know"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


WATCHED = """
import sys
from onepass.__main__ import main
from onepass.studies import executors

executors.QUIET, executors.STOPPED = 0.5, 3.0
if sys.argv.pop(1) == "frozen":
    executors.is_stopped = lambda pid: False  # nothing shows it of a frozen cgroup
main()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stopped", "stopped worker processes"),
        ("frozen", "worker processes that have computed nothing"),
    ],
)
def test_the_fleet_of_a_process_that_does_not_go_on_is_given_to_another_one(
    how: str, said: str, tmp_path: Path
) -> None:
    command = Started(
        tmp_path,
        "-c",
        WATCHED,
        how,
        *LONG.split(),
        "--workers",
        "2",
        "--out",
        str(tmp_path / "out"),
        program=sys.executable,
    )
    try:
        stopped = stop_helpers(command, "workers")
        command.wait_until(lambda: said in command.printed)
        assert command.wait() == 0
        assert command.printed.count("a worker process was killed") == len(stopped) == 2
    finally:
        command.clean_up()


HANGING = """
import ctypes, os, signal, sys, threading, time
from onepass.__main__ import main
from onepass.studies import executors, study

where, grace = sys.argv[1:]
executors.SOON, executors.GRACE = 0.2, float(grace)

hangs = threading.Event()

def in_a_step(*_):
    print("hanging", file=sys.stderr, flush=True)
    hangs.set()
    time.sleep(3600)

class Interrupted(executors.ThreadPoolExecutor):
    def submit(self, *arguments):
        future = super().submit(*arguments)
        hangs.wait()
        signal.raise_signal(signal.SIGINT)
        return future

def in_the_main_thread(*_, **__):
    print("hanging", file=sys.stderr, flush=True)
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time for ever, and no signal ends that
        ctypes.CDLL(None).pthread_mutex_lock(lock)

if where in ("step", "beginning"):
    executors.work = in_a_step
if where == "beginning":
    executors.ThreadPoolExecutor = Interrupted
if where == "main thread":
    study.wait = in_the_main_thread
sys.argv = ["onepass", *"run quickstart --methods van --workers 1".split()]
main()
"""


def hanging(where: str, grace: float, folder: Path) -> Started:
    return Started(folder, "-c", HANGING, where, str(grace), program=sys.executable)


@pytest.mark.parametrize(
    ("where", "second", "code"),
    [("step", signal.SIGINT, 130), ("main thread", signal.SIGTERM, 143)],
)
def test_a_second_interrupt_ends_the_command_whatever_hangs(
    where: str, second: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = hanging(where, 3600, tmp_path)
    try:
        command.wait_until(lambda: "hanging" in command.printed)
        os.kill(command.pid, signal.SIGINT)
        if where == "step":
            command.wait_until(
                lambda: "a second interrupt ends the command at once" in command.printed
            )
        time.sleep(0.5)
        began = time.monotonic()
        assert command.end(second) == code
        assert time.monotonic() - began < 10
    finally:
        command.clean_up()


def test_an_interrupt_while_a_fleet_is_begun_does_not_wait_for_a_step_that_hangs(
    tmp_path: Path,
) -> None:
    command = hanging("beginning", 0.5, tmp_path)
    try:
        assert command.wait() == 130
        assert command.printed.endswith("interrupted; without --out nothing is kept\n")
    finally:
        command.clean_up()


def test_one_signal_that_comes_twice_at_once_is_one_interrupt_and_leaves_a_step_that_hangs_behind(
    tmp_path: Path,
) -> None:
    command = hanging("step", 0.5, tmp_path)
    try:
        command.wait_until(lambda: "hanging" in command.printed)
        os.kill(command.pid, signal.SIGTERM)  # as `timeout` does
        assert command.end(signal.SIGTERM) == 143
        assert command.printed.endswith("interrupted; without --out nothing is kept\n")
    finally:
        command.clean_up()
