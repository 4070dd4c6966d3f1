"""Where a command's tables go: files that the user names, and the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from onepass.errors import InputError
from onepass.special_files import is_device
from onepass.studies.folder import check_target


def check_targets(*targets: Path | None, study: Path | None = None) -> None:
    """Raise if a table cannot be written to one of these files, or would overwrite a study."""
    given = [target for target in targets if target is not None]
    for target in given:
        check_target(target, study)
    if len(given) > len({os.path.realpath(target) for target in given}) and not is_device(given[0]):
        raise InputError(f"{given[0]} cannot take two tables: choose two files")


def hand_out(*ways: Callable[[], None] | None) -> None:
    """Call all of them, and only then raise the error of the first that failed.

    A full disk must not prevent the printed table, nor a full standard output the file.
    """
    trouble: list[InputError] = []
    for way in filter(None, ways):
        try:
            way()
        except InputError as reason:
            trouble.append(reason)
    if trouble:
        raise trouble[0]
