"""A classifier for scikit-learn that learns in a single pass, and goes on learning without forgetting."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from onepass.errors import InputError, LearntError, first_line, shown
from onepass.learners import METHODS
from onepass.live.plan import Memory
from onepass.live.saving import AGAIN, packed, unpacked
from onepass.live.settings import refusing
from onepass.live.wrapper import OnePass
from onepass.random_numbers import Purpose, RandomNumbers, bits_at, torch_seeded

Array = NDArray[Any]
OWN = (
    "method",
    "learning_rate",
    "memory",
    "task_free",
)  # settings of OnePass that are parameters of their own here
DECIDED = (
    "module",
    "optimizer",
    "loss",
    "tasks",
    "seed",
)  # and those that a classifier leaves no choice of
AT_ONCE = 1024  # rows in one forward pass
LEARNT = (
    "learner_",
    "classes_",
    "_outputs",
    "_view",
    "n_features_in_",
    "feature_names_in_",
)  # what `fit` makes
HOW = "call partial_fit with task_ends=True for the last rows of a task"


class OnePassClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A neural network that sees every row once, as a scikit-learn classifier: `OnePass` behind `fit` and `partial_fit`.

    `fit` starts afresh and learns one task in one pass. `partial_fit` goes on, in the order of the rows, and a method such as A-GEM keeps it
    from forgetting what it learnt in the tasks that have ended. Classes may appear at any time. Rows should be scaled, because the steps are
    those of plain SGD: fit a `StandardScaler` once, before the stream, and leave it as it is. One that moves on with the stream
    (its `partial_fit`) makes the rows in the memory stale: they were scaled in another way, and rehearsing them spoils what was learnt.

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

    - `module`: None for a network of fully connected layers with ReLU, in float64, so that an answer does not depend on the rows it is asked
      with; an `nn.Module` of [rows, features], which is copied and never changed itself; or a function of (features, classes) that makes one
      (classes is 2 where a single one is known). Its last linear layer grows when it has too few outputs;
    - `method`, `learning_rate`, `memory`, `task_free` as in `OnePass`;
    - `hidden`: the widths of the network's hidden layers, if `module` is None;
    - `batch_size`: the rows of one step; what is left of a call's rows is a smaller batch;
    - `random_state`: decides the network's initial values, the order of `fit`, and every draw of the method;
    - `settings`: further settings of `OnePass` by name, `{"reference_batch": 64}`; `grow` may be the name of the layer that is to grow, or False.

    Attributes once there were data: `classes_`, sorted; `n_features_in_`; and `feature_names_in_`, if columns have names; `learner_`, the
    `OnePass`, whose outputs are the classes in the order in which they came. Bad input raises a ValueError: `fit` then changes nothing, and
    `partial_fit` keeps the batches before the one that was refused. A `LearntError` of `partial_fit`
    says how many of its rows were learnt.

    A fitted classifier can be pickled and copied in the middle of its stream, and both go on in the same way.
    """

    classes_: Array
    n_features_in_: int
    learner_: OnePass
    _outputs: Array  # of the classes in their order
    _view: tuple[
        OnePass, Array, Array
    ]  # learner, classes and outputs that belong together: an answer reads them at once

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
        """Forget everything, and learn from each row once, in a shuffled order, as one task, which then ends."""
        # Beside the one that answers: other threads may ask it until this one takes its place.
        fresh = object.__new__(type(self))
        fresh.__dict__ = {
            name: value for name, value in self.__dict__.items() if name not in LEARNT
        }
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
        """Learn from each row once, in their order. `classes` may be named before they come; `task_ends` says that these rows end a task."""
        with self._or_as_before():
            X, y = self._read(X, y)
            named = y[:0] if classes is None else np.unique(column_or_1d(classes))
            assert_all_finite(named)
            learner = self._admit(named, y)
            if task_ends and learner.task_free:
                raise InputError(
                    "this stream was declared task-free: there is no task to end, so leave task_ends out"
                )
            if task_ends and learner.learner.needs_review and learner.batches > 0:
                raise InputError(
                    f"{learner.method} looks at a task's data a second time, and these rows are only its end: call end_task(X, y) with all of them"
                )
            learner.advice.how = (
                None
                if task_ends
                else HOW
                + (
                    ", or make the classifier with task_free=True"
                    if learner.learner.task_free
                    else ""
                )
            )
            order = np.arange(len(X))
            self._learn(X, y, order, "with end_task()" if task_ends else "with what comes next")
        if task_ends:
            self._end(X, y, order)
        return self

    def end_task(self, X: Any = None, y: Any = None) -> OnePassClassifier:
        """The current task is over. Methods that look at its data a second time are given all its rows again."""
        check_is_fitted(self)
        if X is None:
            self.learner_.end_task()
            return self
        X, y = self._read(X, y)
        for label in np.setdiff1d(y, self.classes_):
            raise InputError(
                f"y has the class {label}, which the task did not have: give the rows that were learnt from"
            )
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
        self.learner_.end_task(
            again=self._batches(X, y, order) if self.learner_.learner.needs_review else None
        )

    def _batches(self, X: Array, y: Array, order: Array) -> Iterator[tuple[Tensor, Tensor]]:
        outputs = self._outputs[np.searchsorted(self.classes_, y)]
        for start in range(0, len(order), int(self.batch_size)):
            rows = order[start : start + int(self.batch_size)]
            yield self._tensor(X[rows]), torch.tensor(outputs[rows])

    def _tensor(self, X: Array) -> Tensor:
        return torch.tensor(X, dtype=self.learner_.fleet.theta.dtype)

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
        if (
            not isinstance(self.batch_size, Integral)
            or isinstance(self.batch_size, bool)
            or self.batch_size < 1
        ):
            raise InputError(
                f"batch_size must be a whole number of rows above 0, got {self.batch_size!r}"
            )
        X, y = validate_data(
            self, X, y, reset=not hasattr(self, "learner_"), dtype=[np.float64, np.float32]
        )
        with warnings.catch_warnings():
            # A piece of a stream may well have nearly as many classes as rows.
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
            check_classification_targets(y)
        return X, y

    def _admit(self, named: Array, y: Array) -> OnePass:
        """Know the classes that are named, and those of the labels; the first time, make the learner.

        New ones are given the outputs behind the old ones, in the order in which they came, so that old ones keep theirs.
        """
        known = np.empty_like(self.classes_) if hasattr(self, "classes_") else y[:0]
        if len(known):
            known[self._outputs] = self.classes_
        came, first = np.unique(y, return_index=True)
        if len({isinstance(label, str) for labels in (known, named, came) for label in labels}) > 1:
            raise InputError(
                "some classes are strings and some are numbers: name all of them in one way"
            )
        for labels in (named, came[np.argsort(first)]):
            known = np.concatenate([known, labels[~np.isin(labels, known)]])
        self._outputs = np.argsort(known)
        self.classes_ = known[self._outputs]
        learner = self.learner_ if hasattr(self, "learner_") else self._new_learner()
        self._view = learner, self.classes_, self._outputs
        self.learner_ = learner  # last: what makes it fitted, for threads that ask
        return learner

    def _new_learner(self) -> OnePass:
        if not isinstance(self.settings, Mapping | None):
            raise InputError(
                f"settings must be a dictionary of settings of OnePass, got {type(self.settings).__name__}"
            )
        settings = {"grow": True, **(self.settings or {})}
        for name in settings:
            if not isinstance(name, str):
                raise InputError(f"settings are named by strings, got {shown(name)}")
            if name in OWN or name in DECIDED:
                why = (
                    "it is a parameter of the classifier itself"
                    if name in OWN
                    else "a classifier leaves no choice of it"
                )
                raise InputError(f"settings cannot have '{name}': {why}")
        if self.memory is not None and not isinstance(self.memory, Memory):
            raise InputError(
                f"memory must be an onepass.Memory or None, got {type(self.memory).__name__}"
            )
        if not isinstance(self.method, str):
            raise InputError(f"method must be the name of one, got {self.method!r}")
        if self.method in METHODS and METHODS[self.method].learner.needs_own_classes:
            raise InputError(
                f"{self.method} needs to know the classes of each task, and a classifier is not told: choose another method"
            )
        rate = self.learning_rate
        if isinstance(rate, Real) and not isinstance(rate, bool):
            with suppress(OverflowError):  # it is refused below
                rate = float(rate)  # a search over parameters gives NumPy's numbers
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        module = self._new_module(seed)
        return OnePass(
            module,
            self.method,
            learning_rate=rate,
            task_free=self.task_free,
            memory=self.memory,
            seed=seed,
            **settings,
        )

    def _new_module(self, seed: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        if self.module is not None and not callable(self.module):
            raise InputError(
                f"module must be an nn.Module, a function of (features, classes) that makes one, or None, got {self.module!r}"
            )
        features, classes = self.n_features_in_, max(2, len(self.classes_))
        seeded = torch_seeded(bits_at(seed, Purpose.INITIAL, 0, 0), torch.device("cpu"))
        with seeded, refusing("the network cannot be made", "look at module and hidden"):
            return (
                self._layers(features, classes)
                if self.module is None
                else self.module(features, classes)
            )

    def _layers(self, features: int, classes: int) -> nn.Module:
        hidden = (
            list(self.hidden) if isinstance(self.hidden, (Sequence, np.ndarray)) else [self.hidden]
        )
        if not all(
            isinstance(width, Integral) and not isinstance(width, bool) and width > 0
            for width in hidden
        ):
            raise InputError(
                f"hidden must be the widths of the hidden layers, whole numbers above 0, got {self.hidden!r}"
            )
        layers: list[nn.Module] = []
        for before, after in pairwise([features, *map(int, hidden), classes]):
            layers += [nn.Linear(before, after, dtype=torch.float64), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    # ---- answers

    def predict(self, X: Any) -> Array:
        """The likeliest of the classes known so far, for every row."""
        scores, classes = self._scores(X)
        found: Array = classes[scores.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> Array:
        """The softmax of the scores: a column a class in the order of `classes_`, whose sum is one."""
        found: Array = softmax(self._scores(X)[0], axis=1)
        return found

    def decision_function(self, X: Any) -> Array:
        """The network's outputs: a column a class in the order of `classes_`; of two classes, how much the second is ahead."""
        scores, _ = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _scores(self, X: Any) -> tuple[Array, Array]:
        """A score for every row and class, and the classes, which may become more in another thread meanwhile."""
        check_is_fitted(self, "learner_")
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        learner, classes, outputs = self._view
        dtype = learner.fleet.theta.dtype
        with learner._alone:  # all rows are answered by the same network
            pieces = [
                learner.scores(torch.tensor(X[start : start + AT_ONCE], dtype=dtype))
                for start in range(0, len(X), AT_ONCE)
            ]
        scores = torch.cat(pieces).double().cpu().numpy()
        # A class that was named but never seen may have no output yet, and an output no class.
        missing = max(0, len(outputs) - scores.shape[1])
        found: Array = np.pad(scores, ((0, 0), (0, missing)), constant_values=-math.inf)[:, outputs]
        return found, classes

    # ---- keeping

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "learner_" in state:
            learner: OnePass = state["learner_"]
            with learner._alone:  # another thread may be learning
                view = (
                    self._view if self._view[0] is learner else state["_view"]
                )  # it may be fitted anew meanwhile
                state["classes_"], state["_outputs"] = view[1:]
                learner._check_at_rest("copy or pickle")
                # The module's parameters are views of one tensor: a copy of it has tensors of their own, and what else there is goes as a file.
                state["learner_"] = copy.deepcopy(learner.module), packed(learner)
        state.pop("_view", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "learner_" in state:
            module, content = state["learner_"]
            again = {
                name: value for name, value in (state["settings"] or {}).items() if name in AGAIN
            }
            state["learner_"] = unpacked(content, "the copy of the classifier", module, again)
            state["_view"] = state["learner_"], state["classes_"], state["_outputs"]
        super().__setstate__(state)


def _failed(error: LearntError) -> str:
    return f"something failed ({first_line(error.__cause__ or error)}): mend that, and"
