"""Standard output and standard error of a command.

No encoding, closed stream or full disk ends it with a traceback. What is printed on standard error
is only a view: errors in writing it are ignored.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from onepass.errors import InputError

NARROWEST, WIDEST = 20, 9999  # columns that a table or a help text can be fitted into


class OutputError(InputError):
    """Standard output takes nothing more."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(
            f"cannot write to standard output ({reason.strerror or reason}): make room, or direct"
            " it to another place"
        )
        self.closed = reason.errno == errno.EPIPE  # by a reader such as `head`


def _replacement(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a file's name as they are; "?" for a character that the encoding lacks."""
    with suppress(UnicodeError):
        return codecs.lookup_error("surrogateescape")(error)
    assert isinstance(error, UnicodeEncodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("onepass", _replacement)


class _Stream:
    """A stream whose errors are `OutputError`s, or ignored if it is `quiet`."""

    def __init__(self, stream: Any, quiet: bool) -> None:
        self._stream, self._quiet = stream, quiet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._trouble():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._trouble():
            self._stream.flush()

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as reason:
            if not self._quiet:
                raise OutputError(reason) from None

    def end(self) -> None:
        """Discard what cannot be written; else Python reports it when it ends."""
        try:
            self._stream.flush()
        except OSError:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def guarded() -> Iterator[None]:
    """Standard output and standard error as described above, for as long as a command runs."""
    before = sys.stdout, sys.stderr
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="onepass")
    streams = [
        stream and _Stream(stream, quiet)
        for stream, quiet in zip(before, (False, True), strict=True)
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in filter(None, streams):
            stream.end()


def open_closed_streams() -> None:
    """Open the null device for standard streams that are closed.

    Otherwise the next file that is opened gets such a stream's number, and what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def forget_odd_sizes() -> None:
    """Ignore `COLUMNS` and `LINES` where they name no possible size of a terminal."""
    for name, least in (("COLUMNS", NARROWEST), ("LINES", 1)):
        value = os.environ.get(name, "")
        number = value.isascii() and value.isdecimal() and len(value) <= len(str(WIDEST))
        if value and not (number and int(value) >= least):
            del os.environ[name]
