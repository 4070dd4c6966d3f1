"""Threads that ask a classifier while another one learns."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from onepass import OnePassClassifier
from tests.live.asking import asking, until
from tests.toys import FEATURES


def rows(labels: range, count: int = 40) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(labels.start)
    y = torch.randint(labels.start, labels.stop, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator) / 9
    return (noise + nn.functional.one_hot(y, 10)[:, :FEATURES] * 3).numpy(), y.numpy()


def test_a_classifier_answers_with_its_classes_while_new_ones_come_and_while_it_is_fitted() -> None:
    learner = OnePassClassifier(random_state=0).fit(*rows(range(4, 6)))
    probe, _ = rows(range(4, 6))

    def ask() -> None:
        assert set(learner.predict(probe).tolist()) <= set(range(10))
        assert (abs(learner.predict_proba(probe).sum(1) - 1) < 1e-6).all()

    with asking(ask) as counts:
        for labels in (range(2, 4), range(6, 8), range(2), range(8, 10)):
            learner.partial_fit(*rows(labels), task_ends=True)
            learner.fit(*rows(range(4, 6)))
        until(lambda: min(counts) > 0)


def test_an_old_class_is_not_taken_for_another_while_new_ones_come() -> None:
    learner = OnePassClassifier(method="van", learning_rate=0.1, random_state=0)
    x, y = rows(range(4, 6), 400)
    learner.partial_fit(x, y)
    assert (learner.predict(x) == y).mean() > 0.9
    wrong: list[float] = []

    def ask() -> None:
        wrong.append(float((learner.predict(x) != y).mean()))

    new = [rows(range(c, c + 1), 2) for c in (0, 9, 1, 8, 2, 7, 3, 6)]
    with asking(ask) as counts:
        for some in new:
            learner.partial_fit(*some)
        until(lambda: min(counts) > 0)
    assert max(wrong) < 0.5


def test_a_classifier_can_be_copied_while_another_thread_learns() -> None:
    learner = OnePassClassifier(random_state=0).fit(*rows(range(2)))
    probe, _ = rows(range(2))

    def copied() -> None:
        one = pickle.loads(pickle.dumps(learner))
        assert one.learner_.outputs <= max(2, len(one.classes_))
        assert one.predict_proba(probe).shape == (len(probe), len(one.classes_))

    with asking(copied) as counts:
        for _ in range(3):
            for label in range(10):
                learner.partial_fit(*rows(range(label, label + 1), 20))
            learner.fit(*rows(range(2)))
        until(lambda: min(counts) > 0)
