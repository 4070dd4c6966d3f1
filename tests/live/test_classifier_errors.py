"""What the classifier for scikit-learn refuses, and what is left then."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from onepass import InputError, LearntError, OnePassClassifier
from tests.live.classifiers import blobs, same

# ---- errors


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"method": "agem"}, "did you mean 'a-gem'"),
        ({"method": None}, "name of one"),
        ({"method": "icarl"}, "classes of each task"),
        ({"method": "multi-task"}, "all tasks at once"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"learning_rate": -1}, "learning rate"),
        ({"hidden": (3, 0)}, "hidden"),
        ({"hidden": "wide"}, "hidden"),
        ({"hidden": 10**400}, "the network cannot be made"),
        ({"hidden": 10**15}, "the network cannot be made"),
        ({"learning_rate": 10**400}, "learning rate"),
        ({"memory": 100}, "Memory"),
        ({"module": 3}, "module must be"),
        ({"module": lambda features, classes: None}, "nn.Module"),
        ({"module": nn.Linear(3, 2)}, "refused the batch"),
        (
            {"module": lambda features, classes: features / 0},
            "the network cannot be made (.*division by zero)",
        ),
        ({"module": lambda: None}, "the network cannot be made"),
        ({"settings": {1: 2}}, "named by strings"),
        ({"settings": 3}, "dictionary"),
        ({"settings": {"refrence_batch": 3}}, "did you mean 'reference_batch'"),
        ({"settings": {"seed": 3}}, "no choice"),
        ({"settings": {"task_free": True}}, "parameter of the classifier"),
        ({"random_state": "chance"}, "chance"),
    ],
)
def test_a_bad_parameter_is_a_value_error_and_leaves_it_as_it_was(
    parameters: dict[str, Any], sentence: str
) -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).set_params(**parameters)
    for learn in (learner.fit, learner.partial_fit):
        with pytest.raises(ValueError, match=sentence):
            learn(X, y)
        with pytest.raises(NotFittedError):
            learner.predict(X)
        assert not hasattr(learner, "n_features_in_")


def test_a_fit_that_fails_leaves_the_old_one() -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    before = learner.predict_proba(X)
    learner.set_params(learning_rate=1e300)
    with pytest.raises(InputError, match="learning rate"):
        learner.fit(X[:, :3], y)
    assert learner.n_features_in_ == 5
    assert np.array_equal(learner.predict_proba(X), before)


class Picky(nn.Linear):
    """Refuses a row of large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1000).any()):
            raise ValueError("too large")
        return super().forward(x)


def test_a_batch_that_is_refused_ends_the_call_and_those_before_it_are_learnt() -> None:
    X, y = blobs()
    learner, expected = (
        OnePassClassifier(module=Picky, random_state=0).partial_fit(X, y) for _ in range(2)
    )
    X[25] = 1e6
    with pytest.raises(InputError, match="too large"):
        learner.partial_fit(X, y)
    assert learner.learner_.steps == 22
    assert same(learner, expected.partial_fit(X[:20], y[:20]))
    fresh = OnePassClassifier(module=Picky, random_state=0)
    with pytest.raises(InputError, match="too large"):
        fresh.partial_fit(X, y)
    assert fresh.learner_.steps == 2
    assert fresh.classes_.tolist() == [0, 1, 2, 3]


def failing(at: int) -> OnePassClassifier:
    """Its watch fails after some batches, once."""
    told: list[object] = []

    def watch(report: object) -> None:
        told.append(report)
        if len(told) == at:
            raise LookupError("of my own")

    return OnePassClassifier(random_state=0, settings={"watch": watch, "watch_every": 1})


def test_what_fails_after_a_batch_says_how_many_rows_were_learnt() -> None:
    X, y = blobs()
    learner = failing(2)
    says = r"^the first 20 of 200 rows were learnt, .*of my own.*: .*go on with the rows after"
    with pytest.raises(LearntError, match=says) as caught:
        learner.partial_fit(X, y, task_ends=True)
    assert isinstance(caught.value.__cause__, LookupError)
    learner.partial_fit(X[20:], y[20:], task_ends=True)
    assert same(learner, OnePassClassifier(random_state=0).partial_fit(X, y, task_ends=True))
    assert learner.learner_.segment == 1


@pytest.mark.parametrize(("ends", "then"), [(True, r"end_task\(\)"), (False, "what comes next")])
def test_what_fails_after_the_last_batch_says_what_is_left_to_do(ends: bool, then: str) -> None:
    X, y = blobs()
    learner = failing(20)
    says = rf"^all 200 rows were learnt, .*: mend that, and go on with {then}$"
    with pytest.raises(LearntError, match=says):
        learner.partial_fit(X, y, task_ends=ends)
    assert (learner.learner_.steps, learner.learner_.segment) == (20, 0)


def test_a_fit_in_which_something_fails_keeps_nothing_and_says_so() -> None:
    X, y = blobs()
    learner = failing(30).fit(X, y)
    before = learner.predict_proba(X)
    says = r"^this fit is given up and all is as before, because something failed \(of my own\)"
    with pytest.raises(InputError, match=says) as caught:
        learner.fit(-X, y)
    assert isinstance(caught.value.__cause__, LookupError)
    assert np.array_equal(learner.predict_proba(X), before)
    with pytest.raises(InputError, match="given up"):
        failing(1).fit(X, y)


def test_a_call_whose_first_batch_is_refused_changes_nothing() -> None:
    X, y = blobs()
    bad = X.copy()
    bad[5] = 1e6
    learner = OnePassClassifier(module=Picky, random_state=0)
    for _ in range(2):  # before there were data, and after
        before = dict(vars(learner))
        with pytest.raises(InputError, match="too large"):
            learner.partial_fit(bad, y + 4, classes=[9])
        assert vars(learner) == before
        learner.partial_fit(X, y)
    assert learner.classes_.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "labels", [np.linspace(0.1, 0.9, 200), np.array([None, 1] * 100), np.full(200, np.nan)]
)
def test_what_is_no_class_is_refused(labels: np.ndarray) -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    before = learner.predict_proba(X)
    for learn in (learner.fit, learner.partial_fit, learner.end_task):
        with pytest.raises(ValueError, match=r"label|NaN"):
            learn(X, labels)
    with pytest.raises(ValueError, match="NaN"):
        learner.partial_fit(X, y, classes=[1.0, np.nan])
    assert np.array_equal(learner.predict_proba(X), before)


def test_a_piece_of_a_stream_may_have_a_class_for_every_row() -> None:
    X, _ = blobs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner = (
            OnePassClassifier(random_state=0)
            .partial_fit(X[:40], np.arange(40))
            .partial_fit(X[40:80], np.arange(40, 80))
        )
    assert learner.predict_proba(X).shape == (200, 80)
