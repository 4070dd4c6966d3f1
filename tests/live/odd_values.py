"""Values that no argument was meant for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Unequal:
    """It cannot be compared or hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


class Unseen:
    """It can be neither shown nor tested for truth."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def odd_values(folder: Path) -> dict[str, Any]:
    """By name; paths among them lie in an empty folder."""
    loop = folder / "loop"
    loop.symlink_to(loop)
    itself: list[Any] = []
    itself.append(itself)
    return {
        "empty list": [],
        "empty dictionary": {},
        "empty tuple": (),
        "None": None,
        "object": object(),
        "nan": math.nan,
        "inf": math.inf,
        "-1": -1,
        "0": 0,
        "2**80": 2**80,
        "5001 digits": 10**5000,
        "long word": "x" * 5000,
        "empty word": "",
        "word": "abc",
        "two lines": "a\nb",
        "NUL": "a\0b",
        "half a character": "\udcff",
        "bytes": b"",
        "complex": 1j,
        "True": True,
        "False": False,
        "type": int,
        "function": lambda: 0,
        "generator": (i for i in [1]),
        "range": range(3),
        "set": {1},
        "nested lists": [[[0]]],
        "list of itself": itself,
        "far classes": [[2**62, 2**63]],
        "sparse classes": {"a": [0, 3 * 10**6]},
        "unlike names": {"a": Unseen()},
        "NumPy float": np.float64(0.5),
        "NumPy int": np.int64(3),
        "NumPy bool": np.bool_(True),
        "array": np.array([1, 2]),
        "matrix": np.ones((2, 2)),
        "tensor": torch.tensor([1.0, 2.0]),
        "tensor of one": torch.tensor(1),
        "dtype": torch.float32,
        "cannot be compared": Unequal(),
        "cannot be shown": Unseen(),
        "loop of links": str(loop),
        "in a loop of links": loop / "file",
        "folder": folder,
        "no such place": "/proc/nowhere/file",
    }


class Marked(torch.Tensor):
    """A tensor of a class of its own that holds its values itself."""
