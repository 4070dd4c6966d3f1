"""The classifier for scikit-learn: its checks, how it learns, its classes and predictions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass, OnePassClassifier
from onepass.live import classifier
from tests.live.classifiers import STREAMING, Odd, blobs, same, state

# Checks of scikit-learn and why they are expected to fail: none.
DOES_NOT_APPLY: dict[str, str] = {}


@parametrize_with_checks(
    [OnePassClassifier(method="van"), OnePassClassifier(method="a-gem")],
    expected_failed_checks=lambda _: DOES_NOT_APPLY,
)
def test_scikit_learn_has_nothing_to_object(estimator: OnePassClassifier, check: Any) -> None:
    check(estimator)


def drift(seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Two tasks that want the opposite of the same rows; a mark tells them apart."""
    X = np.random.default_rng(seed).normal(size=(600, 10))
    y = (X[:, 0] > 0).astype(int)
    one, other = (np.hstack([X, np.tile(mark, (600, 1))]) for mark in ([1.0, 0.0], [0.0, 1.0]))
    return (one, y), (other, 1 - y)


class Seeing(nn.Module):
    """Remembers the rows it is trained on."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.head, self.rows = nn.Linear(features, classes), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows.append(x.detach().clone())
        out: Tensor = self.head(x)
        return out


# ---- learning


def test_fit_sees_every_row_once_in_a_shuffled_order_as_one_task_that_ends() -> None:
    X, y = blobs(rows=203)
    learner = OnePassClassifier(module=Seeing, method="van", random_state=0).fit(X, y)
    batches = learner.learner_.module.rows
    assert [len(batch) for batch in batches] == [10] * 20 + [3]
    seen = torch.cat(batches).numpy()
    expected = X.astype(np.float32)
    assert not np.array_equal(seen, expected)
    assert np.array_equal(seen[np.lexsort(seen.T)], expected[np.lexsort(expected.T)])
    assert (learner.learner_.segment, learner.learner_.batches) == (1, 0)


def test_partial_fit_sees_every_row_once_in_the_given_order_and_the_task_goes_on() -> None:
    X, y = blobs(rows=25)
    learner = OnePassClassifier(module=Seeing, method="van", random_state=0)
    for _ in range(2):
        learner.partial_fit(X, y)
    seen = torch.cat(learner.learner_.module.rows).numpy()
    assert np.array_equal(seen, np.vstack([X, X]).astype(np.float32))
    assert (learner.learner_.segment, learner.learner_.batches) == (0, 6)


def test_it_is_one_pass_around_the_same_module() -> None:
    X, y = blobs()
    module = nn.Linear(5, 4).double()
    settings: dict[str, Any] = {"reference_batch": 7}
    mine = OnePassClassifier(module=module, random_state=3, settings=settings)
    mine.partial_fit(X, y, task_ends=True).partial_fit(X[::-1], y[::-1])
    settings |= {"learning_rate": 0.1, "seed": mine.learner_._seed}
    learner = OnePass(copy.deepcopy(module), "a-gem", **settings)
    order = {label: place for place, label in enumerate(dict.fromkeys(y.tolist()))}
    for turn in (1, -1):
        codes = torch.tensor([order[label] for label in y[::turn].tolist()])
        rows = torch.tensor(X[::turn].copy())
        for x, labels in zip(rows.split(10), codes.split(10), strict=True):
            learner.observe(x, labels)
        if turn == 1:
            learner.end_task()
    assert torch.equal(learner.module.weight, mine.learner_.module.weight)
    assert learner.violations == mine.learner_.violations


def test_a_fit_starts_afresh_and_is_decided_by_the_random_state() -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=5).fit(X, y)
    first = state(learner)
    learner.partial_fit(X, y + 4, task_ends=True)
    torch.rand(3)  # torch's own generator has no say
    learner.fit(X, y)
    assert all(np.array_equal(a, b) for a, b in zip(first, state(learner), strict=True))
    assert learner.classes_.tolist() == [0, 1, 2, 3]
    assert learner.learner_.segment == 1
    assert not same(learner, OnePassClassifier(random_state=6).fit(X, y))


def test_the_random_state_decides_what_the_method_draws() -> None:
    old, new = drift()
    module = nn.Linear(12, 2)
    one, same_one, other = (
        OnePassClassifier(module=module, random_state=seed, settings={"reference_batch": 5})
        for seed in (0, 0, 1)
    )
    for learner in (one, same_one, other):
        learner.partial_fit(*old, task_ends=True)
    assert same(one, other)  # nothing to draw yet
    for learner in (one, same_one, other):
        learner.partial_fit(*new)
    assert same(one, same_one)
    assert not same(one, other)


def test_no_global_generator_is_moved_by_a_seeded_fit() -> None:
    X, y = blobs()
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    OnePassClassifier(module=Odd, random_state=5).fit(X, y)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numbers, np.random.get_state()[1])


def test_a_gem_remembers_more_of_an_old_task_than_plain_sgd() -> None:
    old, new = drift()
    kept, learnt = {}, {}
    for method in ("van", "a-gem"):
        learner = OnePassClassifier(method=method, random_state=0)
        learner.partial_fit(*old, task_ends=True)
        assert learner.score(*old) > 0.9
        learner.partial_fit(*new, task_ends=True)
        kept[method], learnt[method] = learner.score(*old), learner.score(*new)
    assert min(learnt.values()) > 0.85
    assert kept["a-gem"] > 0.7
    assert kept["van"] < 0.2


def test_task_ends_is_what_makes_the_past_a_past() -> None:
    old, new = drift()
    learner = OnePassClassifier(random_state=0).partial_fit(*old)
    assert learner.learner_.memory.visible == 0
    assert learner.end_task() is learner
    assert learner.learner_.memory.visible > 0
    at_once = OnePassClassifier(random_state=0).partial_fit(*old, task_ends=True)
    assert same(learner.partial_fit(*new), at_once.partial_fit(*new))


def test_a_task_free_stream_has_no_ends() -> None:
    X, y = blobs()
    memory = Memory(examples=30, recent=2)
    learner = OnePassClassifier(task_free=True, memory=memory, random_state=0).fit(X, y)
    assert learner.learner_.memory.size == 30
    assert learner.score(X, y) > 0.8
    before = state(learner)
    with pytest.raises(InputError, match="task-free"):
        learner.partial_fit(X, y, task_ends=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, state(learner), strict=True))
    with pytest.raises(InputError, match="task-free"):
        learner.end_task()


@pytest.mark.parametrize("method", STREAMING)
def test_every_method_for_streams_fits(method: str) -> None:
    X, y = blobs()
    assert OnePassClassifier(method=method, random_state=0).fit(X, y).score(X, y) > 0.8


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_a_method_that_looks_twice_is_given_the_rows_of_the_task_again(method: str) -> None:
    X, y = blobs()
    whole, parts = (OnePassClassifier(method=method, random_state=0) for _ in range(2))
    whole.partial_fit(X, y, classes=range(4), task_ends=True)
    parts.partial_fit(X[:100], y[:100], classes=range(4))
    with pytest.raises(InputError, match=r"end_task\(X, y\)"):
        parts.partial_fit(X[100:], y[100:], task_ends=True)
    assert parts.learner_.steps == 10
    parts.partial_fit(X[100:], y[100:])
    with pytest.raises(InputError, match="a second time"):
        parts.end_task()
    with pytest.raises(InputError, match="did not have"):
        parts.end_task(X, y + 1)
    parts.end_task(X, y)
    assert parts.learner_.segment == whole.learner_.segment == 1
    assert same(parts.partial_fit(X[::-1], y[::-1]), whole.partial_fit(X[::-1], y[::-1]))


# ---- classes


def test_classes_may_appear_at_any_time() -> None:
    X, y = blobs(classes=5, rows=500)
    learner, known = OnePassClassifier(method="er", random_state=0), []
    for classes in ([3, 1], [4], [0, 2]):
        now = np.isin(y, classes)
        learner.partial_fit(X[now], y[now], task_ends=True)
        known += classes
        assert learner.classes_.tolist() == sorted(known)
        assert learner.predict_proba(X).shape == (500, len(known))
        assert learner.learner_.module[-1].out_features == len(known)
    assert learner.score(X, y) > 0.8


def test_a_new_class_leaves_the_outputs_of_the_old_ones_as_they_are() -> None:
    X, y = blobs(classes=3)
    learner = OnePassClassifier(learning_rate=1e-12, random_state=0)
    learner.partial_fit(X[y > 0], y[y > 0], classes=[1, 2])
    before = learner.learner_.scores(torch.tensor(X))
    learner.partial_fit(X[y == 0], y[y == 0])
    after = learner.learner_.scores(torch.tensor(X))
    assert after.shape == (200, 3)
    assert torch.allclose(after[:, :2], before)
    assert np.array_equal(learner.decision_function(X), after[:, [2, 0, 1]])


def test_classes_may_be_named_before_they_come() -> None:
    X, y = blobs(classes=3)
    one = y == 1
    learner = OnePassClassifier(random_state=0).partial_fit(X[one], y[one], classes=[2, 0, 1])
    assert learner.classes_.tolist() == [0, 1, 2]
    assert learner.predict_proba(X).shape == (200, 3)
    assert set(learner.predict(X[one])) == {1}
    learner.partial_fit(X, y, classes=[7])  # later, and beyond what the network has
    assert learner.classes_.tolist() == [0, 1, 2, 7]
    chances = learner.predict_proba(X)
    assert np.allclose(chances.sum(1), 1)
    assert not chances[:, 3].any()
    learner.partial_fit(X[one], np.full(one.sum(), 7))
    assert learner.predict_proba(X)[:, 3].any()


def test_a_single_class_is_a_beginning() -> None:
    X, _ = blobs()
    learner = OnePassClassifier(random_state=0).partial_fit(X, np.full(200, "only"))
    assert learner.predict(X).tolist() == ["only"] * 200
    assert np.array_equal(learner.predict_proba(X), np.ones((200, 1)))
    learner.partial_fit(X, np.full(200, "other one"))
    assert learner.classes_.tolist() == ["only", "other one"]
    assert set(learner.predict(X)) == {"other one"}


def test_labels_may_be_strings() -> None:
    X, y = blobs()
    names = np.array(["pear", "fig", "plum", "apple"])
    numbers = np.argsort(np.argsort(names))
    named = OnePassClassifier(random_state=0).fit(X, names[y])
    numbered = OnePassClassifier(random_state=0).fit(X, numbers[y])
    assert named.classes_.tolist() == ["apple", "fig", "pear", "plum"]
    assert np.array_equal(named.predict(X), np.sort(names)[numbered.predict(X)])
    assert named.score(X, names[y]) > 0.8
    named.partial_fit(X, np.array(["a much longer name"] * 200, dtype=object))
    assert named.classes_.tolist() == ["a much longer name", "apple", "fig", "pear", "plum"]
    assert "a much longer name" in named.predict(X)


def test_strings_and_numbers_do_not_mix() -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    for labels, classes in ((y.astype(str), None), (y, ["a", "b"])):
        with pytest.raises(ValueError, match="strings"):
            learner.partial_fit(X, labels, classes=classes)
    assert learner.classes_.tolist() == [0, 1, 2, 3]


# ---- answers


@pytest.mark.parametrize("classes", [2, 4])
def test_a_row_of_predict_proba_sums_to_one_and_has_a_column_a_class(classes: int) -> None:
    X, y = blobs(classes)
    learner = OnePassClassifier(random_state=0)
    for label in reversed(range(classes)):  # so that outputs and classes are in different orders
        learner.partial_fit(X[y == label], y[y == label])
    for _ in range(3):
        learner.partial_fit(X, y)
    chances = learner.predict_proba(X)
    assert chances.shape == (200, classes)
    assert np.allclose(chances.sum(1), 1)
    assert np.array_equal(learner.classes_[chances.argmax(1)], learner.predict(X))
    assert (chances[np.arange(200), y] > 0.5).mean() > 0.8
    decisions = learner.decision_function(X)
    assert decisions.shape == ((200,) if classes == 2 else (200, 4))
    chosen = decisions > 0 if classes == 2 else decisions.argmax(1)
    assert np.array_equal(chosen, learner.predict(X))


def test_answers_do_not_depend_on_the_rows_they_are_asked_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, y = blobs()
    learner = OnePassClassifier(random_state=0).fit(X, y)
    whole = learner.predict_proba(X)
    monkeypatch.setattr(classifier, "AT_ONCE", 7)
    assert np.allclose(learner.predict_proba(X), whole, rtol=1e-12)


def test_an_output_that_no_class_has_is_never_the_answer() -> None:
    X, y = blobs(classes=2)
    module = nn.Linear(5, 9)
    with torch.no_grad():
        module.bias[5] = 50.0
    learner = OnePassClassifier(module=module, learning_rate=1e-6, random_state=0).fit(X, y)
    assert set(learner.predict(X)) <= {0, 1}
    assert np.allclose(learner.predict_proba(X).sum(1), 1)


# ---- company


def test_it_works_in_a_pipeline_under_cross_validation() -> None:
    X, y = load_iris(return_X_y=True)
    X = X * [1, 100, 10, 1000]
    learner = OnePassClassifier(learning_rate=0.3, batch_size=5, random_state=0)
    pipeline = make_pipeline(StandardScaler(), learner)
    scores = cross_val_score(pipeline, X, y, cv=5)
    assert scores.mean() > 0.85
    assert np.array_equal(scores, cross_val_score(pipeline, X, y, cv=5))


def test_it_works_in_a_search_with_numbers_of_numpy() -> None:
    X, y = load_digits(n_class=4, return_X_y=True)
    rates, sizes = np.array([1e-4, 0.1], dtype=np.float32), np.array([5, 10])
    grid = {"learning_rate": rates, "batch_size": sizes}
    search = GridSearchCV(OnePassClassifier(method="van", random_state=0), grid, cv=2)
    search.fit(X / 16, y)
    assert search.best_params_["learning_rate"] == np.float32(0.1)
    assert search.best_score_ > 0.9
