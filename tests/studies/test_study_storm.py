"""A study that is killed, terminated and interrupted again and again ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.metrics import Record
from onepass.studies.store import Store

STUDY = (
    "run quickstart --methods van,ewc,a-gem --seeds 2 --checkpoint-every 7 --set train_examples=150 --set test_examples=30 --set hidden=[32]"
    " --set grids.van.learning_rate=[0.1,0.03] --set grids.ewc.learning_rate=0.1 --set ewc.strength=10 --set grids.a-gem.learning_rate=0.1"
)
UNITS = (2 + 2) + (1 + 2) + (1 + 2)
CODES = {
    signal.SIGKILL: {-9},
    signal.SIGTERM: {143, -15},
    signal.SIGINT: {130, -2},
}  # the negative ones: while Python itself still started


def start(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [
        str(Path(sys.executable).with_name("onepass")),
        *STUDY.split(),
        "--workers",
        str(workers),
        "--out",
        str(folder),
    ]
    with (folder.parent / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def alive(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone in the meantime
            continue
        if int(owner) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def results(folder: Path) -> dict[str, Record]:
    """The record of every unit."""
    with Store.read(folder) as store:
        return {unit: store.record(unit) for unit in store.contents.records}


def stored(folder: Path) -> int:
    """How many records a study has that may not even have begun."""
    try:
        with Store.read(folder) as store:
            return len(store.contents.records)
    except InputError:
        return 0


def disturb(
    folder: Path, workers: int, longest: float, random_: random.Random
) -> tuple[signal.Signals, bool]:
    """Start or resume a study and send it a signal at a random moment; which one, and whether it came in time."""
    driver = start(folder, workers)
    time.sleep(random_.uniform(0, 0.8 * longest))  # in most rounds before it is finished
    kind = random_.choice(list(CODES))
    finished = driver.poll() is not None
    if not finished:
        (os.killpg if kind == signal.SIGINT else os.kill)(
            driver.pid, kind
        )  # Ctrl-C is heard by the whole group
    code = driver.wait(timeout=60)
    assert code in CODES[kind] | {0}, (
        f"{code} after {kind.name}: {(folder.parent / 'log').read_text()[-2000:]}"
    )
    deadline = time.monotonic() + 60
    while left := alive(driver.pid):
        assert time.monotonic() < deadline, f"{left} are left after {kind.name}"
        time.sleep(0.05)
    return kind, code != 0


@pytest.mark.long
def test_a_storm_of_signals_changes_no_number(tmp_path: Path) -> None:
    random_, rounds, studies = random.Random(60), 60, 0
    sent: dict[str, int] = {}
    undisturbed: dict[int, tuple[dict[str, Record], float]] = {}
    for workers in (1, 2):
        began = time.monotonic()
        assert start(tmp_path / f"undisturbed-{workers}", workers).wait(timeout=300) == 0
        undisturbed[workers] = (
            results(tmp_path / f"undisturbed-{workers}"),
            time.monotonic() - began,
        )
    while rounds > 0:
        studies += 1
        workers = 1 + studies % 2
        expected, seconds = undisturbed[workers]
        folder = tmp_path / f"study-{studies}"
        while rounds > 0 and stored(folder) < UNITS:
            kind, hit = disturb(folder, workers, seconds, random_)
            if hit:
                rounds -= 1
                name = f"{kind.name} with {workers} worker{'s' * (workers > 1)}"
                sent[name] = sent.get(name, 0) + 1
        assert start(folder, workers).wait(timeout=300) == 0
        found = results(folder)
        assert found.keys() == expected.keys()
        assert all(found[unit].same_as(expected[unit]) for unit in expected), "bit by bit"
        assert not [
            path.name
            for path in folder.iterdir()
            if path.name not in ("study.sqlite", "arrays", "lock")
        ], "nothing temporary is left"
        print(f"{sum(sent.values())} signals over {studies} studies: {sent}")
    assert "Traceback" not in (tmp_path / "log").read_text()
