"""Standard output and standard error of a command: neither encodings nor closed or full ones end it with a traceback.

What is printed on standard error is a view, which is not worth a study: trouble with it is ignored.
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
            f"cannot write to standard output ({reason.strerror or reason}): make room, or direct it to another place"
        )
        self.closed = (
            reason.errno == errno.EPIPE
        )  # by a reader that has seen enough, such as `head`


def _replacement(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a file's name as they are, and a question mark for a character that the encoding does not have."""
    with suppress(UnicodeError):
        return codecs.lookup_error("surrogateescape")(error)
    assert isinstance(error, UnicodeEncodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("onepass", _replacement)


class _Stream:
    """A stream whose trouble is an `OutputError`, or nothing at all."""

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
        """Let what cannot be written go nowhere, or Python would complain about it when it ends."""
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
    """Give the numbers of standard streams that are closed to nothing, or the next file that is opened would be written to by mistake."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def forget_odd_sizes() -> None:
    """A terminal has the size that it has, unless `COLUMNS` and `LINES` name a possible one."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name, "")
        possible = (
            value.isascii()
            and value.isdecimal()
            and len(value) <= len(str(WIDEST))
            and int(value) > 0
        )
        if value and not (possible and (name == "LINES" or int(value) >= NARROWEST)):
            del os.environ[name]
