"""Checkpoints: a fleet's snapshots on disk, so that a killed fleet goes on where it was.

A checkpoint is a pair of files: tensors (safetensors), and a small JSON file beside them that says
what they are and what they must hash to. Tensors are written first, both under temporary names that
are flushed and renamed, so a checkpoint exists whole or not at all. The last two are kept: where
the newest is damaged, the one before is used.
"""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from onepass.files import (
    MALFORMED,
    TEMPORARY,
    canonical,
    digest,
    header_is_short,
    make_folder,
    read_plain,
    remove_if_abandoned,
    write_here,
)
from onepass.protocol import Snapshot
from onepass.studies import schema
from onepass.studies.folder import FLEET
from onepass.studies.packing import memory
from onepass.studies.recovery import DamagedError

log = logging.getLogger(__name__)

NAME = re.compile(r"\d{4,}-\d{8,}\.(json|safetensors)")  # other files are not ours
FORMAT = 1
KEPT = 2
LARGEST_ABOUT = 2**24  # bytes of the small file; in memory it takes up to a hundred times as much
SHARE = 0.005  # of a fleet's time may go into checkpoints without `every`
PATIENCE = 5.0  # seconds before the first of them, whose cost is not known yet
LONG = 60.0  # seconds after which one is written in the middle of a task, too


class RefusedError(Exception):
    """Why a checkpoint is not used."""


class Checkpoints:
    """The checkpoints of one fleet, in a folder of their own.

    `identity` names the fleet's configuration and `software` what computes it; a checkpoint of
    another one is refused. One is written at every task end and, with `every`, after each `every`
    batches. Without `every`, one is written at task ends, and once per minute inside long tasks, as
    far as this takes less than half a percent of the time.
    """

    def __init__(
        self, folder: Path, identity: str, every: int | None = None, software: str = ""
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._every = every
        self._software = software
        self._wait = PATIENCE
        self._written = time.monotonic()
        self._sound: list[Path] = []  # what was read or written here

    def last(self) -> Snapshot | None:
        """The newest sound snapshot; newer ones that are refused are logged with the reason."""
        for path in self._newest_first():
            try:
                found = self._read(path)
                self._sound = [path]
                return found
            except RefusedError as reason:
                log.warning("checkpoint %s is not used: %s", path, reason)
        return None

    def due(self, batches: int, since: int) -> bool:
        if self._every is not None:
            return batches == 0 or batches // self._every > since // self._every
        wait = self._wait if batches == 0 else max(self._wait, LONG)
        return time.monotonic() - self._written >= wait

    def keep(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        make_folder(self._folder)
        path = self._folder / f"{snapshot.phase:04d}-{snapshot.batches:08d}.json"
        tensors = safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in snapshot.tensors.items()}
        )
        about: dict[str, Any] = {
            "format": FORMAT,
            "fleet": self._identity,
            "software": self._software,
            "phase": snapshot.phase,
            "batches": snapshot.batches,
            "numbers": snapshot.numbers,
            "tensors": digest(tensors),
        }
        write_here(path.with_suffix(".safetensors"), tensors)
        write_here(path, canonical(about | {"checksum": digest(canonical(about))}).encode())
        self._sound = [*(other for other in self._sound if other != path), path][-KEPT:]
        for old in self._newest_first():
            if old not in self._sound:
                for its in (old, old.with_suffix(".safetensors")):
                    with suppress(OSError):  # it is not there, or a folder
                        its.unlink()
        self._written = time.monotonic()
        self._wait = (self._written - began) / SHARE

    def discard(self) -> None:
        """Remove all of them: the fleet is finished."""
        _remove(self._folder)

    def _newest_first(self) -> list[Path]:
        return sorted(_ours(self._folder, ".json"), reverse=True)

    def _read(self, path: Path) -> Snapshot:
        try:
            about = json.loads(read_plain(path, LARGEST_ABOUT))
            checksum = about.pop("checksum")
            if checksum != digest(canonical(about)):
                raise RefusedError("it was altered")
            schema.check(schema.Checkpoint, path.name, about)
        except DamagedError as reason:
            raise RefusedError(str(reason)) from None
        except (OSError, *MALFORMED) as reason:
            raise RefusedError(f"{path.name} is damaged ({type(reason).__name__})") from None
        if about["format"] != FORMAT:
            raise RefusedError(f"its format is {about['format']}, not {FORMAT}")
        if about["fleet"] != self._identity:
            raise RefusedError("it belongs to another configuration")
        if about["software"] != self._software:
            raise RefusedError(
                f"it was made with {about['software']}, and this is {self._software}"
            )
        tensors = b""
        with suppress(OSError):
            tensors = read_plain(path.with_suffix(".safetensors"), memory("cpu") // 2)
        if digest(tensors) != about["tensors"]:
            name = path.with_suffix(".safetensors").name
            raise RefusedError(f"{name} is missing, truncated or altered")
        if not header_is_short(tensors):
            raise RefusedError("it has too many tensors")
        try:
            loaded = safetensors.torch.load(tensors)
        except (SafetensorError, RuntimeError, *MALFORMED) as reason:
            raise RefusedError(f"its tensors cannot be read ({reason})") from None
        return Snapshot(about["phase"], about["batches"], loaded, about["numbers"])


def fleets(folder: Path) -> list[Path]:
    """The folders in which fleets of a study keep their checkpoints."""
    return [
        path
        for path in folder.glob("*")
        if FLEET.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def any_in(folder: Path) -> bool:
    """Whether there are checkpoints of any fleet."""
    return any(_ours(fleet) for fleet in fleets(folder))


def discard_all(folder: Path) -> None:
    """Remove the checkpoints of all fleets, and their folders if nothing else is in them."""
    mine = fleets(folder)
    for fleet in mine:
        _remove(fleet)
        with suppress(OSError):  # it holds files of others
            fleet.rmdir()
    if mine:
        with suppress(OSError):
            folder.rmdir()


def _ours(folder: Path, ending: str = "") -> list[Path]:
    return [path for path in folder.glob(f"*{ending}") if NAME.fullmatch(path.name)]


def _remove(folder: Path) -> None:
    for path in _ours(folder):
        with suppress(OSError):
            path.unlink()
    for leftover in folder.glob(f"{TEMPORARY}*"):
        remove_if_abandoned(leftover)
