"""Impossible values, keys and names on the command line, and recipes that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onepass.studies import recipe as recipes
from tests.commands import TINY, exit_code, printed, refusal
from tests.sentences import refusal_of
from tests.studies.stored import GRID, RECIPE, RUNS, fill, study

RATE = "grids.van.learning_rate"
VALUES = {
    "5 000 digits": "9" * 5000,
    "5 000 hexadecimal digits": "0x" + "f" * 5000,
    "too large for a float": "1e400",
    "infinite": "-inf",
    "not a number": "nan",
    "a condition": "true",
    "nested": "[" * 2000 + "]" * 2000,
    "nested and open": "{a=" * 3000,
    "a long list": f"[{','.join(['-1'] * 5000)}]",
    "a date": "1979-05-27",
    "several lines": "1\nseeds = 2",
    "a surrogate": "\ud800",
    "nothing": "",
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_that_is_none_is_refused_by_the_name_of_its_key(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "quickstart", "--device", "gpu", "--set"]
    for key in ("seeds", "cv_seeds", "hidden", "batch_size", "memory", "network", RATE):
        assert key in refusal(capsys, *command, f"{key}={value}")


NO_KEYS = [
    *("", ".", "grids", "grids.", "grids.van", "seeds.x", "[x]", "'", "\n", "\0"),
    *("__class__", "model_config", "é" * 3000),
]


@pytest.mark.parametrize("key", NO_KEYS)
def test_a_key_that_is_none_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("=1", "==", "=[1]", ""):
        refusal(capsys, "run", "quickstart", "--set", key + value)


@pytest.mark.parametrize("flag", ["--runs", "--rounds", "--tasks"])
@pytest.mark.parametrize("value", ["0", "-1", "1000000000", "9" * 5000, "", ",", "1;2", "1.5"])
def test_a_benchmark_of_impossible_size_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in refusal(capsys, "bench", "--device", "cpu", flag, value)


def test_a_grid_value_that_is_given_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = [*TINY, "--methods", "van,van", "--out", str(tmp_path)]
    assert exit_code(*twice, "--set", f"{RATE}=[0.1, 1e-1, 0.1]") == 0
    assert "2 of 2 units done" in printed("status", str(tmp_path))
    assert exit_code(*twice, "--set", f"{RATE}=[0.1, 0.03, 0.1, 0.03]") == 0
    assert "of 3 units done" in printed("status", str(tmp_path))


def test_a_study_that_was_stored_with_a_grid_value_twice_is_finished(tmp_path: Path) -> None:
    grids = {**RECIPE.grids, "van": {"learning_rate": [0.1, 0.03, 0.1, 0.03]}}
    finished = RECIPE.stored() | {"methods": ["van", "van"], "grids": grids}
    fill(tmp_path / "study", [*GRID, *RUNS])
    with study(tmp_path / "study") as store:
        store.note(recipe=finished)
    assert "4 of 4 units done" in printed("status", str(tmp_path / "study"))
    out = printed("table", str(tmp_path / "study"))
    assert out.count(" van ") == 1
    assert "to do" not in out
    printed("merge", str(tmp_path / "into"), str(tmp_path / "study"))
    assert "4 of 4 units done" in printed("status", str(tmp_path / "into"))


def test_what_a_study_says_about_the_paper_does_not_count(tmp_path: Path) -> None:
    paper = {"published": {"van": {"A_T": [0.5, 0.1]}}}
    claims = RECIPE.stored() | {"paper": paper, "summary": "mine"}
    for made in (recipes.from_stored(claims), recipes.load("quickstart", stored=claims)):
        assert made.paper == recipes.load("quickstart").paper
        assert made.summary == recipes.load("quickstart").summary


@pytest.mark.parametrize(
    "part",
    [
        {"hidden": "x" * 100_000},
        {"hidden": [10**5000]},
        {"x" * 9000: 1},
        {"grids": {"van": {"learning_rate": [0] * 9999}}},
    ],
)
def test_what_is_wrong_with_a_stored_recipe_is_said_in_a_short_sentence(
    part: dict[str, Any],
) -> None:
    assert len(refusal_of(lambda: recipes.from_stored(RECIPE.stored() | part))) < 1000


@pytest.mark.parametrize("stored", [{}, [], None, "quickstart", {"name": ["quickstart"]}])
def test_a_stored_recipe_that_is_none_is_refused(stored: Any) -> None:
    refusal_of(lambda: recipes.from_stored(stored))
