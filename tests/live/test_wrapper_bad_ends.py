"""Ends of tasks that make no sense, and second passes over bad data, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from tests.live.refused_calls import (
    CLASSES,
    Pair,
    Rich,
    batch,
    check_sentence,
    in_a_second_task,
    refused,
)
from tests.toys import FEATURES

# ---- ends of tasks


def test_a_task_ends_once() -> None:
    learner = OnePass(Rich(), learning_rate=0.1)
    with refused(learner, "no batch was observed"):
        learner.end_task()
    learner.observe(*batch())
    learner.end_task()
    with refused(learner, "no batch was observed", "observe some"):
        learner.end_task()


@pytest.mark.parametrize("method", ["ewc", "mas", "icarl"])
def test_methods_that_look_again_say_so(method: str) -> None:
    learner = in_a_second_task(method)
    with refused(learner, "second time", "again=", "moving-average" if method == "ewc" else method):
        learner.end_task()
    with refused(learner, "no data", "again="):
        learner.end_task(again=[])
    if method != "icarl":
        with refused(learner, "again=", "before the next task"):
            learner.observe(*batch(), task="next")


AGAIN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nan": lambda x, y: [(x, y), (x * torch.nan, y)],
    "shape": lambda x, y: [(x, y), (x[:, :3], y)],
    "labels": lambda x, y: [(x, y), (x, y + 100)],
    "lengths": lambda x, y: [(x, y), (x, y[:3])],
    "no pairs": lambda x, y: [x],
    "threes": lambda x, y: [(x, y, y)],
    "no batches": lambda x, y: 5,
    "one batch": lambda x, y: (x, y),
}


@pytest.mark.parametrize("case", AGAIN)
@pytest.mark.parametrize("method", ["ewc", "mas", "icarl"])
def test_bad_data_to_look_at_again_is_refused(method: str, case: str) -> None:
    learner = in_a_second_task(method)
    x, y = batch(seed=9, classes=range(2, 4))
    with refused(learner):
        learner.end_task(again=AGAIN[case](x, y))
    learner.end_task(again=[(x, y)])
    assert learner.segment == 2


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_a_second_look_that_leaves_the_numbers_that_there_are_does_not_poison_what_comes(
    method: str,
) -> None:
    module = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        module.weight.mul_(1e-3)  # so that outputs, and their loss, are finite where slopes are not
    learner = OnePass(
        module, method, learning_rate=0.1, **({"labels": "data"} if method == "ewc" else {})
    )
    x, y = batch()
    learner.observe(x * 1e-3, y)
    with refused(learner):
        learner.end_task(again=[(x * 3e20, y)])
    learner.end_task(again=[(x, y)])
    learner.observe(x, y)


@pytest.mark.parametrize(
    "answer",
    [lambda out: (out, out), lambda out: {"out": out}, lambda out: out["out"], lambda out: None],
    ids=["tuple", "dict", "index", "none"],
)
def test_a_module_that_fails_in_the_second_look_is_one_sentence(
    answer: Callable[[Tensor], Any],
) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return self.head(x) if self.training else answer(self.head(x))

    learner = OnePass(Moody(), "mas", learning_rate=0.1, loss=lambda o, y: o.square().mean())
    x, _ = batch()
    learner.observe(x, x)
    with refused(learner):
        learner.end_task(again=[(x, x)])


@pytest.mark.parametrize(
    ("method", "settings"), [("ewc", {}), ("ewc", {"labels": "data"}), ("mas", {})]
)
def test_a_module_that_keeps_no_graph_in_evaluation_is_not_taken_for_one_without_importances(
    method: str, settings: dict[str, Any]
) -> None:
    class Serving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.training):
                found: Tensor = self.head(x)
            return found

    learner = OnePass(Serving(), method, learning_rate=0.1, **settings)
    x, y = batch()
    learner.observe(x, y)
    with refused(
        learner, "in evaluation mode", "does not depend on the module's trainable parameters"
    ):
        learner.end_task(again=[(x, y)])


def test_icarl_with_several_inputs_is_refused_or_works() -> None:
    learner = OnePass(Pair(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    one, two = batch(classes=range(2)), batch(classes=range(2, 4))
    try:
        for x, y in (one, two):
            learner.observe((x, x[:, :3]), y)
            learner.end_task(again=[((x, x[:, :3]), y)])
        answer = learner.predict((one[0], one[0][:, :3]), task=0)
    except InputError as error:
        check_sentence(error, ("icarl",))
        return
    assert set(answer.tolist()) <= {0, 1}
