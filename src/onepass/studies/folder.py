"""The folder of a study: what belongs to it, and what may not be written to it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onepass.errors import InputError
from onepass.files import TEMPORARY, StorageError, check_writable, remove_if_abandoned, resolved
from onepass.studies.locking import LOCK

FILE = "study.sqlite"
PROGRESS = ".onepass-progress.json"  # written by the driving process once a second
ARRAYS = re.compile(r"[0-9a-f]{32}\.safetensors")
FLEET = re.compile(r"[0-9a-f]{16}")


def no_study(folder: Path) -> InputError:
    return InputError(
        f"there is no study in {folder}: start one with 'onepass run RECIPE --out {folder}'"
    )


def damaged(path: Path, why: str) -> StorageError:
    """The sentence for a file that is not what was written."""
    return StorageError(
        f"{path} cannot be used ({' '.join(why.split())}): put back a copy of it, or choose"
        " another folder and run the study again"
    )


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as reason:  # a name that is too long, a folder that may not be entered
        raise InputError(f"cannot read {path} ({reason.strerror}): choose another folder") from None


def check_target(path: Path, study: Path | None = None) -> None:
    """Raise if a table cannot be written to `path`, or if that would overwrite files of a study.

    `study` is the folder of a study that is begun only later.
    """
    found = resolved(path)
    later = None if study is None else resolved(study)
    if later is not None and later.is_relative_to(found):
        raise InputError(f"{path} is the folder of the study, or above it: choose another place")
    for place in (found, *found.parents):
        ours = place.name in (LOCK, PROGRESS, "arrays", "checkpoints")
        ours = ours or place.name.startswith((FILE, TEMPORARY))
        if ours and (os.path.lexists(place.parent / FILE) or place.parent == later):
            raise InputError(f"{path} belongs to a study: choose another place")
    check_writable(path)


def refuse_links(folder: Path) -> None:
    """Raise for links: in a study from elsewhere they could lead to files of the user's."""
    own = (folder / name for name in (FILE, LOCK, "arrays", "checkpoints"))
    for path in (*own, *_fleets(folder)):
        if os.path.islink(path):
            raise InputError(
                f"{path} is a link, and a study is written to no other place: put there what it"
                " leads to, or choose another folder"
            )


def remove_leftovers(folder: Path) -> None:
    """Remove files that a killed process had begun to write."""
    for place in (folder, folder / "arrays", *_fleets(folder)):
        for leftover in place.glob(f"{TEMPORARY}*"):
            remove_if_abandoned(leftover)


def _fleets(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoints/*") if FLEET.fullmatch(path.name)]
