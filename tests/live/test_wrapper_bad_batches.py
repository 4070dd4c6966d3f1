"""Bad batches, one input or several, are refused in one sentence and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from tests.live.refused_calls import CLASSES, Pair, Rich, batch, in_a_second_task, refused
from tests.toys import small_net

# ---- batches


X_BAD: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "nan": (
        lambda x: x.clone().index_fill_(0, torch.tensor(3), torch.nan),
        ("x ", "not finite", "clean or drop"),
    ),
    "inf": (lambda x: x.clone().index_fill_(1, torch.tensor(2), torch.inf), ("not finite",)),
    "inf of both signs": (
        lambda x: torch.cat([x[:-2], x[-2:] * torch.tensor([[torch.inf], [-torch.inf]])]),
        ("not finite",),
    ),
    "nan in an array": (
        lambda x: np.where(x.numpy() > 1, np.nan, x.numpy()).astype(np.float32),
        ("not finite",),
    ),
    "too many features": (lambda x: torch.cat([x, x], 1), ("[8, 12]", "6]", "reshape")),
    "too few features": (lambda x: x[:, :-1], ("[8, 5]", "reshape")),
    "one dimension more": (lambda x: x[:, None], ("[8, 1, 6]", "reshape")),
    "one dimension less": (lambda x: x[:, 0], ("[8]", "reshape")),
    "a single number": (lambda x: x[0, 0], ("single number",)),
    "float64": (lambda x: x.double(), ("float64", "float32", "convert")),
    "float16": (lambda x: x.half(), ("float16", "float32", "convert")),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), ("float8",)),
    "whole numbers": (lambda x: x.long(), ("int64", "float32", "convert")),
    "float64 array": (lambda x: x.double().numpy(), ("float64", "convert")),
    "complex": (lambda x: x.to(torch.complex64), ("complex", "convert")),
    "sparse": (lambda x: x.to_sparse(), ("sparse", "convert")),
    "on a device without data": (lambda x: x.to("meta"), ("meta",)),
    "array of words": (lambda x: np.array(["a"] * len(x)), ("array of", "convert")),
    "array of objects": (lambda x: np.array([None] * len(x)), ("array of object", "convert")),
    "empty": (lambda x: x[:0], ("empty batch",)),
    "nothing": (lambda x: None, ("tensor", "NoneType")),
    "lists": (lambda x: x.tolist(), ("tensor", "list")),
    "no inputs": (lambda x: (), ("no inputs",)),
    "a dictionary": (lambda x: {"x": x}, ("names", "same")),
    "empty dictionary": (lambda x: {}, ("no inputs",)),
    "two inputs": (lambda x: (x, x), ("2 inputs", "1 inputs")),
}


@pytest.mark.parametrize("case", X_BAD)
def test_a_batch_with_bad_inputs_is_refused(case: str) -> None:
    learner = in_a_second_task()
    spoil, words = X_BAD[case]
    x, y = batch(seed=9)
    with refused(learner, *words):
        learner.observe(spoil(x), y)


@pytest.mark.parametrize("case", X_BAD)
def test_questions_about_bad_inputs_are_refused(case: str) -> None:
    learner = in_a_second_task()
    spoil, words = X_BAD[case]
    x, _ = batch(seed=9)
    for ask in (learner.predict, learner.scores):
        with refused(learner, *words):
            ask(spoil(x))


@pytest.mark.parametrize("case", sorted(X_BAD.keys() - {"a dictionary"}))
def test_a_first_batch_with_bad_inputs_is_refused_by_us_or_by_the_module(case: str) -> None:
    learner = OnePass(Rich(), learning_rate=0.1)
    spoil, _ = X_BAD[case]
    x, y = batch(seed=9)
    with refused(learner):
        learner.observe(spoil(x), y)
    learner.observe(x, y)
    assert learner.steps == 1


Y_BAD: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "too large": (lambda y: y.clone().fill_(CLASSES), ("label 4", "4 outputs", "grow=True")),
    "negative": (lambda y: y - CLASSES, ("out of range", "from 0")),
    "ignored as in torch": (
        lambda y: y.clone().index_fill_(0, torch.tensor(0), -100),
        ("-100", "out of range"),
    ),
    "floats": (lambda y: y.float(), ("whole number", "float32", "loss of your own")),
    "float array": (lambda y: y.double().numpy(), ("whole number", "float64")),
    "truth values": (lambda y: y > 1, ("whole number", "bool")),
    "one-hot": (lambda y: nn.functional.one_hot(y, CLASSES), ("whole number", "[8, 4]")),
    "a column": (lambda y: y[:, None], ("whole number", "[8, 1]")),
    "too few": (lambda y: y[:-1], ("8 examples", "7")),
    "too many": (lambda y: torch.cat([y, y]), ("8 examples", "16")),
    "empty": (lambda y: y[:0], ("y is an empty batch",)),
    "a list": (lambda y: y.tolist(), ("y must be a tensor", "list")),
    "nothing": (lambda y: None, ("y must be a tensor", "NoneType")),
    "words": (lambda y: np.array(["cat"] * len(y)), ("y is an array",)),
}


@pytest.mark.parametrize("case", Y_BAD)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_batch_with_bad_labels_is_refused(case: str, first: bool) -> None:
    learner = OnePass(Rich(), learning_rate=0.1) if first else in_a_second_task()
    spoil, words = Y_BAD[case]
    x, y = batch(seed=9)
    with refused(learner, *words):
        learner.observe(x, spoil(y))


def test_a_label_that_is_not_of_the_task_is_refused() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks={"animals": [0, 1], "plants": [2, 3]})
    learner.observe(*batch(classes=range(2)), task="animals")
    x, y = batch(classes=range(4))
    with refused(learner, "label 2", "'animals'", "0, 1"):
        learner.observe(x, y)
    with refused(learner, "label 0", "'plants'", "2, 3"):
        learner.observe(x, y, task="plants")


def test_tasks_with_more_classes_than_the_module_has_outputs_are_refused() -> None:
    learner = OnePass(small_net(3), learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    with refused(learner, "up to 3", "3 outputs", "grow=True"):
        learner.observe(*batch(classes=range(2)))


def test_a_label_that_would_need_thousands_of_outputs_is_refused() -> None:
    learner = OnePass(small_net(3), learning_rate=0.1, grow=True)
    learner.observe(*batch(classes=range(3)))
    x, y = batch()
    with refused(learner, "label 1000000", "densely"):
        learner.observe(x, y + 1_000_000 - int(y.max()))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("c", ("unknown task 'c'", "a, b")),
        (1, ("unknown task '1'",)),
        (1.5, ("float",)),
        (["a"], ("list",)),
        (True, ("bool",)),
        (b"a", ("bytes",)),
    ],
)
def test_a_task_that_does_not_exist_is_refused(task: Any, words: tuple[str, ...]) -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks={"a": [0, 1], "b": [2, 3]})
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    with refused(learner, *words):
        learner.observe(x, y, task=task)
    with refused(learner):
        learner.predict(x, task=task)
    with refused(learner):
        learner.scores(x, task=task)


def test_a_task_on_a_task_free_stream_is_refused() -> None:
    learner = in_a_second_task(task_free=True)
    x, y = batch(seed=9)
    with refused(learner, "task-free", "leave"):
        learner.observe(x, y, task=1)
    with refused(learner, "task-free", "no task to end"):
        learner.end_task()


def test_a_batch_beyond_the_declared_tasks_is_refused() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks=[[0, 1]])
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    learner.end_task()
    with refused(learner, "all 1 declared tasks"):
        learner.observe(x, y)


def test_icarl_learns_tasks_in_their_order_or_says_so() -> None:
    learner = OnePass(Rich(), "icarl", learning_rate=0.1, tasks={"a": [0, 1], "b": [2, 3]})
    one, two = batch(classes=range(2)), batch(classes=range(2, 4))
    with refused(learner, "order", "'a'"):
        learner.observe(*two, task="b")
    for name, pair in (("a", one), ("b", two)):
        learner.observe(*pair, task=name)
        with refused(learner, "again"):
            learner.observe(*pair, task="a" if name == "b" else "b")
        learner.end_task(again=[pair])
    for name, pair in (("a", one), ("b", two)):
        with refused(learner):
            learner.observe(*pair, task=name)


# ---- several inputs


SEVERAL: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str, ...]]] = {
    "one missing": (lambda a, b: {"left": a}, ("'left'", "'right'", "same")),
    "one too many": (lambda a, b: {"left": a, "right": b, "up": b}, ("'up'", "same")),
    "another name": (lambda a, b: {"left": a, "write": b}, ("'write'", "'right'")),
    "no names": (lambda a, b: (a, b), ("'left', 'right'",)),
    "nan in one": (lambda a, b: {"left": a, "right": b * torch.nan}, ("x['right']", "not finite")),
    "fewer examples in one": (lambda a, b: {"left": a, "right": b[:-1]}, ("8 examples", "7")),
    "wrong shape of one": (lambda a, b: {"left": a, "right": a}, ("x['right']", "shape")),
    "exchanged": (lambda a, b: {"left": b, "right": a}, ("x['left']", "shape")),
    "wrong kind of one": (lambda a, b: {"left": a, "right": b.long()}, ("x['right']", "int64")),
    "a number among them": (lambda a, b: {"left": a, "right": 3}, ("x['right']", "int")),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_bad_dictionaries_of_inputs_are_refused(case: str) -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    learner.observe({"left": x, "right": x[:, :3]}, y)
    spoil, words = SEVERAL[case]
    with refused(learner, *words):
        learner.observe(spoil(x, x[:, :3]), y)
    with refused(learner, *words):
        learner.predict(spoil(x, x[:, :3]))
    learner.observe({"right": x[:, :3], "left": x}, y)  # the order of names means nothing


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda a, b: (a,), ("1 inputs", "2 inputs")),
        (lambda a, b: (a, b, b), ("3 inputs", "2 inputs")),
        (lambda a, b: (b, a), ("x[0]", "shape")),
        (lambda a, b: (a, b * torch.inf), ("x[1]", "not finite")),
        (lambda a, b: (a, b[:2]), ("x[1] has 2",)),
        (lambda a, b: {"left": a, "right": b}, ("names", "2 inputs")),
    ],
)
def test_bad_tuples_of_inputs_are_refused(
    given: Callable[[Tensor, Tensor], Any], words: tuple[str, ...]
) -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    learner.observe((x, x[:, :3]), y)
    with refused(learner, *words):
        learner.observe(given(x, x[:, :3]), y)


def test_names_that_forward_does_not_have_are_refused() -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    with refused(learner, "refused the batch", "up"):
        learner.observe({"left": x, "up": x[:, :3]}, y)
    with refused(learner):
        learner.observe({0: x, 1: x[:, :3]}, y)


def test_a_sequence_of_another_length_is_refused() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 4), nn.Linear(5, CLASSES)
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(self.words(x))[0][:, -1])
            return out

    learner = OnePass(Reader(), learning_rate=0.1)
    words, (_, y) = torch.randint(0, 11, (8, 5)), batch()
    learner.observe(words, y)
    with refused(learner, "[8, 4]", "5]", "pad"):
        learner.observe(words[:, :4], y)
    with refused(learner, "refused the batch", "index out of range"):
        learner.observe(words + 11, y)


@pytest.mark.parametrize("trouble", ["runtime", "key"])
def test_somebody_who_watches_does_not_change_what_is_refused(trouble: str) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            if trouble == "key" and int(x.max()) > 10:
                raise KeyError("no such word")
            out: Tensor = self.head(self.words(x).mean(1))
            return out

    reports: list[dict[str, Any]] = []
    learner = OnePass(Reader(), learning_rate=0.1, watch=reports.append, watch_every=2)
    words, (_, y) = torch.randint(0, 11, (8, 5)), batch()
    learner.observe(words, y)
    with refused(learner, "refused the batch"):
        learner.observe(words + 11, y)
    assert not reports
    learner.observe(words, y)
    assert [report["step"] for report in reports] == [2]


def test_a_batch_of_one_for_batch_norm_is_refused() -> None:
    learner = in_a_second_task()
    says = ("refused the batch", "batch-norm needs two examples", "nothing was learnt")
    with refused(learner, *says):
        learner.observe(*batch(1))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("a-gem", {"reference_batch": 1}), ("gem", {"memory": Memory(examples=2)})],
)
def test_a_memory_that_gives_batch_norm_a_single_example_is_refused_in_words_that_say_so(
    method: str, settings: dict[str, Any]
) -> None:
    learner = OnePass(Rich(), method, learning_rate=0.1, **settings)
    with pytest.raises(InputError, match="a larger reference_batch, or more memory"):  # noqa: PT012
        for seed in range(4):
            learner.observe(*batch(seed=seed))
            learner.end_task()
