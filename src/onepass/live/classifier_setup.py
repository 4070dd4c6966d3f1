"""The learner and the network that the parameters of a classifier describe."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import nn

from onepass.errors import InputError, shown
from onepass.learners import METHODS
from onepass.live.plan import Memory
from onepass.live.settings import refusing
from onepass.live.wrapper import OnePass
from onepass.random_numbers import Purpose, bits_at, torch_seeded

if TYPE_CHECKING:
    from onepass.live.classifier import OnePassClassifier

# Settings of OnePass that are parameters of the classifier, and those that it leaves no choice of.
OWN = ("method", "learning_rate", "memory", "task_free")
DECIDED = ("module", "optimizer", "loss", "tasks", "seed")


def is_count(value: Any) -> bool:
    """Whether it is a whole number above 0, NumPy's too."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and bool(value > 0)


def new_learner(owner: OnePassClassifier) -> OnePass:
    """A learner before its first batch."""
    if not isinstance(owner.settings, Mapping | None):
        what = "settings must be a dictionary of settings of OnePass"
        raise InputError(f"{what}, got {type(owner.settings).__name__}")
    settings = {"grow": True, **(owner.settings or {})}
    for name in settings:
        if not isinstance(name, str):
            raise InputError(f"settings are named by strings, got {shown(name)}")
        if name in OWN:
            why = "it is a parameter of the classifier itself"
            raise InputError(f"settings cannot have '{name}': {why}")
        if name in DECIDED:
            raise InputError(f"settings cannot have '{name}': a classifier leaves no choice of it")
    if owner.memory is not None and not isinstance(owner.memory, Memory):
        got = type(owner.memory).__name__
        raise InputError(f"memory must be an onepass.Memory or None, got {got}")
    if not isinstance(owner.method, str):
        raise InputError(f"method must be the name of one, got {owner.method!r}")
    if owner.method in METHODS and METHODS[owner.method].learner.needs.own_classes:
        what = f"{owner.method} needs to know the classes of each task"
        raise InputError(f"{what}, and a classifier is not told: choose another method")
    rate = owner.learning_rate
    if isinstance(rate, Real) and not isinstance(rate, bool):
        with suppress(OverflowError):  # it is refused below
            rate = float(rate)  # a search over parameters gives NumPy's numbers
    seed = int(check_random_state(owner.random_state).randint(np.iinfo(np.int32).max))
    return OnePass(
        _new_module(owner, seed),
        owner.method,
        learning_rate=rate,
        task_free=owner.task_free,
        memory=owner.memory,
        seed=seed,
        **settings,
    )


def _new_module(owner: OnePassClassifier, seed: int) -> nn.Module:
    given = owner.module
    if isinstance(given, nn.Module):
        return copy.deepcopy(given)
    if given is not None and not callable(given):
        what = "module must be an nn.Module, a function of (features, classes) that makes one"
        raise InputError(f"{what}, or None, got {given!r}")
    features, classes = owner.n_features_in_, max(2, len(owner.classes_))
    seeded = torch_seeded(bits_at(seed, Purpose.INITIAL, 0, 0), torch.device("cpu"))
    with seeded, refusing("the network cannot be made", "look at module and hidden"):
        return _layers(owner, features, classes) if given is None else given(features, classes)


def _layers(owner: OnePassClassifier, features: int, classes: int) -> nn.Module:
    several = isinstance(owner.hidden, (Sequence, np.ndarray))
    hidden: list[Any] = list(owner.hidden) if several else [owner.hidden]
    if not all(is_count(width) for width in hidden):
        what = "hidden must be the widths of the hidden layers, whole numbers above 0"
        raise InputError(f"{what}, got {owner.hidden!r}")
    layers: list[nn.Module] = []
    for before, after in pairwise([features, *map(int, hidden), classes]):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
