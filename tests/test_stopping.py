"""Ctrl-C and SIGTERM leave nothing half done."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from onepass.studies.store import Store
from tests.processes import LONG, MEASUREMENT, Started, told_by


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
    places = ["--out", str(out), "--json", str(table)]
    command = start(*LONG, "--workers", str(workers), *places)
    command.wait_until(lambda: ": finished" in command.printed)
    assert command.end(kind) == (130 if kind == signal.SIGINT else 143)
    lines, end = command.printed.splitlines(), ": finished"
    finished = {line.removesuffix(end) for line in lines if line.endswith(end)}
    assert 1 <= len(finished) <= workers
    kept = rf"interrupted; [3-8] units are kept in {out}: the same command goes on"
    assert re.fullmatch(kept, lines[-1])
    assert "Traceback" not in command.printed
    ours = {"study.sqlite", "lock", "arrays", "checkpoints"}
    assert {path.name for path in out.iterdir()} <= ours
    with Store.read(out) as store:
        entries, records = store.contents.entries, store.contents.records
        assert finished <= {entries[name].unit.method for name in records}
    assert not table.parent.exists()
    command.wait_until(lambda: not command.processes())


def test_workers_leave_an_interrupt_to_the_driving_process_even_while_they_start(
    start: Callable[..., Started],
) -> None:
    command = start(*LONG, "--workers", "2")
    # Itself, two workers, and Python's fork server and tracker of shared resources.
    command.wait_until(lambda: len(command.processes()) == 5)
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
    slow = ["run", "quickstart", "--methods", "ewc", "--set", "batch_size=1", "--workers", "2"]
    command = start(*slow, "--out", str(tmp_path / "out"))
    command.wait_until(lambda: (tmp_path / "out" / "study.sqlite").exists())
    time.sleep(wait)
    began = time.monotonic()
    assert command.end() == 130
    assert time.monotonic() - began < 10  # a fleet would take minutes
    command.wait_until(lambda: not command.processes())


def test_no_process_of_a_study_listens_to_a_network(start: Callable[..., Started]) -> None:
    command = start(*LONG, "--workers", "2")
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
    command = start(*MEASUREMENT, "--json", str(tmp_path / "table.json"))
    # Itself, Python's fork server and tracker of shared resources, and more.
    command.wait_until(lambda: len(command.processes()) > 3)
    time.sleep(1)
    assert command.end() == 130
    assert command.printed == "interrupted; nothing is kept\n"
    assert not (tmp_path / "table.json").exists()
    command.wait_until(lambda: not command.processes())


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
    told = told_by(IGNORED, kind)
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
    told = told_by(AT_THE_END, kind, how)
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
sys.argv[1:1] = "run quickstart --methods ewc --set batch_size=1 --workers".split()
main()
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_that_comes_while_a_future_is_locked_ends_the_command(workers: int) -> None:
    told = told_by(BETWEEN, str(workers))
    assert told.returncode == 130
    assert told.stderr.endswith("interrupted; without --out nothing is kept\n")
