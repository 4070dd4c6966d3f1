"""Metrics against tables whose arithmetic was done by hand."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import numpy as np
import pytest

from onepass.metrics import (
    Array,
    Metrics,
    Record,
    average_accuracy,
    backward_transfer,
    few_shot,
    forgetting,
    forgetting_by_task,
    forward_transfer,
    learning_curve_area,
    learning_curve_area_trapezoid,
    metrics,
    summarise,
    worst_forgetting,
)

NAN = np.nan
TABLE = np.array(
    [
        [0.90, 0.60, 0.10, 0.20],
        [0.70, 0.50, 0.30, 0.10],
        [0.80, 0.40, 0.95, 0.15],
        [0.60, 0.65, 0.85, 0.90],
    ]
)
INITIAL = np.array([0.10, 0.20, 0.05, 0.12])
MEMORY = np.array(
    [
        [0.70, NAN, NAN, NAN],
        [0.90, 0.80, NAN, NAN],
        [0.80, 0.75, 1.00, NAN],
        [0.60, 0.75, 0.90, 0.95],
    ]
)
# Average accuracy after b batches of GEM on Permuted MNIST, as the authors published it.
PUBLISHED = [
    *(0.09812353, 0.1610647, 0.17345884, 0.20008238, 0.19457644, 0.23791176),
    *(0.26005882, 0.27361766, 0.30264702, 0.32512945, 0.32201171),
]
RECORD = Record(
    seed=0,
    hyperparameters={"learning_rate": 0.1},
    accuracy=TABLE,
    initial=INITIAL,
    curve=np.array([PUBLISHED]),
    memory_accuracy=MEMORY,
    violations=[0, 3, 4, 5],
    seconds=2.5,
    state_bytes=100,
    diverged=False,
)
JOINED = replace(
    RECORD, accuracy=TABLE[3:], curve=np.empty((0, 11)), memory_accuracy=None, violations=None
)


OF_MEMORIES = {"memory_accuracy", "memory_worst_forgetting"}


def defined(found: Metrics) -> set[str]:
    return {f.name for f in fields(found) if getattr(found, f.name) is not None}


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 0.90), (2, 0.60), (3, 2.15 / 3), (4, 0.75), (None, 0.75)]
)
def test_average_accuracy_counts_the_tasks_learnt_so_far(k: int | None, expected: float) -> None:
    assert average_accuracy(TABLE, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("k", "by_task"),
    [
        (2, [0.90 - 0.70]),
        (3, [0.90 - 0.80, 0.60 - 0.40]),  # the second task was known best before it was learnt
        # The second one is best now: −0.05, where counting the present would say 0.
        (4, [0.90 - 0.60, 0.60 - 0.65, 0.95 - 0.85]),
        (None, [0.30, -0.05, 0.10]),
    ],
)
def test_forgetting_is_measured_from_the_best_of_earlier_task_ends(
    k: int | None, by_task: list[float]
) -> None:
    assert forgetting_by_task(TABLE, k) == pytest.approx(by_task)
    assert forgetting(TABLE, k) == pytest.approx(sum(by_task) / len(by_task))


def test_forgetting_may_be_negative() -> None:
    helped = np.array([[0.5, 0.1], [0.7, 0.8]])
    assert forgetting(helped) == pytest.approx(-0.2)
    assert worst_forgetting(helped) == pytest.approx(-0.2)


def test_worst_forgetting_is_that_of_the_most_forgotten_task() -> None:
    assert worst_forgetting(TABLE) == pytest.approx(0.30)


def test_backward_transfer_compares_the_end_with_just_after_each_task() -> None:
    assert backward_transfer(TABLE) == pytest.approx((-0.30 + 0.15 - 0.10) / 3)


def test_forward_transfer_compares_just_before_each_task_with_the_beginning() -> None:
    assert forward_transfer(TABLE, INITIAL) == pytest.approx((0.40 + 0.25 + 0.03) / 3)


@pytest.mark.parametrize(
    ("curve", "z"),
    [
        ([[0.1, 0.3, 0.5], [0.3, 0.5, 0.9]], [0.2, 0.4, 0.7]),
        ([[0.1, 0.3, NAN], [0.3, 0.5, 0.9]], [0.2, 0.4, 0.6]),
        ([[0.1, NAN, NAN], [0.3, 0.5, NAN]], [0.2, 0.3, 0.3]),
    ],
    ids=["all as long", "one shorter", "all shorter"],
)
def test_few_shot_accuracy_averages_over_tasks_and_keeps_the_last_value_of_short_ones(
    curve: list[list[float]], z: list[float]
) -> None:
    assert few_shot(np.array(curve)) == pytest.approx(z)


@pytest.mark.parametrize(
    ("curve", "beta", "formula", "trapezoid"),
    [
        ([[0.1, 0.3, 0.5], [0.3, 0.5, 0.9]], 2, 1.3 / 3, (0.3 + 0.55) / 2),
        ([[0.1, 0.3, 0.5], [0.3, 0.5, 0.9]], 1, 0.3, 0.3),
        ([[0.1, NAN, NAN], [0.3, 0.5, NAN]], 2, 0.8 / 3, (0.25 + 0.3) / 2),
        ([PUBLISHED], 10, 0.2317, 0.2339),
    ],
)
def test_learning_curve_area_is_a_mean_by_the_formula_and_an_integral_in_print(
    curve: list[list[float]], beta: int, formula: float, trapezoid: float
) -> None:
    points = np.array(curve)
    assert learning_curve_area(points, beta) == pytest.approx(formula, abs=5e-5)
    assert learning_curve_area_trapezoid(points, beta) == pytest.approx(trapezoid, abs=5e-5)


def test_a_run_has_every_metric() -> None:
    expected = Metrics(
        A_T=0.75,
        F_T=0.35 / 3,
        worst_forgetting=0.30,
        LCA_10=2.54868231 / 11,
        LCA_10_trapezoid=(2.54868231 - (0.09812353 + 0.32201171) / 2) / 10,
        backward_transfer=-0.25 / 3,
        forward_transfer=0.68 / 3,
        memory_accuracy=3.20 / 4,
        memory_worst_forgetting=0.90 - 0.60,
        violations=12.0,
        seconds=2.5,
    )
    assert astuple(metrics(RECORD)) == pytest.approx(astuple(expected))


def test_a_joined_pass_has_an_accuracy_but_nothing_about_the_order_of_tasks() -> None:
    found = metrics(JOINED)
    assert pytest.approx(0.75) == found.A_T
    assert defined(found) == {"A_T", "seconds"}


def test_a_single_task_can_be_learnt_but_not_forgotten() -> None:
    alone = replace(RECORD, accuracy=TABLE[:1, :1], initial=INITIAL[:1], violations=None)
    alone = replace(alone, memory_accuracy=MEMORY[:1, :1])
    assert defined(metrics(alone)) == {"A_T", "LCA_10", "LCA_10_trapezoid", "seconds"}


def test_a_diverged_run_has_no_metrics() -> None:
    assert defined(metrics(replace(RECORD, diverged=True))) == set()


def test_without_a_memory_nothing_is_said_about_memories() -> None:
    without = replace(RECORD, memory_accuracy=None)
    assert defined(metrics(RECORD)) - defined(metrics(without)) == OF_MEMORIES


def test_a_task_that_left_nothing_in_the_memory_makes_its_metrics_undefined() -> None:
    empty = MEMORY.copy()
    empty[:, 1] = NAN
    found = defined(metrics(replace(RECORD, memory_accuracy=empty)))
    assert defined(metrics(RECORD)) - found == OF_MEMORIES


def test_metrics_leave_the_record_as_it_was() -> None:
    def arrays() -> list[Array]:
        return [np.array(part) for part in (record.accuracy, record.initial, record.curve, MEMORY)]

    record = replace(RECORD, curve=np.array([[0.1, NAN], [0.3, 0.5]]))
    before = arrays()
    metrics(record)
    for was, now in zip(before, arrays(), strict=True):
        np.testing.assert_array_equal(was, now)


def test_a_summary_has_the_population_deviation_and_students_interval() -> None:
    found = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == pytest.approx(3.0)
    assert found.std == pytest.approx(1.41421356)  # √(10/5), not √(10/4)
    half = 1.963243  # 2.776445 · √(10/4) / √5
    assert found.interval == pytest.approx((3 - half, 3 + half), abs=1e-6)
    assert found.values == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_one_run_has_no_interval() -> None:
    found = summarise([0.7])
    assert (found.mean, found.std, found.interval, found.values) == (0.7, 0.0, None, [0.7])


@pytest.mark.parametrize("values", [[0.5, None, 0.7], [None, None], []])
def test_a_summary_is_undefined_if_any_run_has_no_value(values: list[float | None]) -> None:
    found = summarise(values)
    assert (found.mean, found.std, found.interval) == (None, None, None)
