"""Writing files completely or not at all, and reading plain files up to a limit."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onepass.errors import InputError
from onepass.interrupts import Opened
from onepass.special_files import is_device, pour

LONGEST_HEADER = 2**22  # bytes: a fleet has some thousand tensors
TEMPORARY = ".onepass-partial-"  # the names of unfinished files begin so, and only theirs
# What a parser raises for content that it does not expect.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"[0-9a-f]{16}(-[0-9a-f]{16})?")


class StorageError(InputError):
    """Something could not be written or read back; the message says what, why, and what to do."""


def cannot_write(path: Path, reason: Exception) -> StorageError:
    why = getattr(reason, "strerror", None) or str(reason)
    return StorageError(
        f"cannot write {path} ({why}): make room or choose another place, and give the same"
        " command again; what is finished is kept"
    )


def check_writable(path: Path) -> None:
    """Raise, before any work is done, if `path` cannot be written later. Nothing is made."""
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
        while not folder.exists():
            folder = folder.parent
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


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder; after an error inside, the folders that were made are removed if empty."""
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        make_folder(path)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def write(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush, and rename.

    So a reader sees the old file or the new one, never a part, even after a power cut. A file that
    is replaced hands on its mode and, where possible, its owner; a new one obeys the umask. A link
    is followed, and what is no plain file (a pipe, a device) is simply written to.
    """
    try:
        if is_device(path):
            with Opened():  # a pipe may never be read
                pour(path, content)
        else:
            write_here(resolved(path), content)
    except OSError as reason:
        raise cannot_write(path, reason) from None


def write_out(path: Path, content: bytes) -> None:
    """Write as `write` does, and make the folder."""
    make_folder(resolved(path).parent)
    write(path, content)


def write_here(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write as `write` does, but replace what has this name: a link leads to files of others.

    A new file has the `mode`, less what the umask removes.
    """
    try:
        before = path.stat() if path.is_file() and not path.is_symlink() else None
        handle, temporary = _begin(path, mode if before is None else 0o600)
        with os.fdopen(handle, "wb") as file:
            try:
                file.write(content)
                file.flush()
                if before is not None:
                    _hand_on(before, handle)
                os.fsync(handle)
                os.replace(temporary, path)
            except BaseException:
                if _is_at(handle, temporary):
                    os.unlink(temporary)
                raise
        _flush_folder(path.parent)
    except OSError as reason:
        raise cannot_write(path, reason) from None


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to read from, or raise an OSError: a pipe or a device may have no end.

    Opening a pipe would wait for a writer, and opening a device may change it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_plain(path: Path, most: int) -> bytes:
    """Return the content of a plain file of at most `most` bytes, or raise an OSError."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, "it is too large")
        return file.read(size)


def header_is_short(content: bytes) -> bool:
    """Whether the header of a safetensors file is short: parsing it takes thirty times its size."""
    return int.from_bytes(content[:8], "little") <= LONGEST_HEADER


def resolved(path: Path) -> Path:
    """The path without links; raises for links that lead nowhere."""
    try:
        return path.resolve()
    except RuntimeError:  # what Python 3.11 makes of a loop
        raise InputError(
            f"cannot follow {path} (its links lead in a circle): choose another place"
        ) from None
    except (OSError, ValueError) as reason:
        why = getattr(reason, "strerror", None) or reason
        raise InputError(f"cannot follow {path} ({why}): choose another place") from None


def _begin(path: Path, mode: int) -> tuple[int, Path]:
    """A new file for the content of `path`, which only this process writes.

    Its name depends on the target and this machine, so what a killed process has left there is
    found without listing the folder, and removed. While a file is being written it is locked:
    another process that writes to the same target takes a random name.
    """
    name = temporary_name(path.name)
    first, second = path.with_name(name), path.with_name(f"{name}-{secrets.token_hex(8)}")
    remove_if_abandoned(first)
    with suppress(FileExistsError):
        handle = _create(first, mode)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # taken for a leftover in this moment, and removed
            os.close(handle)
            return _create(second, mode), second
        except OSError:  # this file system cannot lock: then no leftover is ever removed
            return handle, first
        if _is_at(handle, first):
            return handle, first
        os.close(handle)
    return _create(second, mode), second


def temporary_name(name: str) -> str:
    """The name of an unfinished file, made from this machine and the target.

    The machine's locks show whether the process that writes it has ended.
    """
    return f"{TEMPORARY}{digest(platform.node())[:8]}{digest(os.fsencode(name))[:8]}"


def _create(path: Path, mode: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def remove_if_abandoned(path: Path) -> None:
    """Remove an unfinished file of onepass whose process has ended; if in doubt, it stays."""
    if not _UNFINISHED.fullmatch(path.name) or not path.name.startswith(temporary_name("")[:-8]):
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                path.unlink()
    except OSError:  # another process is writing it, or this file system cannot lock
        pass
    finally:
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


def _hand_on(before: os.stat_result, handle: int) -> None:
    """Give a file the owner and mode of the one it replaces.

    What its group may do is for that group only.
    """
    mode, now = stat.S_IMODE(before.st_mode), os.fstat(handle)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        for owner, group in ((before.st_uid, before.st_gid), (-1, before.st_gid)):
            with suppress(OSError):
                os.fchown(handle, owner, group)
                break
        now = os.fstat(handle)
    kept = (now.st_uid, now.st_gid) == (before.st_uid, before.st_gid)
    os.fchmod(handle, mode if kept else mode & (0o777 if now.st_gid == before.st_gid else 0o707))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON: arrays as nested lists, null for what is no finite number."""
    write_out(path, (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode())


def canonical(content: Any) -> str:
    """The one JSON text of a value: what hashes are made of.

    >>> canonical({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON can have it: null for NaN, lists for arrays and tuples.

    >>> _plain({"a": np.array([1.5, np.nan]), "b": (float("inf"), 1)})
    {'a': [1.5, None], 'b': [None, 1]}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
