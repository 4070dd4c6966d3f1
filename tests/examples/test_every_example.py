"""The examples run as their reader would start them, and show what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from statistics import fmean

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
Measure = Callable[..., dict[str, list[tuple[float, float]]]]
ROW = r"^(van|a-gem) +(-?\d+\.\d) ± +0\.0 +-?\d+\.\d ± +0\.0$"
KEEPS = r"a-gem keeps (-?\d+\.\d) points more of the old \w+ than van\n$"


def printed(name: str, folder: Path, *options: str) -> str:
    """What an example prints, started as its reader would start it, but from another folder."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def measure_of(name: str) -> Measure:
    measure: Measure = runpy.run_path(str(EXAMPLES / f"{name}.py"))["measure"]
    return measure


def test_every_example_is_tested() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {"own_model", "regression", "resume", "task_free", "text"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("own_model", ["--tasks", "3"]),
        ("text", ["--departments", "3", "--messages", "600"]),
        ("regression", ["--regimes", "3", "--rows", "1000"]),
        ("task_free", ["--examples", "300"]),
    ],
)
def test_an_example_prints_a_table_in_which_a_gem_keeps_more(
    name: str, options: list[str], tmp_path: Path
) -> None:
    output = printed(name, tmp_path, "--seeds", "1", *options)
    rows = dict(re.findall(ROW, output, flags=re.MULTILINE))
    found = re.search(KEEPS, output)
    assert found is not None
    assert float(found[1]) == pytest.approx(float(rows["a-gem"]) - float(rows["van"]), abs=0.11)
    assert float(found[1]) > 0


TASK_FREE = ["er", "mega-1", "mega-2"]
ALL = ["gem", "s-gem", *TASK_FREE]


@pytest.mark.parametrize(
    ("name", "methods", "size"),
    [
        ("own_model", ALL, {"tasks": 2}),
        ("text", ALL, {"departments": 2, "messages": 100}),
        ("regression", ALL, {"regimes": 2, "rows": 100}),
        ("task_free", TASK_FREE, {"examples": 50}),
    ],
)
def test_an_example_runs_with_every_method_it_offers(
    name: str, methods: list[str], size: dict[str, int]
) -> None:
    found = measure_of(name)(methods, 1, **size)
    assert all(isfinite(score) for scores in found.values() for pair in scores for score in pair)


def test_an_example_gives_the_same_numbers_every_time() -> None:
    measure = measure_of("text")
    once, again = (measure(["van", "a-gem"], 1, departments=2, messages=200) for _ in range(2))
    assert once == again


def test_a_learner_that_is_killed_ends_with_the_parameters_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    output = printed("resume", tmp_path, "--kills", "1")
    said = r"^killed after batch \d+; 240 batches learnt in the end$"
    assert re.search(said, output, flags=re.MULTILINE)
    assert output.endswith("bit-identical\n")


@pytest.mark.long
@pytest.mark.parametrize("name", ["own_model", "text", "regression", "task_free"])
def test_a_gem_keeps_at_least_eight_points_more_of_the_old_tasks_and_learns_the_last_one(
    name: str,
) -> None:
    found = measure_of(name)(["van", "a-gem"], 5)
    old, last = (
        {method: fmean(score[part] for score in scores) for method, scores in found.items()}
        for part in (0, 1)
    )
    assert old["a-gem"] >= old["van"] + 8
    assert last["a-gem"] >= 80
    assert last["a-gem"] >= last["van"] - 3
