"""The arrays of a study: one safetensors file per fleet, named with the hash of its content."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from onepass.files import MALFORMED, digest, header_is_short, read_plain, write_here
from onepass.metrics import Record
from onepass.studies.folder import damaged
from onepass.studies.recovery import DamagedError
from onepass.studies.schema import TASKS

LARGEST = 2**28  # bytes: 256 runs of 17 tasks have two millions


class Arrays:
    """The folder `arrays` of a study; what was read is kept in memory."""

    def __init__(self, study: Path) -> None:
        self.folder = study / "arrays"
        self._read: dict[str, dict[str, NDArray[Any]]] = {}

    def of(self, unit: str, name: str) -> dict[str, NDArray[Any]]:
        """The arrays of one unit in the file `name`."""
        start = f"{unit}/"
        every = self._content(name).items()
        return {key.removeprefix(start): value for key, value in every if key.startswith(start)}

    def units(self, name: str) -> set[str]:
        """The units whose arrays are in a file."""
        return {key.partition("/")[0] for key in self._content(name)}

    def _content(self, name: str) -> dict[str, NDArray[Any]]:
        if name not in self._read:
            content = self.read(name)
            if not header_is_short(content):
                raise damaged(self.folder / name, "it has too many arrays")
            try:
                self._read[name] = safetensors.numpy.load(content)
            except (SafetensorError, *MALFORMED) as reason:
                why = str(reason) or type(reason).__name__
                raise damaged(self.folder / name, why) from None
        return self._read[name]

    def read(self, name: str) -> bytes:
        """The content of a file, which its name confirms."""
        path = self.folder / name
        try:
            content = read_plain(path, LARGEST)
        except OSError as reason:
            raise damaged(path, reason.strerror or str(reason)) from None
        if name != _name_of(content):
            raise damaged(path, "it was truncated or altered")
        return content

    def add(self, records: Mapping[str, Record]) -> str:
        """Write the arrays of some records, by unit; the name of the file."""
        arrays: dict[str, NDArray[Any]] = {}
        for unit, record in records.items():
            kept = ("accuracy", "initial", "curve", "memory_accuracy", "state_by_task")
            for key in kept:
                value = getattr(record, key)
                if value is not None:
                    arrays[f"{unit}/{key}"] = np.ascontiguousarray(value)
        content = safetensors.numpy.save(arrays)
        self.write(content)
        return _name_of(content)

    def write(self, content: bytes) -> None:
        write_here(self.folder / _name_of(content), content)

    def check_all_there(self, names: Iterable[str]) -> None:
        """Raise unless all of these files are there, whatever is in them."""
        try:
            there = set(os.listdir(self.folder))
        except OSError as reason:
            raise damaged(self.folder, reason.strerror or str(reason)) from None
        for name in names:
            if name not in there:
                raise damaged(self.folder / name, "it is not there")


def tasks_of(found: Mapping[str, NDArray[Any]], violations: Sequence[int] | None) -> int:
    """The number of tasks in the arrays of a record; raises unless they are what a run leaves."""
    for name in ("accuracy", "initial", "curve"):
        if name not in found:
            raise DamagedError(f"its '{name}' is missing")
    accuracy, curve = found["accuracy"], found["curve"]
    phases, tasks = accuracy.shape if accuracy.ndim == 2 else (0, 0)
    if not 0 < tasks <= TASKS or phases not in (1, tasks):
        raise DamagedError(f"its 'accuracy' has the shape {accuracy.shape}")
    shapes = {"accuracy": (phases, tasks), "initial": (tasks,), "memory_accuracy": (tasks, tasks)}
    for name, array in found.items():
        if name in shapes and array.shape != shapes[name]:
            raise DamagedError(f"its '{name}' has the shape {array.shape}, not {shapes[name]}")
        if name in ("curve", *shapes) and not _are_accuracies(array):
            raise DamagedError(f"its '{name}' has values that are no accuracies")
    if curve.ndim != 2 or len(curve) not in (0, tasks):
        raise DamagedError(f"its 'curve' has the shape {curve.shape}")
    grown = found.get("state_by_task", np.zeros(1, np.int64))
    several = grown.ndim == 1 and 0 < len(grown) <= TASKS
    if not several or grown.dtype != np.int64 or grown.min() < 0:
        raise DamagedError("its 'state_by_task' are no sizes")
    missing = np.isnan(accuracy).any(axis=1)
    # After the first row that is missing every run had diverged.
    reached = int(missing.argmax()) if missing.any() else phases
    if violations is not None and len(violations) < reached:
        raise DamagedError(f"it has violations of {len(violations)} tasks, not of {reached}")
    return int(tasks)


def _are_accuracies(array: NDArray[Any]) -> bool:
    return array.dtype == np.float64 and bool(((array >= 0) & (array <= 1) | np.isnan(array)).all())


def _name_of(content: bytes) -> str:
    return f"{digest(content)[:32]}.safetensors"
