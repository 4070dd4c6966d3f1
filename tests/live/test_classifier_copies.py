"""The module of the classifier for scikit-learn, and its copies and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn

from onepass import InputError, Memory, OnePassClassifier
from tests.live.classifiers import STREAMING, Odd, blobs, same

# ---- modules


def test_the_module_that_is_given_is_copied_and_never_changed() -> None:
    X, y = blobs()
    module = Odd(classes=3)
    before = copy.deepcopy(module.state_dict())
    learner = OnePassClassifier(module=module, random_state=0).fit(X, y)
    assert learner.module is module
    assert learner.learner_.module is not module
    assert learner.learner_.module.head.out_features == 4
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert module.head.out_features == 3
    assert not torch.equal(learner.learner_.module.body.weight, module.body.weight)
    again = OnePassClassifier(module=module, random_state=0).fit(X, y)
    assert same(learner, again)


def test_a_function_makes_the_module_from_the_numbers_of_features_and_classes() -> None:
    X, y = blobs(classes=3)
    asked: list[tuple[int, int]] = []

    def make(features: int, classes: int) -> nn.Module:
        asked.append((features, classes))
        return nn.Linear(features, classes)

    one, other = (OnePassClassifier(module=make, random_state=0).fit(X, y) for _ in range(2))
    assert asked == [(5, 3), (5, 3)]
    assert same(one, other)


def test_the_head_grows_unless_the_settings_say_no() -> None:
    X, y = blobs(classes=4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    learner = OnePassClassifier(module=module, settings={"grow": False}, random_state=0)
    first = y < 3
    learner.partial_fit(X[first], y[first])
    with pytest.raises(InputError, match="out of range"):
        learner.partial_fit(X[~first], y[~first])
    assert learner.classes_.tolist() == [0, 1, 2]
    assert learner.predict_proba(X).shape == (200, 3)
    learner.set_params(settings={"grow": "1"}).fit(X, y)
    assert learner.learner_.module[1].out_features == 4


def test_the_default_network_has_the_hidden_layers_asked_for() -> None:
    X, y = blobs()
    for hidden in ((), (7,), [7, 6], 8):
        widths = [hidden] if isinstance(hidden, int) else list(hidden)
        module = OnePassClassifier(hidden=hidden, random_state=0).fit(X, y).learner_.module
        assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == [
            *widths,
            4,
        ]
        assert {p.dtype for p in module.parameters()} == {torch.float64}


# ---- keeping


@pytest.mark.parametrize("method", STREAMING)
def test_a_pickle_in_the_middle_of_a_stream_goes_on_identically(method: str) -> None:
    X, y = blobs(classes=5, rows=120)
    first = y < 3
    learner = OnePassClassifier(
        module=Odd, method=method, random_state=0, memory=Memory(per_task=20)
    )
    learner.partial_fit(X[first], y[first], task_ends=True)
    learner.partial_fit(X[:30], y[:30] % 4)
    twins = [pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner)]
    for one in (learner, *twins):
        one.partial_fit(X[30:], y[30:])
        one.end_task(X, y) if one.learner_.learner.needs.second_pass else one.end_task()
        one.partial_fit(X, y + 3)
    for twin in twins:
        assert same(learner, twin)
        assert np.array_equal(learner.predict_proba(X), twin.predict_proba(X))
        assert twin.classes_.tolist() == list(range(8))
        assert twin.learner_.steps == learner.learner_.steps
        assert twin.learner_.violations == learner.learner_.violations


def test_a_copy_and_its_original_share_nothing() -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    before, twin = learner.predict_proba(X), copy.deepcopy(learner)
    twin.partial_fit(X, (y + 1) % 4)
    assert np.array_equal(learner.predict_proba(X), before)
    assert not np.allclose(twin.predict_proba(X), before)


def test_a_pickle_does_not_hold_the_parameters_once_for_every_layer() -> None:
    X, y = blobs()
    learner = OnePassClassifier(method="van", hidden=[100] * 8, random_state=0).fit(X, y)
    parameters = sum(p.nbytes for p in learner.learner_.module.parameters())
    assert len(pickle.dumps(learner)) < 2.2 * parameters


def test_a_learner_whose_module_was_taken_apart_is_not_pickled() -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    learner.learner_.module.float()
    with pytest.raises(InputError, match="created anew"):
        pickle.dumps(learner)


def test_a_clone_is_not_fitted_and_learns_the_same() -> None:
    X, y = blobs()
    learner = OnePassClassifier(
        module=Odd(), random_state=0, memory=Memory(per_task=9), settings={"reference_batch": 4}
    ).fit(X, y)
    twin = clone(learner)
    with pytest.raises(NotFittedError):
        twin.predict(X)
    with pytest.raises(NotFittedError):
        twin.end_task()
    assert same(learner, twin.fit(X, y))


def test_a_watcher_goes_on_watching_a_copy() -> None:
    X, y = blobs()
    reports: list[dict[str, Any]] = []
    learner = OnePassClassifier(
        random_state=0, settings={"watch": reports.append, "watch_every": 4}
    ).fit(X, y)
    told = [report["step"] for report in reports]
    assert told == [4, 8, 12, 16, 20]
    copy.deepcopy(learner).partial_fit(X, y)
    assert [report["step"] for report in reports[5:]] == [24, 28, 32, 36, 40]
