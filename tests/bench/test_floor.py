"""The work that a step needs at least is counted right."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from onepass.bench.floor import Rates, WatchedFleet, Work
from onepass.bench.floor import work as floor_work
from onepass.bench.measure import least_work
from onepass.bench.processes import middle

IMAGES, TASKS = 1000, 2


WIDTHS = (784, 256, 256, 10)


WEIGHTS = [before * after for before, after in pairwise(WIDTHS)]


P = sum(WEIGHTS) + sum(WIDTHS[1:])


EXAMPLE = 784 + 8  # bytes of an image, and its label


# Of an example: forward, the weights' gradients, the inputs' but those of the first layer.
FLOPS = 3 * 2 * sum(WEIGHTS) - 2 * WEIGHTS[0]


def test_the_floor_of_a_gem_counts_both_passes() -> None:
    found = least_work("a-gem", TASKS, IMAGES)
    assert found.flops == (10 + 256) * FLOPS
    assert found.bytes == 2 * 4 * P + (10 + 256) * EXAMPLE + 2 * 8  # violations are counted up


def test_the_floor_of_gem_grows_with_the_past() -> None:
    for tasks in (1, TASKS):
        assert least_work("gem", tasks, IMAGES).flops == (10 + 250 * tasks) * FLOPS


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("van", 0.0),
        ("mas", 2.0),  # the pull and the anchor are read
        ("ewc", 2 + 2 + 0.2),  # squares are added to, and every tenth step the Fisher information
        ("pi", 2 + 2),  # the path is added to
        # Squares and path; every tenth step the scores, where they began, and the information.
        ("rwalk", 2 + 2 + 2 + 0.6),
    ],
)
def test_the_floor_counts_what_a_step_reads_and_writes_of_the_state(name: str, kept: float) -> None:
    found = least_work(name, TASKS, IMAGES)
    assert found.flops == 10 * FLOPS
    assert found.bytes == pytest.approx((2 + kept) * 4 * P + 10 * EXAMPLE, abs=20)  # and a counter


def test_frozen_columns_are_passed_through_and_not_learnt() -> None:
    feed, fleet, learner, phase = middle("prog-nn", 1, 1, IMAGES, fleet_type=WatchedFleet)
    found = floor_work(fleet, learner, islice(feed.batches(phase), 2))
    trained = fleet.theta[:, fleet.trainable].shape[1]
    assert trained < fleet.theta.shape[1]
    assert found.bytes == 4 * (fleet.theta.shape[1] + trained) + 10 * EXAMPLE
    # The old head predicts nothing; the new column has lateral connections everywhere.
    first, second = sum(WEIGHTS[:-1]), 2 * sum(WEIGHTS)
    assert found.flops == 10 * (2 * first + 2 * 2 * second + 2 * sum(WEIGHTS[1:]))


def test_the_slower_of_products_and_copies_is_the_floor() -> None:
    assert Work(6.0, 4.0).seconds(Rates(2.0, 1.0)) == 4.0
    assert Work(6.0, 4.0).seconds(Rates(1.0, 1.0)) == 6.0
