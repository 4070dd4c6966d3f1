"""A study that is killed, terminated and interrupted at random ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from onepass.metrics import Record
from onepass.studies.folder import FILE
from tests.processes import living
from tests.studies.disturbed import start, stored
from tests.studies.stored import records_in

STUDY = (
    "run quickstart --methods van,ewc,a-gem --seeds 2 --checkpoint-every 7"
    " --set train_examples=150 --set test_examples=30 --set hidden=[32]"
    " --set grids.van.learning_rate=[0.1,0.03] --set grids.a-gem.learning_rate=0.1"
    " --set grids.ewc.learning_rate=0.1 --set ewc.strength=10 --workers {}"
)
UNITS = (2 + 2) + (1 + 2) + (1 + 2)
# The negative ones: while Python itself still started.
CODES = {signal.SIGKILL: {-9}, signal.SIGTERM: {143, -15}, signal.SIGINT: {130, -2}}


def disturb(
    folder: Path, workers: int, longest: float, random_: random.Random
) -> tuple[signal.Signals, bool]:
    """Start or resume a study and send it a signal at a random moment.

    Returns which one, and whether it came in time.
    """
    driver = start(folder, STUDY.format(workers))
    time.sleep(random_.uniform(0, 0.8 * longest))  # in most rounds before it is finished
    kind = random_.choice(list(CODES))
    finished = driver.poll() is not None
    if not finished:
        # The whole group hears Ctrl-C.
        send = os.killpg if kind == signal.SIGINT else os.kill
        send(driver.pid, kind)
    code = driver.wait(timeout=60)
    log = (folder.parent / "log").read_text()
    assert code in CODES[kind] | {0}, f"{code} after {kind.name}: {log[-2000:]}"
    deadline = time.monotonic() + 60
    while left := living(driver.pid):
        assert time.monotonic() < deadline, f"{left} are left after {kind.name}"
        time.sleep(0.05)
    return kind, code != 0


@pytest.mark.long
def test_a_storm_of_signals_changes_no_number(tmp_path: Path) -> None:
    random_, rounds, studies = random.Random(60), 60, 0
    sent: dict[str, int] = {}
    undisturbed: dict[int, tuple[dict[str, Record], float]] = {}
    for workers in (1, 2):
        folder, began = tmp_path / f"undisturbed-{workers}", time.monotonic()
        assert start(folder, STUDY.format(workers)).wait(timeout=300) == 0
        undisturbed[workers] = records_in(folder), time.monotonic() - began
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
        assert start(folder, STUDY.format(workers)).wait(timeout=300) == 0
        found = records_in(folder)
        assert found.keys() == expected.keys()
        assert all(found[unit].same_as(expected[unit]) for unit in expected), "bit by bit"
        # Nothing temporary is left.
        assert {path.name for path in folder.iterdir()} == {FILE, "arrays", "lock"}
        print(f"{sum(sent.values())} signals over {studies} studies: {sent}")
    assert "Traceback" not in (tmp_path / "log").read_text()
