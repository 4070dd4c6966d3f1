"""What `OnePass` is made with: reading it, and refusing what cannot be right."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.errors import InputError, first_line, shown, unknown
from onepass.files import check_writable, make_folder, resolved
from onepass.learners import METHODS, method
from onepass.learners.base import Learner
from onepass.live.plan import Memory

Name = int | str
Tasks = Sequence[Sequence[int]] | Mapping[Name, Sequence[int]]
OwnLoss = Callable[[Any, Tensor], Tensor]
PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
CLASSES = 2**20  # that tasks may declare at most: every class up to the highest one takes memory
COMMON = ("learning_rate", "optimizer", "loss", "tasks", "task_free", "grow", "memory", "precision")


def check_module(module: object, place: str = "first") -> None:
    if not isinstance(module, nn.Module):
        raise InputError(f"the {place} argument must be an nn.Module, got {type(module).__name__}")
    check_mode()


def check_mode() -> None:
    """Raise in inference mode: what is made there can never be learnt from."""
    if torch.is_inference_mode_enabled():
        what = "nothing can be learnt in inference mode"
        raise InputError(f"{what}: leave torch.inference_mode() first")


def read_method(name: str) -> type[Learner]:
    if not isinstance(name, str):
        got = type(name).__name__
        raise InputError(f"the method is named by a string such as 'a-gem', got {got}")
    found = method(name)
    if found.joined:
        what = f"{name} sees all tasks at once, so it is no method for a stream"
        raise InputError(f"{what}: choose another one")
    if found.learner.needs.own_network:
        what = f"{name} builds a network of its own for every task"
        raise InputError(f"{what}, so it cannot learn in the one you have: choose another one")
    return found.learner


def read_settings(name: str, given: Mapping[str, Any]) -> tuple[dict[str, float], Any]:
    """Hyper-parameters and options of a method by name."""
    learner = method(name).learner
    kinds = get_type_hints(learner.options)
    fields = [field.name for field in dataclasses.fields(learner.options)]
    columns = {}
    for key, values in learner.hyperparameters.items():
        value = given.get(key, values[(len(values) - 1) // 2])
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
            raise InputError(f"{key} must be a number from 0, and below 1e12, got {shown(value)}")
        columns[key] = float(value)
    options = {}
    for key, value in given.items():
        if key in columns:
            continue
        if key not in fields:
            raise unknown(f"setting of {name}", key, [*columns, *fields, *COMMON])
        options[key] = _option(key, value, kinds[key])
    return columns, learner.options(**options)


def _option(key: str, value: Any, kind: Any) -> Any:
    """A value for an option of this kind: whole numbers count something, none is negative."""
    if get_origin(kind) is Literal:
        return read_choice(key, value, get_args(kind))
    whole = isinstance(value, int) and not isinstance(value, bool)
    possible = {
        bool: isinstance(value, bool),
        int: whole and 1 <= value <= 2**31,
        float: (whole or isinstance(value, float)) and (value == 0 or 1e-30 <= value <= 1e12),
    }
    if not possible.get(kind, False):
        names = {bool: "True or False", int: "a whole number, at least 1", float: "a number from 0"}
        raise InputError(f"{key} must be {names.get(kind, str(kind))}, got {shown(value)}")
    return float(value) if kind is float else value


def read_choice(what: str, value: object, valid: Iterable[str]) -> str:
    """One of some names."""
    if not isinstance(value, str) or value not in valid:
        raise unknown(what, value if isinstance(value, str) else shown(value), valid)
    return value


def read_loss(loss: object) -> bool:
    """Whether it is the cross-entropy of class labels; else it must be a function."""
    return not callable(loss) and read_choice("loss", loss, ["cross-entropy"]) == "cross-entropy"


def read_flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):  # a word such as "no" would count as true
        raise InputError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def read_plan(memory: object) -> Memory:
    if memory is not None and not isinstance(memory, Memory):
        got = type(memory).__name__
        raise InputError(f"the memory must be described by onepass.Memory, got {got}")
    return Memory() if memory is None else memory


def read_learning_rate(rate: float | None, optimizer: Optimizer | None) -> float:
    if (rate is None) == (optimizer is None):
        what = "give a learning_rate for plain SGD or an optimizer over the module's parameters"
        raise InputError(f"{what}, one of them")
    if rate is None:
        return 0.0
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1e-30 < rate < 1e6:
        what = "the learning rate must be a number above 0, and below a million"
        raise InputError(f"{what}, got {shown(rate)}")
    return float(rate)


def read_tasks(tasks: Tasks | None) -> dict[Name, tuple[int, ...]]:
    if tasks is None:
        return {}
    what = "tasks must list the classes of each task, from 0, each once"
    wrong = InputError(f"{what}: tasks=[[0, 1], [2, 3]]")
    try:
        named: dict[Any, Any] = dict(
            tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
        )
        table = {name: tuple(operator.index(c) for c in classes) for name, classes in named.items()}
    except TypeError:
        raise wrong from None
    if any(c >= CLASSES for classes in table.values() for c in classes):
        what = f"tasks have a class beyond {CLASSES - 1}"
        raise InputError(f"{what}: number the classes densely, from 0")
    if not table or not all(
        classes and min(classes) >= 0 and len(set(classes)) == len(classes)
        for classes in table.values()
    ):
        raise wrong
    for name in table:
        check_named(name)
    owners: dict[int, tuple[int, ...]] = {}
    for one in dict.fromkeys(table.values()):
        for c in one:
            other = owners.setdefault(c, one)
            if other is not one:
                what = f"tasks with the classes {shown(other)} and {shown(one)} overlap in part"
                raise InputError(f"{what}: two tasks have the same outputs or none in common")
    return table


def check_named(task: object) -> None:
    """Raise unless it can name a task."""
    if isinstance(task, bool) or not isinstance(task, (int, str)):
        got = type(task).__name__
        raise InputError(f"a task is named by a whole number or a string, got {got}")
    if isinstance(task, int) and not -(2**63) <= task < 2**63:
        what = "a task is named by a number beyond 64 bits"
        raise InputError(f"{what}: choose a smaller number, or a string")


def check_method(
    name: str,
    options: Any,
    plan: Memory,
    classifies: bool,
    task_free: bool,
    tasks: Mapping[Name, tuple[int, ...]],
) -> None:
    """Raise unless the method makes sense for such a stream."""
    learner, policy = method(name).learner, plan.policy
    needs = learner.needs_with(options)
    what = ""
    if task_free and learner.needs.boundaries:
        free = {n: m for n, m in METHODS.items() if not m.learner.needs.boundaries}
        what = f"{name} needs task boundaries: for a task-free stream choose one of "
        what += ", ".join(name for name, found in free.items() if not found.joined)
    elif task_free and tasks:
        what = "a task-free stream has no tasks: give tasks or task_free, not both"
    elif learner.needs.own_classes and not (classifies and tasks):
        what = f"{name} needs to know the classes of each task: wrap with tasks=[[0, 1], [2, 3], …]"
        what += " and the cross-entropy"
    elif learner.needs.own_examples and plan != Memory():
        what = f"{name} keeps exemplars of its own, so it has no use for a memory: "
        what += "leave memory out, and say how many with exemplars="
    elif plan.held_out and not learner.needs.memory:
        what = f"{name} keeps no examples, so there are none to hold out for measuring: "
        what += "leave held_out out, or choose another method"
    elif learner.needs.own_examples and options.all_classes:
        what = f"leave all_classes out of {name} here: predict(x) answers among all classes seen "
        what += "so far, predict(x, task=…) among a task's"
    elif policy in ("class-balanced", "class-reservoir", "ring") and not classifies:
        what = f"the memory policy {policy} needs classes: use 'reservoir' with a loss of your own"
    elif task_free and policy in ("class-reservoir", "ring"):
        what = f"the memory policy {policy} is one a task: "
        what += "use 'class-balanced' or 'reservoir' for a task-free stream"
    elif needs.classes_unless and not classifies:
        what = f"{name} draws labels from the model's own prediction: "
        what += f"with a loss of your own choose {needs.classes_unless}"
    if what:
        raise InputError(what)


def check_whole(**numbers: object) -> None:
    """Raise unless these are whole numbers that fit: a seed of 64 bits, counts from 1."""
    for name, value in numbers.items():
        least = -(2**63) if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            of = "" if name == "seed" else " of batches above 0"
            raise InputError(f"{name} must be a whole number{of}, got {shown(value)}")


def read_path(path: object, what: str, kind: str = "file") -> Path:
    """The path of a file or folder, which need not be there."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise InputError(f"{what} must be the path of a {kind}, got {type(path).__name__}")
    if not name:
        raise InputError(f"{what} is empty: give the path of a {kind}")
    try:
        Path(name).resolve()
    except (OSError, RuntimeError, ValueError) as reason:
        # A loop of links, or a character that no name can have.
        why = f"{what} cannot be {shown(name)} ({first_line(reason)})"
        raise InputError(f"{why}: choose another place") from None
    return Path(name)


def read_autosave(path: object) -> Path | None:
    if path is None:
        return None
    found = read_path(path, "autosave")
    check_writable(found)
    return found


def make_place(autosave: Path | None) -> None:
    """Make the folder, now that nothing can be refused any more."""
    if autosave is not None:
        make_folder(resolved(autosave).parent)


@contextmanager
def refusing(what: str, then: str) -> Iterator[None]:
    """Whatever the user's own code raises inside becomes an `InputError` of one sentence."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as reason:
        why = first_line(reason)
        if "more than 1 value per channel" in why:  # torch does not say which part asks for what
            why = "batch-norm needs two examples at least: use larger batches, a larger "
            why += "reference_batch, or more memory for each task"
        raise InputError(f"{what} ({why}): {then}") from reason
