"""Writing files: whole ones or none."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onepass.devices import is_device, pour
from onepass.errors import InputError

TEMPORARY = ".partial-"  # how the names of unfinished files begin


class StorageError(InputError):
    """Something could not be written or read back; the message says what, why, and what to do."""


def cannot_write(path: Path, reason: Exception) -> StorageError:
    why = getattr(reason, "strerror", None) or str(reason)
    return StorageError(f"cannot write {path} ({why}): make room or choose another place, and give the same command again; what is finished is kept")


def check_writable(path: Path) -> None:
    """Raise, before any work is done, if `path` cannot be written later."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        for parent in path.parents:
            if parent.is_file():
                raise NotADirectoryError(f"{parent} is not a folder")
        with suppress(FileNotFoundError):
            os.stat(path)  # a link to itself, or a name that no file can have
        if is_device(path):
            return
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise InputError(f"cannot write {path} ({why}): choose another place") from None


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise cannot_write(path, reason) from None


def write(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush, and rename: a reader sees the old file or the new one, never a part, even after a power cut.

    A link is followed, and what is no plain file (a pipe, a device) is simply written to.
    """
    try:
        if is_device(path):
            pour(path, content)
            return
        path = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _flush_folder(path.parent)
    except OSError as reason:
        raise cannot_write(path, reason) from None


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Indented JSON, with arrays as nested lists and null for NaN."""
    write(path, (json.dumps(content, indent=1, default=_plain, allow_nan=False) + "\n").encode())


def canonical(content: Any) -> str:
    """The one JSON text of a value: what hashes are made of.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(part) for part in value] if value.ndim else None if np.isnan(value) else value.item()
    if isinstance(value, np.floating):
        return None if np.isnan(value) else value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
