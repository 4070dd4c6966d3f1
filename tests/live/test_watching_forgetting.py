"""Forgetting, as reports tell it: since the best moment, by task or by class."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from onepass import Memory, OnePass
from tests.live.reports import CLASSES, remembered, right, stream
from tests.toys import FEATURES, small_net


def test_nothing_is_forgotten_right_after_a_task_and_damage_is_seen() -> None:
    module = small_net(CLASSES)
    learner = OnePass(module, learning_rate=0.3, watch=lambda _: None)
    for task in range(2):
        assert (learner.report()["forgetting"] is None) == (task == 0)
        for x, y in stream(40, seed=task):
            learner.observe(x, y)
        learner.end_task()
    assert learner.report()["forgetting"] == pytest.approx(0, abs=0.05)
    best = [max(learner._watch.best[k], right(module, *remembered(learner, k))) for k in range(2)]
    assert min(best) > 0.8
    with torch.no_grad():
        module[2].weight.neg_()  # type: ignore[index,operator]
    now = [right(module, *remembered(learner, k)) for k in range(2)]
    assert learner.report()["forgetting"] == pytest.approx(sum(best) / 2 - sum(now) / 2)
    assert learner.report()["forgetting"] > 0.5
    with torch.no_grad():
        module[2].weight.neg_()  # type: ignore[index,operator]
    assert learner.report()["forgetting"] == pytest.approx(0, abs=0.05)


def test_a_first_task_that_has_just_ended_is_not_forgotten() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, watch=lambda _: None)
    for x, y in stream():
        learner.observe(x, y)
    learner.end_task()
    assert learner.report()["forgetting"] == 0


def test_without_tasks_forgetting_is_by_class() -> None:
    module = small_net(CLASSES)
    memory = Memory(examples=40, recent=3)
    learner = OnePass(module, learning_rate=0.3, task_free=True, memory=memory)
    for x, y in stream(40):
        learner.observe(x, y)
    first = learner.report()  # there is nothing to compare with
    assert first["forgetting"] is None
    assert first["forgetting_by_task"] == dict.fromkeys(range(CLASSES))
    assert learner.report()["forgetting"] == 0
    best = [right(module, *remembered(learner, c)) for c in range(CLASSES)]
    with torch.no_grad():
        module[2].bias[1] += 100  # type: ignore[index,operator]
    lost = (sum(best) - best[1]) / CLASSES
    assert learner.report()["forgetting"] == pytest.approx(lost, abs=1e-6)


def test_forgetting_of_a_loss_of_ones_own_is_how_much_it_rose() -> None:
    module = nn.Linear(FEATURES, 2)
    learner = OnePass(module, learning_rate=0.1, loss=mse_loss, watch=lambda _: None)
    for x, _ in stream(30):
        learner.observe(x, x[:, :2])
    learner.end_task()
    assert learner.report()["forgetting"] == 0
    assert learner.memory is not None
    kept = learner.memory.take(torch.tensor(learner.memory.groups()[0]))
    before = mse_loss(module(kept.x[0]), kept.extra["target"][0]).item()
    with torch.no_grad():
        module.bias.add_(1)
    after = mse_loss(module(kept.x[0]), kept.extra["target"][0]).item()
    report = learner.report()
    assert report["forgetting"] == pytest.approx(after - before, rel=1e-4)
    assert report["forgetting"] > 0.5
    assert report["accuracy"] is None
