"""The program behind the experiments of docs/reproduction.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onepass.learners import METHODS
from onepass.metrics import average_accuracy
from onepass.protocol import train
from sensitivity import Beginning, beginning, recorded, summary
from tests.training import SETUP, digits, runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", ["van", "gem", "s-gem", "a-gem", "icarl"])
def test_the_first_tasks_alone_are_learnt_as_in_the_whole_stream(method: str) -> None:
    stream, found = digits("split-digits", 20), METHODS[method]
    whole = train(stream, "ev", found, runs(found, 2), SETUP)
    alone = train(Beginning(stream, 4), "ev", found, runs(found, 2), SETUP)
    for record, some in zip(whole, alone, strict=True):
        assert some.accuracy.shape == (4, 4)
        assert beginning(record, 4).same_as(some)
        assert not beginning(record, 3).same_as(some)


def test_a_row_has_the_mean_of_its_runs_and_the_path_to_it() -> None:
    stored = recorded(ROOT / "results" / "split-cifar", "a-gem")
    records = [beginning(record, 6) for record in stored]
    line, singles = summary("as stored", records)
    after = [average_accuracy(record.accuracy) for record in records]
    assert line.startswith(f"| as stored | {sum(after) / 5:.4g} ± ")
    shown, path = singles.split("; ")
    assert re.findall(r"0\.\d{4}", shown) == [f"{value:.4f}" for value in after]
    assert path.endswith(f", {sum(after) / 5:.3f}")
    assert path.count("0.") == 6


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--tasks", "18"], "there are 1 to 17 tasks to learn, not 18"),
        (["--beside", "nowhere"], "there is no study in nowhere"),
        (
            ["--beside", "results/permuted-mnist"],
            "is a study of permuted-mnist, not of split-cifar",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_learnt(
    wrong: list[str], sentence: str
) -> None:
    program = [sys.executable, "benchmarks/sensitivity.py", "a-gem", "learning_rate=0.03"]
    command = [*program, "--recipe", "split-cifar", "--data", "nowhere", *wrong]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 2
    assert sentence in told.stderr
    assert "Traceback" not in told.stderr
