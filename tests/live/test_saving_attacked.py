"""Attacks on saved learners end in a sentence or in a learner that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from onepass.live import saving
from tests.live import attacking
from tests.live.saved_cases import content_of
from tests.live.saved_learners import MIDDLE


def attacked(folder: Path, first: int, last: int) -> Counter[str]:
    """What became of these attacks, each in a process with a memory limit and a clock."""
    found: Counter[str] = Counter()
    while first < last:
        program = [sys.executable, "-m", "tests.live.attacking"]
        command = [*program, str(folder / f"from {first}"), str(first), str(last)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        for line in done.stdout.splitlines():
            number, _, rest = line.partition(" ")
            first = int(number) + 1
            what = rest.rpartition("] ")[2] if rest else "died"
            found["refuses batches" if what.startswith("refuses batches: ") else what] += 1
        if done.returncode == 0:
            break
        assert done.stdout.endswith(" "), done.stderr
    return found


def test_an_attack_that_uses_up_the_memory_is_not_taken_for_one_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(saving, "_made", too_large)
    (tmp_path / "in").mkdir()
    found = attacking.outcome("a-gem", content_of("a-gem", MIDDLE), tmp_path)
    assert "there is not enough memory to load" in found
    assert found != "refused"


def test_hundreds_of_attacks_end_in_a_sentence_or_a_learner_that_goes_on(tmp_path: Path) -> None:
    found = attacked(tmp_path, 0, 300)
    assert found.keys() <= {"refused", "goes on", "refuses batches"}, found
    assert found.total() == 300
    assert found["goes on"] > 10, "some changes are harmless"


@pytest.mark.long
def test_thousands_of_attacks_end_in_a_sentence_or_a_learner_that_goes_on(tmp_path: Path) -> None:
    found = attacked(tmp_path, 10_000, 16_000)
    assert found.keys() <= {"refused", "goes on", "refuses batches"}, found
    assert found.total() == 6000
