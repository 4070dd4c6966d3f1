"""Writing to what is no plain file: pipes, devices, and streams by names such as `/dev/stdout`."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from pathlib import Path

PATIENCE = 60.0  # seconds that a pipe may be without a reader
_NAMES = {"/dev/stdout": 1, "/dev/stderr": 2}


def is_device(path: Path) -> bool:
    """Whether `path` is to be written to as it is, not replaced by another file."""
    return os.path.exists(path) and (_descriptor(path) is not None or not os.path.isfile(path))


def pour(path: Path, content: bytes) -> None:
    """Write all of `content` to what is no plain file."""
    with os.fdopen(_opened(path), "wb") as file:
        file.write(content)


def _descriptor(path: Path) -> int | None:
    """The number of an open file that a path names.

    Such a file must not be opened anew: a plain file would be overwritten from its beginning.
    """
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", str(path))
    return int(found[1]) if found else _NAMES.get(str(path))


def _opened(path: Path) -> int:
    number = _descriptor(path)
    if number is not None:
        if number == 1 and sys.stdout is not None:
            sys.stdout.flush()
        return os.dup(number)
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as reason:
            if reason.errno != errno.ENXIO:
                raise
            if time.monotonic() > patience:
                raise OSError(errno.ENXIO, "nothing reads from it") from None
            time.sleep(0.05)
    os.set_blocking(handle, True)
    return handle
