"""What takes minutes: whole studies, with what they must show."""

from __future__ import annotations

import pytest

from onepass.errors import InputError
from onepass.metrics import Summary
from onepass.report.table import summaries
from onepass.studies import fetch, recipe, study

pytestmark = pytest.mark.long


class Silent:
    def running(self, jobs: list[study.Job]) -> None: ...
    def steps(self, done: int, total: int) -> None: ...
    def chose(self, method: str, hyperparameters: dict[str, float]) -> None: ...
    def finished(self, result: study.Result) -> None: ...


def results_of(name: str, data: str | None = None, changes: list[str] | None = None) -> dict[str, dict[str, Summary]]:
    results = study.run(recipe.load(name, changes), data=data, device="cpu", workers=study.default_workers("cpu"), observer=Silent())
    return {method: summaries(result) for method, result in results.items()}


def mean(summary: Summary) -> float:
    assert summary.mean is not None
    return summary.mean


def check(found: dict[str, dict[str, Summary]], margin: float) -> None:
    accuracy = {name: mean(s["A_T"]) for name, s in found.items()}
    assert accuracy["a-gem"] >= accuracy["van"] + margin
    assert mean(found["a-gem"]["F_T"]) < mean(found["van"]["F_T"])
    assert max(accuracy, key=lambda name: accuracy[name]) == "multi-task"


def test_in_the_quickstart_a_gem_beats_plain_sgd_by_eight_points_and_multi_task_is_on_top() -> None:
    check(results_of("quickstart"), margin=0.08)


def test_on_a_thousand_mnist_images_a_task_a_gem_beats_plain_sgd() -> None:
    try:
        folder = fetch.locate("mnist", None)
    except InputError as reason:
        pytest.skip(str(reason))
    check(results_of("permuted-mnist", folder, ["train_examples=1000", "test_examples=1000"]), margin=0.04)
