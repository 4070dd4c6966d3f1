from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.table import Table

from onepass.metrics import Record, select
from onepass.report.table import better_than_baseline, document, table
from onepass.studies.recipe import load
from onepass.studies.results import Result
from onepass.studies.store import Unit


def record(final: float, seed: int = 0, **more: object) -> Record:
    a, curve = np.full((3, 3), final), np.full((3, 11), 0.5)
    rate = {"learning_rate": 0.1}
    made = Record(seed, rate, a, np.zeros(3), curve, None, None, 1.0, 2_000_000, False)
    return replace(made, **more)  # type: ignore[arg-type]


def result(name: str, *finals: float, **more: object) -> Result:
    records = [record(final, seed, **more) for seed, final in enumerate(finals)]
    return Result(name, {"learning_rate": 0.1}, records)


AGEM = result("a-gem", 0.5, 0.6, 0.7)


def table_of(*results: Result) -> Table:
    return table(load("split-digits", methods="all"), {r.method: r for r in results})


def caption(*results: Result) -> str:
    return str(table_of(*results).caption or "")


def test_the_table_says_who_beats_a_gem_with_the_same_examples() -> None:
    said = caption(AGEM, result("er", 0.61, 0.7, 0.82), result("van", 0.9, 0.9, 0.9))
    assert "better than a-gem with the same examples kept: er (+11.0 points)" in said


@pytest.mark.parametrize(
    ("er", "why"),
    [
        ((0.51, 0.9, 0.72), "the interval of the difference holds 0"),
        ((0.4, 0.5, 0.6), "worse"),
        ((0.9,), "one seed has no interval"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lead_within_the_noise_is_none(er: tuple[float, ...], why: str) -> None:
    assert better_than_baseline({"a-gem": AGEM, "er": result("er", *er)}) == {}, why


def test_seeds_that_diverged_are_no_lead() -> None:
    lost = Result("er", {}, [record(0.9, 0), record(0.9, 1), record(0.9, 2, diverged=True)])
    assert better_than_baseline({"a-gem": AGEM, "er": lost}) == {}


def test_a_second_look_is_marked_and_explained() -> None:
    made = table_of(*(result(name, 0.5) for name in ("mas", "van", "ewc")))
    assert list(made.columns[0].cells) == ["mas†", "van", "ewc"]
    assert "† sees each task's data a second time" in str(made.caption)
    own = load("split-digits", ["options.ewc.fisher=per-task"], methods="ewc")
    assert list(table(own, {"ewc": result("ewc", 0.5)}).columns[0].cells) == ["ewc†"]
    assert "†" not in caption(result("van", 0.5))
    assert document(own, {"ewc": result("ewc", 0.5)})["methods"]["ewc"]["looks_again"] is True


def test_a_second_look_is_marked_also_where_a_run_diverged() -> None:
    made = table_of(result("mas", 0.5, diverged=True))
    assert list(made.columns[0].cells) == ["mas†"]
    assert "†" in str(made.caption)


def test_growth_is_reported_by_a_run_that_came_to_the_end() -> None:
    runs = [
        record(0.5, 0, diverged=True, state_by_task=[90_000]),
        record(0.5, 1, state_by_task=[90_000, 900_000, 51_700_000]),
    ]
    said = caption(Result("prog-nn", {"learning_rate": 0.1}, runs))
    assert "prog-nn grows: 90.0kB after its first task, 51.7MB after its last" in said
    constant = result("van", 0.5, state_by_task=[2_000_000] * 3)
    assert "grows" not in caption(constant, result("er", 0.5, state_by_task=None))


def test_the_order_of_hyperparameters_does_not_matter_to_the_choice() -> None:
    """A store gives them back in another order than a grid has."""
    good = {"learning_rate": 0.1, "distillation": 1.0}
    bad = {"learning_rate": 0.3, "distillation": 1.0}
    records = [
        record(0.8, 0, hyperparameters=good),
        record(0.9, 0, hyperparameters=bad),
        record(0.8, 1, hyperparameters=turned(good)),
        record(0.1, 1, hyperparameters=turned(bad)),
    ]
    assert select(records) == good
    for point in (good, turned(good)):
        unit = Unit({"hyperparameters": point, "seed": 0})
        assert list(unit.hyperparameters) == ["learning_rate", "distillation"]


def turned(point: dict[str, float]) -> dict[str, float]:
    return dict(reversed(point.items()))
