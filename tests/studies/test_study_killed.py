"""A study that is killed again and again ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.metrics import Record
from onepass.studies.database import FILE
from onepass.studies.store import Store

# Every method, two grid points, two seeds, two workers; a checkpoint every few steps.
STUDY = (
    "run quickstart --methods van,ewc,a-gem,multi-task --seeds 2 --workers 2 --checkpoint-every 7"
    " --set train_examples=150 --set test_examples=30 --set hidden=[32] --set grids.van.learning_rate=[0.1,0.03] --set ewc.strength=[1,100]"
    " --set grids.ewc.learning_rate=0.1 --set grids.a-gem.learning_rate=[0.1,0.03] --set grids.multi-task.learning_rate=0.1"
)
UNITS = 3 * (2 + 2) + (1 + 2)


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("onepass")), *STUDY.split(), "--out", str(folder)]
    with (folder.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def workers_of(driver: int) -> list[int]:
    """The worker processes of a driver: the copies of its fork server."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent, group = (
                int(word) for word in (path / "stat").read_text().rpartition(")")[2].split()[1:3]
            )
            if group == driver != parent and b"forkserver" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:  # gone in the meantime
            continue
    return found


def records(folder: Path) -> dict[str, Record]:
    with Store.read(folder) as store:
        return {unit: store.record(unit) for unit in store.contents.records}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], float]:
    """The records of the study when nobody disturbs it, and how long it takes."""
    folder, began = tmp_path_factory.mktemp("undisturbed") / "study", time.monotonic()
    assert start(folder).wait(timeout=600) == 0
    return records(folder), time.monotonic() - began


def run_and_kill(folder: Path, longest: float, random_: random.Random) -> None:
    """Start or resume the study and kill its driver, all its processes, or first a worker and then the driver, at a random moment."""
    driver = start(folder)
    time.sleep(random_.uniform(0, longest))
    workers = workers_of(driver.pid)
    kind = random_.choice(["driver", "all", "worker first"])
    for victim in {"driver": [], "all": workers, "worker first": workers[:1]}[kind]:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    if kind == "worker first":
        time.sleep(random_.uniform(0, 3))  # the driver notices and goes on
    driver.kill()
    driver.wait()


def stored(folder: Path) -> int:
    """How many records a study has that may not even have begun."""
    try:
        return len(records(folder))
    except InputError:
        return 0


@pytest.mark.parametrize(
    "kills", [pytest.param(2, id="2"), pytest.param(50, id="50", marks=pytest.mark.long)]
)
def test_a_study_killed_at_random_moments_ends_bit_identical(
    kills: int, expected: tuple[dict[str, Record], float], tmp_path: Path
) -> None:
    undisturbed, seconds = expected
    random_, done, studies = random.Random(kills), 0, 0
    while done < kills:
        studies += 1
        folder = tmp_path / f"study-{studies}"
        while (
            done < kills and stored(folder) < UNITS
        ):  # one that has come to its end has nothing left to be killed in
            run_and_kill(folder, seconds, random_)
            done += 1
        assert start(folder).wait(timeout=600) == 0
        found = records(folder)
        assert len(found) == UNITS, "none lost, none twice"
        assert found.keys() == undisturbed.keys()
        for unit, record in found.items():
            assert record.same_as(undisturbed[unit]), unit
        assert {path.name for path in folder.iterdir()} == {FILE, "arrays", "lock"}, (
            "nothing temporary is left"
        )
    print(f"{done} kills over {studies} studies")


def test_workers_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    driver = start(tmp_path / "study")
    deadline = time.monotonic() + 60
    while len(workers := workers_of(driver.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(random.uniform(0, 5))  # while they start, or later
    driver.kill()
    driver.wait()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
