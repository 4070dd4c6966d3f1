"""Writing results: whole files or none."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from onepass.errors import InputError


def check_writable(path: Path) -> None:
    """Raise, before any work is done, if `path` cannot be written later."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if path.parent.is_file():
            raise NotADirectoryError(f"{path.parent} is not a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as reason:
        raise InputError(f"cannot write {path} ({reason.strerror or reason}): choose another place") from None


def write_json(path: Path, content: Any) -> None:
    """Write to a temporary name, flush, and rename: a reader sees the old file or the new one, never a part."""
    text = json.dumps(content, indent=1, default=_plain, allow_nan=False)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as reason:
        raise InputError(f"cannot write {path} ({reason.strerror or reason}): choose another place") from None


def _plain(value: Any) -> Any:
    """Arrays as nested lists, with null for NaN."""
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value] if value.ndim else None if np.isnan(value) else value.item()
    if isinstance(value, np.floating):
        return None if np.isnan(value) else value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
