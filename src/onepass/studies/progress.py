"""A small file by which the driving process tells `onepass status` what it does.

It is a view, not a result: nothing depends on it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onepass.errors import InputError
from onepass.files import MALFORMED, canonical, read_plain, write_here
from onepass.studies.folder import PROGRESS

EVERY = 1.0  # seconds between two writes
LARGEST = 2**24  # bytes: a study may have 100 000 units


@dataclass(frozen=True)
class Progress:
    """The seconds that are left, if known, and the method of every unit in training."""

    left: float | None
    running: Mapping[str, str]


def read_progress(folder: Path) -> Progress | None:
    """What the driving process of the study in a folder wrote last, if anything."""
    try:
        found = json.loads(read_plain(folder / PROGRESS, LARGEST))
        units = {str(unit): str(name) for unit, name in found["running"].items()}
        left = None if found["left"] is None else float(found["left"])
    except (OSError, *MALFORMED):  # without the view less is known
        return None
    return Progress(left if left is not None and math.isfinite(left) else None, units)


class ProgressFile:
    """Writes the file, once a second at most."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        self._written = time.time()

    def show(self, progress: Progress) -> None:
        if time.time() - self._written < EVERY:
            return
        self._written = time.time()
        content = {"left": progress.left, "running": dict(progress.running)}
        with suppress(InputError):
            write_here(self._path, canonical(content).encode())

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
