"""Tasks with heads of their own: only their outputs learn, compete and are predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onepass import Memory, OnePass
from tests.live.modules import CLASSES, LIVE, equal, plainly, sgd, stream
from tests.toys import FEATURES, Normed, small_net


@pytest.mark.parametrize("method", ["van", "a-gem"])
def test_only_the_outputs_of_the_task_learn(method: str) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6))
    tasks = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    learner = OnePass(module, method, learning_rate=0.1, tasks=tasks)
    before = copy.deepcopy(module[2].state_dict())
    for x, y in stream(classes=range(2, 4)):
        learner.observe(x, y, task="b")
    for name, value in module[2].state_dict().items():
        moved = [not torch.equal(row, old) for row, old in zip(value, before[name], strict=True)]
        assert moved == [False, False, True, True, False, False]


def test_a_task_with_a_head_is_the_plain_loop_on_its_outputs() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1, tasks=[[0, 1], [2, 3, 4]])
    data = stream(classes=range(2, 5))
    losses = [learner.observe(x, y, task=1) for x, y in data]

    def own(outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs[:, 2:5], y - 2)

    expected = plainly(twin, sgd(twin.parameters()), data, own)
    assert losses == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("method", LIVE)
def test_an_answer_for_a_task_is_one_of_its_classes(method: str) -> None:
    tasks = {"a": [0, 1], "b": [4, 2], "c": [5, 3]}
    learner = OnePass(small_net(6), method, learning_rate=0.1, tasks=tasks)
    for name, classes in (("a", [0, 1]), ("b", [4, 2])):
        data = [(x, torch.tensor(classes)[y]) for x, y in stream(classes=range(2))]
        for x, y in data:
            learner.observe(x, y, task=name)
        learner.end_task(again=data if learner.learner.needs.second_pass else None)
    for name, classes in (("a", {0, 1}), ("b", {2, 4})):
        assert set(learner.predict(x, task=name).tolist()) <= classes
        if method != "icarl":
            assert torch.equal(learner.scores(x, task=name), learner.module(x))


@pytest.mark.parametrize("method", LIVE)
def test_a_module_may_have_more_outputs_than_the_tasks_have_classes(method: str) -> None:
    module = small_net(7)
    before = copy.deepcopy(module[2].state_dict())  # type: ignore[index]
    learner = OnePass(module, method, learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    for classes in (range(2), range(2, 4)):
        data = stream(3, classes=classes)
        for x, y in data:
            learner.observe(x, y)
        learner.end_task(again=data if learner.learner.needs.second_pass else None)
    assert set(learner.predict(x, task=1).tolist()) <= {2, 3}
    for name, value in module[2].state_dict().items():  # type: ignore[index]
        assert torch.equal(value[4:], before[name][4:])


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
def test_every_policy_goes_with_heads(policy: Any) -> None:
    memory, tasks = Memory(per_task=10, policy=policy), [[0, 1], [2, 3]]
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, tasks=tasks, memory=memory)
    for classes in (range(2), range(2, 4)):
        for x, y in stream(classes=classes):
            learner.observe(x, y)
        learner.end_task()
    assert learner.memory is not None
    assert learner.memory.counts() == {0: 10, 1: 10}


def test_a_new_task_ends_the_one_before() -> None:
    one, other = small_net(CLASSES), small_net(CLASSES)
    other.load_state_dict(one.state_dict())
    named, counted = OnePass(one, learning_rate=0.1), OnePass(other, learning_rate=0.1)
    for task in ("first", "second", "third"):
        for x, y in stream(seed=len(task)):
            named.observe(x, y, task=task)
            counted.observe(x, y)
        assert (named.segment, named.task) == (counted.segment, task)
        counted.end_task()
    assert equal(one, other)
