"""Processes that are stopped or hang do not hold up an interrupt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.studies.executors import default_workers
from tests.processes import LONG, MEASUREMENT, Started, told_by

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
    starting: bool, how: str, start: Callable[..., Started]
) -> None:
    command = start(how, *MEASUREMENT, code=BENCH)
    cores = default_workers("cpu")
    everything = 5 if cores == 1 else cores + 6
    command.wait_until(lambda: len(command.processes()) >= (3 if starting else everything))
    for pid in {*command.processes()} - {command.pid}:  # Python's helpers, too
        os.kill(pid, signal.SIGSTOP)
    assert command.end() == 130, command.printed
    assert command.printed == "interrupted; nothing is kept\n"
    command.wait_until(lambda: not command.processes())


def stop_helpers(command: Started, which: str) -> list[int]:
    """Stop (as SIGSTOP does) the workers of a command, or all of Python's helpers with them."""
    command.wait_until(lambda: len(command.processes()) == 5)
    chosen = []
    for pid in {*command.processes()} - {command.pid}:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if which == "all" or parent != command.pid:
            chosen.append(pid)
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    return chosen


@pytest.mark.parametrize(("which", "kind"), [("workers", signal.SIGINT), ("all", signal.SIGTERM)])
def test_stopped_processes_do_not_hold_up_an_interrupt(
    which: str, kind: signal.Signals, start: Callable[..., Started], tmp_path: Path
) -> None:
    command = start(*LONG, "--workers", "2", "--out", str(tmp_path / "out"))
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
    told = told_by(FORKED)
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
    how: str, said: str, start: Callable[..., Started], tmp_path: Path
) -> None:
    command = start(how, *LONG, "--workers", "2", "--out", str(tmp_path / "out"), code=WATCHED)
    stopped = stop_helpers(command, "workers")
    command.wait_until(lambda: said in command.printed)
    assert command.wait() == 0
    assert command.printed.count("a worker process was killed") == len(stopped) == 2


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


@pytest.mark.parametrize(
    ("where", "second", "code"),
    [("step", signal.SIGINT, 130), ("main thread", signal.SIGTERM, 143)],
)
def test_a_second_interrupt_ends_the_command_whatever_hangs(
    where: str, second: signal.Signals, code: int, start: Callable[..., Started]
) -> None:
    command, more = (
        start(where, "3600", code=HANGING),
        "a second interrupt ends the command at once",
    )
    command.wait_until(lambda: "hanging" in command.printed)
    os.kill(command.pid, signal.SIGINT)
    if where == "step":
        command.wait_until(lambda: more in command.printed)
    time.sleep(0.5)
    began = time.monotonic()
    assert command.end(second) == code
    assert time.monotonic() - began < 10


def test_an_interrupt_while_a_fleet_is_begun_does_not_wait_for_a_step_that_hangs(
    start: Callable[..., Started],
) -> None:
    command = start("beginning", "0.5", code=HANGING)
    assert command.wait() == 130
    assert command.printed.endswith("interrupted; without --out nothing is kept\n")


def test_one_signal_that_comes_twice_at_once_is_one_interrupt_and_leaves_a_step_that_hangs_behind(
    start: Callable[..., Started],
) -> None:
    command = start("step", "0.5", code=HANGING)
    command.wait_until(lambda: "hanging" in command.printed)
    os.kill(command.pid, signal.SIGTERM)  # as `timeout` does
    assert command.end(signal.SIGTERM) == 143
    assert command.printed.endswith("interrupted; without --out nothing is kept\n")
