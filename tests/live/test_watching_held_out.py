"""Forgetting as it is reported with and without examples that are held out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from onepass import Memory, OnePass
from tests.live.drifting import learnt, net, stream


def test_forgetting_is_none_where_the_end_of_the_task_was_not_measured() -> None:
    learner = learnt()
    # The last task has just ended, so nothing of it is lost yet; the others are not known.
    assert learner.report()["forgetting_by_task"] == {0: None, 1: None, 2: 0.0}
    assert learner.report()["forgetting"] == 0.0
    late = learnt()
    late.observe(*stream(3)[0])
    assert late.report()["forgetting_by_task"] == {0: None, 1: None, 2: None}
    assert late.report()["forgetting"] is None
    assert late.report()["forgetting"] is None, "the report before was no best moment"


MEASURED = {"watched": {"watch": lambda _: None}, "held out": {"memory": Memory(held_out=20)}}


@pytest.mark.parametrize("more", MEASURED.values(), ids=MEASURED)
def test_forgetting_is_known_of_every_task_whose_end_was_measured(more: dict[str, Any]) -> None:
    report = learnt("a-gem", **more).report()
    by_task = report["forgetting_by_task"]
    assert list(by_task) == [0, 1, 2]
    assert report["forgetting"] == pytest.approx(sum(by_task.values()) / 3)


def test_forgetting_is_the_fall_of_the_accuracy_on_what_is_held_out() -> None:
    learner = learnt("a-gem", tasks=1, memory=Memory(per_task=20, held_out=20), reference_batch=1)
    memory = learner.memory
    assert memory is not None
    batch = memory.take(torch.tensor(memory.groups()[0]))

    def accuracy() -> float:
        return (learner.predict(batch.x[0]) == batch.slots[0]).double().mean().item()

    best = accuracy()
    for x, y in stream(2):
        learner.observe(x, (y + 1) % 4)
    assert learner.report()["forgetting_by_task"] == {0: pytest.approx(best - accuracy())}
    assert best - accuracy() > 0.3


def test_forgetting_is_too_optimistic_on_rehearsed_examples_and_right_on_held_out_ones() -> None:
    """Few examples, learnt by heart, and noise: what is rehearsed stays, what is not goes."""
    found = {}
    for name, apart in (("rehearsed", 0), ("held out", 60)):
        memory = Memory(per_task=8, held_out=apart)
        learner = OnePass(net(), "er", learning_rate=0.1, memory=memory, watch=lambda _: None)

        def accuracy(task: int, learner: OnePass = learner) -> float:
            test = zip(*stream(task + 50 * 4, 60, noise=1.5), strict=True)
            x, y = (torch.cat(part) for part in test)
            return (learner.predict(x) == y).double().mean().item()

        best = []
        for task in range(4):
            for x, y in stream(task, 120, noise=1.5):
                learner.observe(x, y)
            learner.end_task()
            best.append(accuracy(task))
        lost = [best[task] - accuracy(task) for task in range(4)]
        found[name] = learner.report()["forgetting"], sum(lost) / 4
    (rehearsed, true), (apart, truth) = found["rehearsed"], found["held out"]
    assert rehearsed < true - 0.1
    assert apart == pytest.approx(truth, abs=0.1)


def test_forgetting_of_own_losses_and_of_classes_is_measured_on_what_is_held_out() -> None:
    memory = Memory(held_out=10)
    learner = OnePass(nn.Linear(8, 2), "er", learning_rate=0.05, loss=mse_loss, memory=memory)
    for x, _ in stream(0):
        learner.observe(x, x[:, :2])
    learner.end_task()
    assert learner.report()["forgetting_by_task"] == {0: 0.0}
    memory = Memory(held_out=10, recent=0)
    free = OnePass(net(), "er", learning_rate=0.05, task_free=True, memory=memory)
    for x, y in stream(0):
        free.observe(x, y)
    assert free.memory is not None
    assert {c: len(rows) for c, rows in free.memory.groups().items()} == dict.fromkeys(range(4), 10)
    assert free.report()["forgetting"] is None
    assert free.report()["forgetting_by_task"] == dict.fromkeys(range(4), 0.0)
    kept = Counter(free.memory._keys(list(range(free.memory.size))))
    assert free.report()["memory"] == dict(sorted(kept.items()))
