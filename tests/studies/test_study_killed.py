"""A study that is killed again and again ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from onepass.metrics import Record
from onepass.studies.folder import FILE
from tests.studies.disturbed import start, stored
from tests.studies.stored import records_in

# Every method, two grid points, two seeds, two workers; a checkpoint every few steps.
STUDY = (
    "run quickstart --methods van,ewc,a-gem,multi-task --seeds 2 --workers 2 --checkpoint-every 7"
    " --set train_examples=150 --set test_examples=30 --set hidden=[32]"
    " --set grids.van.learning_rate=[0.1,0.03] --set grids.a-gem.learning_rate=[0.1,0.03]"
    " --set grids.ewc.learning_rate=0.1 --set ewc.strength=[1,100]"
    " --set grids.multi-task.learning_rate=0.1"
)
UNITS = 3 * (2 + 2) + (1 + 2)


def workers_of(driver: int) -> list[int]:
    """The worker processes of a driver: the copies of its fork server."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rpartition(")")[2].split()
            parent, group = int(words[1]), int(words[2])
            if group == driver != parent and b"forkserver" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:  # gone in the meantime
            continue
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], float]:
    """The records of the study when nothing disturbs it, and how long it takes."""
    folder, began = tmp_path_factory.mktemp("undisturbed") / "study", time.monotonic()
    assert start(folder, STUDY).wait(timeout=600) == 0
    return records_in(folder), time.monotonic() - began


def run_and_kill(folder: Path, longest: float, random_: random.Random) -> None:
    """Start or resume the study and kill it at a random moment.

    That is its driver, all its processes, or first a worker and then the driver.
    """
    driver = start(folder, STUDY)
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
        # One that has come to its end has nothing left to be killed in.
        while done < kills and stored(folder) < UNITS:
            run_and_kill(folder, seconds, random_)
            done += 1
        assert start(folder, STUDY).wait(timeout=600) == 0
        found = records_in(folder)
        assert len(found) == UNITS, "none lost, none twice"
        assert found.keys() == undisturbed.keys()
        for unit, record in found.items():
            assert record.same_as(undisturbed[unit]), unit
        # Nothing temporary is left.
        assert {path.name for path in folder.iterdir()} == {FILE, "arrays", "lock"}
    print(f"{done} kills over {studies} studies")


def test_workers_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    driver = start(tmp_path / "study", STUDY)
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
