"""A stream whose boundaries were not declared is noticed; one without any raises no alarm."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from onepass import OnePass
from onepass.learners import METHODS
from onepass.learners.declarations import Needs
from onepass.live.advice import ABOVE, BEFORE, PATIENCE, Advice
from onepass.live.classifier import OnePassClassifier
from tests.live.modules import LIVE
from tests.live.refused_calls import CLASSES, Rich, batch
from tests.toys import FEATURES, small_net

PROTECTED_BY_AN_END = [
    name for name in LIVE if name != "van" and not METHODS[name].learner.needs.own_classes
]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "onepass.live.advice"]
    return [record.getMessage() for record in records]


def clusters(classes: list[int], rng: np.random.Generator, size: int = 10) -> tuple[Tensor, Tensor]:
    """Classes that a small network tells apart."""
    y = rng.choice(classes, size)
    x = rng.normal(size=(size, FEATURES)) * 0.3
    x[np.arange(size), y % FEATURES] += 2
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@pytest.mark.parametrize("method", PROTECTED_BY_AN_END)
def test_a_first_task_that_does_not_end_is_mentioned_once(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.live.advice.PATIENCE", 12)
    learner = OnePass(Rich(), method, learning_rate=0.01)
    for seed in range(30):
        learner.observe(*batch(seed=seed))
    (warning,) = said(caplog)
    assert "no task has ended in 12 batches" in warning
    assert "end_task()" in warning
    assert ("task_free=True" in warning) == (not METHODS[method].learner.needs.boundaries)


@pytest.mark.parametrize(("method", "settings"), [("van", {}), ("a-gem", {"task_free": True})])
def test_where_nothing_would_be_protected_by_an_end_there_is_nothing_to_say(
    method: str,
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onepass.live.advice.PATIENCE", 12)
    learner = OnePass(Rich(), method, learning_rate=0.01, **settings)
    for seed in range(30):
        learner.observe(*batch(seed=seed))
    assert not said(caplog)


def test_tasks_that_end_are_not_mentioned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.live.advice.PATIENCE", 12)
    learner = OnePass(Rich(), learning_rate=0.01)
    for task in range(3):
        for seed in range(11):
            learner.observe(*batch(seed=seed, classes=range(task, task + 2)))
        learner.end_task()
    for seed in range(30):
        learner.observe(*batch(seed=seed))
    assert not said(caplog)


@pytest.mark.parametrize("size", [1, 10])
def test_new_classes_only_are_noticed_long_before_that(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng, learner = np.random.default_rng(0), OnePass(small_net(4), learning_rate=0.01)
    for _ in range(30):
        learner.observe(*clusters([0, 1], rng, size))
    for _ in range(20):
        learner.observe(*clusters([2, 3], rng, size))
    (warning,) = said(caplog)
    assert "none of the classes before" in warning
    assert "end_task()" in warning


def test_a_loss_that_jumps_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    learner = OnePass(nn.Linear(FEATURES, 1), "er", learning_rate=0.02, loss=nn.functional.mse_loss)
    for task in range(2):
        for _ in range(100):
            x = torch.tensor(rng.normal(size=(10, FEATURES)), dtype=torch.float32)
            learner.observe(x, x[:, task : task + 1] * (2 - 4 * task) + 0.1 * torch.randn(10, 1))
    (warning,) = said(caplog)
    assert "losses are far above" in warning
    assert learner.steps == 200


def test_a_classifier_is_told_in_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    X, y = load_digits(return_X_y=True)
    X = X / 16
    learner = OnePassClassifier(random_state=0)
    for low in (0, 2):
        some = (y == low) | (y == low + 1)
        learner.partial_fit(X[some], y[some])
    (warning,) = said(caplog)
    assert "task_ends=True" in warning
    assert "task_free=True" in warning
    caplog.clear()
    several = OnePassClassifier(random_state=0, batch_size=2)
    several.fit(X, y)  # 899 batches
    several = OnePassClassifier(random_state=0, batch_size=2).partial_fit(X, y, task_ends=True)
    for low in (0, 2):
        some = (y == low) | (y == low + 1)
        several.partial_fit(X[some], y[some])
    assert not said(caplog)


# ---- streams without boundaries


class Ends:
    needs = Needs(memory=True, boundaries=False)

    def end_task(self) -> None: ...


def looking(classifies: bool = True) -> tuple[Advice, Any]:
    owner: Any = SimpleNamespace(learner=Ends(), task_free=False, segment=0, batches=0)
    owner.classifies = classifies
    return Advice(owner), owner


WEIGHTS = {
    "two classes": np.full(2, 1 / 2),
    "one class is rare": np.array([0.97, 0.03]),
    "ten classes": np.full(10, 1 / 10),
    "a thousand classes": np.full(1000, 1 / 1000),
    "classes by Zipf's law": 1 / np.arange(1, 501) / (1 / np.arange(1, 501)).sum(),
}
LABELS = {f"{name}, {size} per batch": (name, size) for size in (1, 2, 10) for name in WEIGHTS}


def labels_of(name: str, rng: np.random.Generator) -> list[list[int]]:
    kind, size = LABELS[name]
    weights = WEIGHTS[kind]
    drawn: list[list[int]] = rng.choice(len(weights), (PATIENCE - 1, size), p=weights).tolist()
    return drawn


LOSSES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "falling": lambda rng, n: 2 * np.exp(-np.arange(n) / 30) * rng.gamma(4, 0.25, n) + 0.1,
    "settled": lambda rng, n: rng.gamma(2, 0.5, n),
    "with heavy tails": lambda rng, n: np.abs(rng.standard_cauchy(n)),
    "mostly zero": lambda rng, n: rng.exponential(size=n) * (rng.random(n) < 0.1),
    "negative": lambda rng, n: rng.normal(-5, 1, n),
    "the same": lambda rng, n: np.full(n, 0.7),
}


@pytest.mark.parametrize(
    ("labels", "losses"),
    [*((one, "settled") for one in LABELS), *(("ten classes, 2 per batch", one) for one in LOSSES)],
)
def test_200_streams_without_boundaries_raise_no_alarm(
    labels: str, losses: str, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        advice, owner = looking()
        shown = labels_of(labels, rng)
        for some, loss in zip(shown, LOSSES[losses](rng, PATIENCE - 1).tolist(), strict=True):
            owner.batches += 1
            advice.after(some, loss)
        assert advice.wanted
    assert not said(caplog)


@pytest.mark.long
def test_200_learners_of_streams_without_boundaries_raise_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for seed in range(200):
        rng, (rate, size) = np.random.default_rng(seed), [(0.01, 1), (0.1, 5), (1.0, 10)][seed % 3]
        learner = OnePass(small_net(CLASSES), learning_rate=rate)
        for _ in range(PATIENCE - 1):
            learner.observe(*clusters(list(range(CLASSES)), rng, size))
    assert not said(caplog)


def test_a_shift_is_found_among_losses_of_any_scale(caplog: pytest.LogCaptureFixture) -> None:
    for scale, offset in ((1.0, 0.0), (1e-6, 0.0), (1.0, -100.0), (1e6, 5.0)):
        rng, (advice, owner) = np.random.default_rng(0), looking(classifies=False)
        for number in range(BEFORE + 20 + ABOVE):
            owner.batches += 1
            loss = float(rng.gamma(4, 0.25) + 10 * (number >= BEFORE + 20))
            advice.after([0], offset + scale * loss)
        assert not advice.wanted
    assert len(said(caplog)) == 4


def test_looking_costs_microseconds() -> None:
    advice, owner = looking()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, (PATIENCE - 1, 10)).tolist()
    losses = rng.random(PATIENCE - 1).tolist()
    began = time.perf_counter()
    for some, loss in zip(labels, losses, strict=True):
        owner.batches += 1
        advice.after(some, loss)
    assert (time.perf_counter() - began) / len(labels) < 100e-6  # a few on a quiet machine
