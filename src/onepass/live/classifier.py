"""A classifier for scikit-learn that learns in a single pass, and goes on without forgetting."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from onepass.errors import InputError, LearntError, first_line
from onepass.live.classifier_setup import is_count, new_learner
from onepass.live.plan import Memory
from onepass.live.saving import AGAIN, packed, unpacked
from onepass.live.wrapper import OnePass
from onepass.random_numbers import Purpose, RandomNumbers

Array = NDArray[Any]
AT_ONCE = 1024  # rows in one forward pass
# What `fit` makes.
LEARNT = ("learner_", "classes_", "_outputs", "_view", "n_features_in_", "feature_names_in_")
HOW = "call partial_fit with task_ends=True for the last rows of a task"


class OnePassClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network that sees every row once, for scikit-learn: `OnePass` with `fit` and `partial_fit`.

    `fit` starts afresh and learns one task in one pass. `partial_fit` goes on, in the order of the
    rows, and a method such as A-GEM keeps it from forgetting what it learnt in the tasks that have
    ended. Classes may appear at any time. Rows should be scaled, because the steps are those of
    plain SGD: fit a `StandardScaler` once, before the stream, and leave it as it is. One that moves
    on with the stream (its `partial_fit`) makes the rows in the memory stale: they were scaled in
    another way, and rehearsing them spoils what was learnt.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> X, small = X / 16, y < 5
    >>> learner = OnePassClassifier(method="a-gem", random_state=0)
    >>> learner = learner.partial_fit(X[small], y[small], task_ends=True)
    >>> learner.classes_
    array([0, 1, 2, 3, 4])
    >>> learner = learner.partial_fit(X[~small], y[~small], task_ends=True)
    >>> learner.classes_
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> learner.predict_proba(X[:3]).shape
    (3, 10)
    >>> bool(learner.fit(X, y).score(X, y) > 0.8)
    True

    Parameters:

    - `module`: None for a network of fully connected layers with ReLU, in float64, so that the
      prediction for a row does not depend on the rows beside it; an `nn.Module` of [rows,
      features], which is copied and never changed itself; or a function of (features, classes) that
      makes one (classes is 2 where a single one is known). Its last linear layer grows when it has
      too few outputs;
    - `method`, `learning_rate`, `memory`, `task_free` as in `OnePass`;
    - `hidden`: the widths of the network's hidden layers, if `module` is None;
    - `batch_size`: the rows of one step; what is left of a call's rows is a smaller batch;
    - `random_state`: decides the network's initial values, the order of `fit`, and every draw of
      the method;
    - `settings`: further settings of `OnePass` by name, `{"reference_batch": 64}`; `grow` may be
      the name of the layer that is to grow, or False.

    Attributes once there were data: `classes_`, sorted; `n_features_in_`; and `feature_names_in_`,
    if columns have names; `learner_`, the `OnePass`, whose outputs are the classes in the order in
    which they came. Bad input raises a ValueError: `fit` then changes nothing, and `partial_fit`
    keeps the batches before the one that was refused. A `LearntError` of `partial_fit` says how
    many of its rows were learnt.

    A fitted classifier can be pickled and copied in the middle of its stream, and both go on in the
    same way.
    """

    classes_: Array
    n_features_in_: int
    learner_: OnePass
    _outputs: Array  # of the classes in their order
    # Learner, classes and outputs that belong together: a prediction reads them at once.
    _view: tuple[OnePass, Array, Array]

    def __init__(
        self,
        *,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        method: str = "a-gem",
        learning_rate: float = 0.1,
        hidden: Sequence[int] = (64,),
        batch_size: int = 10,
        memory: Memory | None = None,
        task_free: bool = False,
        random_state: int | np.random.RandomState | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = module
        self.method = method
        self.learning_rate = learning_rate
        self.hidden = hidden
        self.batch_size = batch_size
        self.memory = memory
        self.task_free = task_free
        self.random_state = random_state
        self.settings = settings

    # ---- learning

    def fit(self, X: Any, y: Any) -> OnePassClassifier:
        """Forget everything, and learn one task: each row once, in a shuffled order."""
        # Beside the one that predicts: other threads may use it until this one takes its place.
        fresh = object.__new__(type(self))
        parameters = {name: value for name, value in self.__dict__.items() if name not in LEARNT}
        fresh.__dict__ = parameters
        X, y = fresh._read(X, y)
        learner = fresh._admit(np.unique(y), y)
        learner.advice.how = None  # the task ends below
        order = RandomNumbers([learner._seed], Purpose.ORDER).permutation(0, [len(X)])[0].numpy()
        try:
            fresh._learn(X, y, order)
            if not learner.task_free:
                fresh._end(X, y, order)
        except LearntError as error:
            why = f"this fit is given up and all is as before, because {_failed(error)}"
            raise InputError(f"{why} fit again") from error.__cause__
        self.__dict__ = fresh.__dict__
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, task_ends: bool = False
    ) -> OnePassClassifier:
        """Learn from each row once, in their order.

        `classes` may be named before they come; `task_ends` says that these rows end a task.
        """
        with self._or_as_before():
            X, y = self._read(X, y)
            named = y[:0] if classes is None else np.unique(column_or_1d(classes))
            assert_all_finite(named)
            learner = self._admit(named, y)
            if task_ends and learner.task_free:
                what = "this stream was declared task-free: there is no task to end"
                raise InputError(f"{what}, so leave task_ends out")
            if task_ends and learner.learner.needs.second_pass and learner.batches > 0:
                what = f"{learner.method} looks at a task's data a second time"
                how = "call end_task(X, y) with all of them"
                raise InputError(f"{what}, and these rows are only its end: {how}")
            other = ", or make the classifier with task_free=True"
            advised = HOW if learner.learner.needs.boundaries else HOW + other
            learner.advice.how = None if task_ends else advised
            order = np.arange(len(X))
            self._learn(X, y, order, "with end_task()" if task_ends else "with what comes next")
        if task_ends:
            self._end(X, y, order)
        return self

    def end_task(self, X: Any = None, y: Any = None) -> OnePassClassifier:
        """End the current task. Methods with a second pass are given all its rows again."""
        check_is_fitted(self)
        if X is None:
            self.learner_.end_task()
            return self
        X, y = self._read(X, y)
        for label in np.setdiff1d(y, self.classes_):
            what = f"y has the class {label}, which the task did not have"
            raise InputError(f"{what}: give the rows that were learnt from")
        self._end(X, y, np.arange(len(X)))
        return self

    def _learn(self, X: Array, y: Array, order: Array, then: str = "") -> None:
        learnt = 0
        for rows, labels in self._batches(X, y, order):
            learnt += len(rows)
            try:
                self.learner_.observe(rows, labels)
            except LearntError as error:
                some = learnt < len(order)
                which = f"{f'the first {learnt} of' if some else 'all'} {len(order)} rows"
                what = f"{which} were learnt, and then {_failed(error)}"
                further = "with the rows after them" if some else then
                raise LearntError(f"{what} go on {further}") from error.__cause__

    def _end(self, X: Array, y: Array, order: Array) -> None:
        again = self._batches(X, y, order) if self.learner_.learner.needs.second_pass else None
        self.learner_.end_task(again=again)

    def _batches(self, X: Array, y: Array, order: Array) -> Iterator[tuple[Tensor, Tensor]]:
        outputs = self._outputs[np.searchsorted(self.classes_, y)]
        dtype = self.learner_.fleet.theta.dtype
        for start in range(0, len(order), int(self.batch_size)):
            rows = order[start : start + int(self.batch_size)]
            yield torch.tensor(X[rows], dtype=dtype), torch.tensor(outputs[rows])

    @contextmanager
    def _or_as_before(self) -> Iterator[None]:
        """After an error all is as it was before, if nothing has been learnt in between."""
        before = dict(self.__dict__)
        steps = before["learner_"].steps if "learner_" in before else 0
        try:
            yield
        except BaseException:
            if not hasattr(self, "learner_") or self.learner_.steps == steps:
                self.__dict__ = before
            raise

    # ---- classes and outputs

    def _read(self, X: Any, y: Any) -> tuple[Array, Array]:
        """Rows and labels that are possible."""
        if not is_count(self.batch_size):
            what = "batch_size must be a whole number of rows above 0"
            raise InputError(f"{what}, got {self.batch_size!r}")
        first = not hasattr(self, "learner_")
        X, y = validate_data(self, X, y, reset=first, dtype=[np.float64, np.float32])
        with warnings.catch_warnings():
            # A piece of a stream may well have nearly as many classes as rows.
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
            check_classification_targets(y)
        return X, y

    def _admit(self, named: Array, y: Array) -> OnePass:
        """Know the classes that are named or in the labels; the first time, make the learner.

        New ones are given the outputs behind the old ones, in the order in which they came, so that
        old ones keep theirs.
        """
        known = np.empty_like(self.classes_) if hasattr(self, "classes_") else y[:0]
        if len(known):
            known[self._outputs] = self.classes_
        came, first = np.unique(y, return_index=True)
        if len({isinstance(label, str) for labels in (known, named, came) for label in labels}) > 1:
            what = "some classes are strings and some are numbers"
            raise InputError(f"{what}: name all of them in one way")
        for labels in (named, came[np.argsort(first)]):
            known = np.concatenate([known, labels[~np.isin(labels, known)]])
        self._outputs = np.argsort(known)
        self.classes_ = known[self._outputs]
        learner = self.learner_ if hasattr(self, "learner_") else new_learner(self)
        self._view = learner, self.classes_, self._outputs
        self.learner_ = learner  # last: what makes it fitted, for other threads
        return learner

    # ---- predictions

    def predict(self, X: Any) -> Array:
        """The likeliest of the classes known so far, for every row."""
        scores, classes = self._scores(X)
        found: Array = classes[scores.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> Array:
        """The softmax of the scores: one column per class in the order of `classes_`."""
        found: Array = softmax(self._scores(X)[0], axis=1)
        return found

    def decision_function(self, X: Any) -> Array:
        """The network's outputs: one column per class in the order of `classes_`.

        Of two classes, how much the second is ahead.
        """
        scores, _ = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _scores(self, X: Any) -> tuple[Array, Array]:
        """A score for every row and class, and the classes, which another thread may add to."""
        check_is_fitted(self, "learner_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        learner, classes, outputs = self._view
        dtype = learner.fleet.theta.dtype
        with learner._alone:  # the same network for all rows
            pieces = [
                learner.scores(torch.tensor(X[start : start + AT_ONCE], dtype=dtype))
                for start in range(0, len(X), AT_ONCE)
            ]
        scores = torch.cat(pieces).double().cpu().numpy()
        # A class that was named but never seen may have no output yet, and an output no class.
        missing = max(0, len(outputs) - scores.shape[1])
        found: Array = np.pad(scores, ((0, 0), (0, missing)), constant_values=-math.inf)[:, outputs]
        return found, classes

    # ---- copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "learner_" in state:
            learner: OnePass = state["learner_"]
            with learner._alone:  # another thread may be learning, or fit anew
                view = self._view if self._view[0] is learner else state["_view"]
                state["classes_"], state["_outputs"] = view[1:]
                learner._check_at_rest("copy or pickle")
                # The module's parameters are views of one tensor: a copy of it has tensors of its
                # own, and what else there is goes as a file.
                state["learner_"] = copy.deepcopy(learner.module), packed(learner)
        state.pop("_view", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "learner_" in state:
            module, content = state["learner_"]
            given = (state["settings"] or {}).items()
            again = {name: value for name, value in given if name in AGAIN}
            state["learner_"] = unpacked(content, "the copy of the classifier", module, again)
            state["_view"] = state["learner_"], state["classes_"], state["_outputs"]
        super().__setstate__(state)


def _failed(error: LearntError) -> str:
    return f"something failed ({first_line(error.__cause__ or error)}): mend that, and"
