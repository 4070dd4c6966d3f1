"""Verdicts: the published result, near it, or not."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from onepass.errors import InputError
from onepass.metrics import Record
from onepass.report import verify
from onepass.report.verify import compare
from onepass.studies import recipe as recipes
from onepass.studies.paper import KNOWN_DIFFERENCES, KnownDifference, Paper, known_differences
from onepass.studies.recipe import Recipe, load
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Provenance, Store, Unit

RECIPE = load("quickstart", None, "van")


def test_reproduced_means_within_twice_the_combined_standard_error() -> None:
    ours = [0.50, 0.52, 0.48, 0.51, 0.49]
    error = 2 * math.sqrt(np.var(ours, ddof=1) / 5 + 0.01**2 / 4)
    assert compare(ours, [0.50 + 0.999 * error, 0.01], 5, 0.0) == "reproduced"
    assert compare(ours, [0.50 - 0.999 * error, 0.01], 5, 0.0) == "reproduced"
    assert compare(ours, [0.50 + 1.001 * error, 0.01], 5, 0.0) == "differs"


def test_a_population_deviation_over_ten_runs_says_more_than_over_five() -> None:
    assert compare([0.5], [0.5099, 0.01], 5, 0.0) == "reproduced"  # 2 · 0.01/√4
    assert compare([0.5], [0.5099, 0.01], 10, 0.0) == "differs"  # 2 · 0.01/√9


@pytest.mark.parametrize(
    ("metric", "margin"),
    [("A_T", 0.015), ("F_T", 0.03), ("worst_forgetting", 0.03), ("LCA_10_trapezoid", 0.02)],
)
def test_close_has_a_margin_for_each_metric(metric: str, margin: float) -> None:
    assert compare([0.5], [0.5 + margin], 5, verify.CLOSE[metric]) == "close"
    assert compare([0.5], [0.5 + margin + 1e-6], 5, verify.CLOSE[metric]) == "differs"


def made(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    published: Any,
    missing: int = 0,
    failed: str | None = None,
    diverged: bool = False,
    **changes: Any,
) -> verify.Verification:
    """A study of one method that got 0.5 everywhere, compared with what was published."""
    paper = Paper(published={"van": published} if published else {})
    monkeypatch.setattr(verify, "from_stored", lambda s: Recipe(**s, summary="", paper=paper))
    units = [*cross_validation(RECIPE, "van"), *evaluation(RECIPE, "van", {"learning_rate": 0.3})]
    a = np.full((3, 3), 0.5)

    def record(unit: Unit) -> Record:
        return Record(unit.seed, unit.hyperparameters, a, a[0], a, None, None, 1.0, 1, diverged)

    with Store.write_to(folder, create={"recipe": RECIPE.stored() | changes}) as store:
        store.plan([units])
        done = units[: len(units) - (5 if failed else missing)]
        store.add({unit.id: record(unit) for unit in done}, Provenance("", {}, ""))
        if failed:
            store.fail([unit.id for unit in units[-5:]], failed)
    return verify.verify(folder)


def verdicts(found: verify.Verification) -> dict[str, str]:
    return {one.metric: one.verdict for one in found.comparisons}


def seen(found: verify.Verification) -> str:
    text = StringIO()
    Console(file=text, width=200).print(verify.view(found))
    return text.getvalue()


def test_every_published_number_gets_a_verdict_and_the_others_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = {"A_T": [0.5, 0.01], "F_T": [0.02], "LCA_10_trapezoid": [0.4, 0.01]}
    found = made(tmp_path, monkeypatch, paper)
    assert verdicts(found) == {
        "A_T": "reproduced",
        "F_T": "close",
        "worst_forgetting": "not published",
        "LCA_10_trapezoid": "differs",
    }
    assert not found.accepted


def test_a_difference_is_accepted_only_if_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = {"recipe": "quickstart", "method": "van", "metric": "A_T"}
    known = {"quickstart": [KnownDifference(**of, explanation="why", experiment="how")]}
    monkeypatch.setattr(verify, "known_differences", lambda name: known.get(name, []))
    assert made(tmp_path / "a", monkeypatch, {"A_T": [0.9, 0.01]}).accepted
    assert not made(tmp_path / "b", monkeypatch, {"A_T": [0.9, 0.01], "F_T": [0.9, 0.01]}).accepted


@pytest.mark.parametrize(
    ("published", "ours", "verdict"),
    [
        ("diverged", {"diverged": True}, "reproduced"),
        ("diverged", {}, "differs"),
        ({"A_T": [0.5, 0.01]}, {"diverged": True}, "differs"),
        ("out of memory", {"failed": "OutOfMemoryError: too large"}, "reproduced"),
        ("out of memory", {}, "differs"),
        ("out of memory", {"diverged": True}, "differs"),
        ("diverged", {"failed": "OutOfMemoryError: too large"}, "differs"),
        ("out of memory", {"failed": "ValueError: a bug"}, "unfinished"),
        ({"A_T": [0.5, 0.01]}, {"failed": "OutOfMemoryError: too large"}, "differs"),
    ],
)
def test_failures_are_results_too(
    published: Any,
    ours: dict[str, Any],
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = made(tmp_path, monkeypatch, published, **ours)
    assert list(verdicts(found).values()) == [verdict]
    assert found.accepted == (verdict == "reproduced")


def test_a_study_that_is_not_finished_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, published in (("a", {"A_T": [0.5, 0.01]}), ("b", None), ("c", "diverged")):
        found = made(tmp_path / folder, monkeypatch, published, missing=1)
        assert list(verdicts(found).values()) == ["unfinished"]
        assert not found.accepted


def test_published_numbers_are_not_for_a_changed_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(tmp_path, monkeypatch, {"A_T": [0.5, 0.01]}, memory_per_task=7)
    assert verdicts(found) == {"–": "not published"}
    assert found.changes == ["memory_per_task=7"]
    assert not found.accepted
    why = "the paper's numbers are not for this study, which has memory_per_task=7"
    assert f"nothing was compared: {why}" in seen(found)


@pytest.mark.parametrize("published", [None, {}, {"violations": [3.0]}])
def test_a_study_without_published_numbers_is_not_accepted(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(tmp_path, monkeypatch, published)
    assert set(verdicts(found).values()) == {"not published"}
    assert not found.accepted
    why = "the recipe has no published numbers for these methods"
    assert f"nothing was compared: {why}" in seen(found)


def test_one_number_that_is_compared_is_enough_to_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(tmp_path, monkeypatch, {"A_T": [0.5, 0.01]})
    assert list(verdicts(found).values()).count("not published") > 0
    assert found.accepted
    assert "nothing was compared" not in seen(found)


def test_fewer_seeds_methods_and_grid_points_are_no_change_of_the_recipe() -> None:
    assert load("permuted-mnist", ["grids.van.learning_rate=0.03"], "van", 3).changes() == []
    changes = ["train_examples=1000", "options.a-gem.reference_batch=7"]
    assert load("permuted-mnist", changes, "a-gem").changes() == changes


def test_the_file_of_known_differences_names_recipes_methods_and_metrics_that_exist() -> None:
    for name in recipes.names():
        for known in known_differences(name):
            assert known.method in load(name).paper.published
            assert known.metric in {*verify.CLOSE, "outcome"}
    assert KNOWN_DIFFERENCES not in {f"{name}.toml" for name in recipes.names()}


def test_a_folder_without_a_study_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no study"):
        verify.verify(tmp_path)
