"""What takes minutes: whole studies, with what they must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.metrics import Summary
from onepass.report.table import summaries
from onepass.studies import executors, fetch, recipe, study
from tests.studies.small_study import Silent

pytestmark = pytest.mark.long


def results_of(
    folder: Path,
    name: str,
    data: str | None = None,
    changes: list[str] | None = None,
    methods: str | None = None,
) -> dict[str, dict[str, Summary]]:
    workers = executors.default_workers("cpu")
    with (
        study.opened(folder, recipe.load(name, changes, methods)) as (store, chosen),
        executors.executor(workers, 1) as executor,
    ):
        results = study.run(chosen, store, study.Means(data, workers=workers), executor, Silent())
    return {method: summaries(result) for method, result in results.items()}


def mean(summary: Summary) -> float:
    assert summary.mean is not None
    return summary.mean


def check(found: dict[str, dict[str, Summary]], margin: float) -> None:
    accuracy = {name: mean(s["A_T"]) for name, s in found.items()}
    assert accuracy["a-gem"] >= accuracy["van"] + margin
    assert mean(found["a-gem"]["F_T"]) < mean(found["van"]["F_T"])
    assert max(accuracy, key=lambda name: accuracy[name]) == "multi-task"


def test_in_the_quickstart_a_gem_beats_plain_sgd_by_eight_points_and_multi_task_is_on_top(
    tmp_path: Path,
) -> None:
    check(results_of(tmp_path, "quickstart"), margin=0.08)


def test_on_a_thousand_mnist_images_a_task_a_gem_beats_plain_sgd(tmp_path: Path) -> None:
    try:
        folder = fetch.locate("mnist", None)
    except InputError as reason:
        pytest.skip(str(reason))
    changes = ["train_examples=1000", "test_examples=1000"]
    methods = "van,ewc,a-gem,multi-task"
    check(results_of(tmp_path, "permuted-mnist", folder, changes, methods), margin=0.04)
