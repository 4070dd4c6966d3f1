"""What other processes do to the file of a study while this one writes to it."""

from __future__ import annotations

import itertools
import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from onepass.errors import InputError
from onepass.files import StorageError, write_here


class ChangeDetector:
    """Detects that another process wrote to, removed or replaced the file that is open here."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._identity = path.stat()
        self._version = self._data_version()
        self._saved_as: Path | None = None

    def begin(self) -> None:
        """Begin a transaction, or raise if another process has written since the opening."""
        if not self._is_there():
            # SQLite would take a journal for one of the file that is there now.
            self._connection.execute("PRAGMA journal_mode = MEMORY")
        self._connection.execute("BEGIN IMMEDIATE")
        if self._data_version() != self._version:
            raise InputError(
                f"another process has written to the study in {self._path.parent}, so this one"
                " stops and changes nothing more: let one process at a time work on it, and give"
                " the same command again"
            )

    def check(self) -> None:
        """Raise if the file was removed or replaced; its contents are saved before."""
        if self._is_there():
            return
        if not self._path.parent.exists():
            raise InputError(
                f"the folder {self._path.parent} was removed or moved while the study ran: if it"
                " was moved, what is finished is in it; give the same command with its new place"
            )
        if self._saved_as is None:
            self._saved_as = self._free_name() if self._path.exists() else self._path
        try:
            mode = stat.S_IMODE(self._identity.st_mode)
            write_here(self._saved_as, self._connection.serialize(), mode)
            what = f"all that is finished was saved as {self._saved_as}"
        except (StorageError, sqlite3.Error):
            what = "what was finished could not be saved"
        go_on = "look which of the two files you want to go on with"
        if self._saved_as == self._path:
            go_on = "give the same command again to go on"
        raise InputError(
            f"{self._path} was removed or replaced while the study ran; {what}: {go_on}"
        )

    def _data_version(self) -> int:
        """A number that changes when another connection has changed the file."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _is_there(self) -> bool:
        with suppress(OSError):
            now = self._path.stat()
            if os.path.samestat(self._identity, now):
                self._identity = now  # its mode may have changed
                return True
        return False

    def _free_name(self) -> Path:
        ends = itertools.chain(["kept"], (f"kept-{number}" for number in itertools.count(2)))
        names = (self._path.with_name(f"{self._path.name}.{end}") for end in ends)
        return next(name for name in names if not os.path.lexists(name))
