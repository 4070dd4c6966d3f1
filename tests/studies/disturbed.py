"""A study in a process group of its own, which is going to be disturbed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from onepass.errors import InputError
from tests.commands import ONEPASS
from tests.processes import in_a_group
from tests.studies.stored import records_in


def start(folder: Path, command: str) -> subprocess.Popen[bytes]:
    """The command with this folder; what it prints goes to a log beside the folder."""
    words = [ONEPASS, *command.split(), "--out", str(folder)]
    with (folder.parent / "log").open("ab") as log:
        return in_a_group(words, log, log)


def stored(folder: Path) -> int:
    """How many records a study has that may not even have begun."""
    try:
        return len(records_in(folder))
    except InputError:
        return 0
