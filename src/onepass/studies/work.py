"""What a worker does, on whatever machine: train one fleet."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from onepass.errors import InputError, first_line, is_out_of_memory
from onepass.learners import method
from onepass.metrics import Record
from onepass.protocol import Run, train
from onepass.streams import stream
from onepass.streams.base import Part, Stream
from onepass.studies import fetch
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.folder import FILE
from onepass.studies.provenance import provenance, software
from onepass.studies.recipe import Recipe
from onepass.studies.store import Provenance, Unit, fleet_name

log = logging.getLogger(__name__)

# Seconds of waiting for a GPU: until that is logged, until it is repeated, and in all.
SOON, AGAIN, LONGEST = 5.0, 600.0, 86400.0

# In a process: building a model sets the random seed of the process for a moment.
_one_fleet_at_a_time = threading.Lock()


class OutOfMemoryError(Exception):
    """A fleet did not fit."""


@dataclass(frozen=True)
class Job:
    """One fleet: some runs of a method on a part of the stream, with all that a worker needs."""

    recipe: Recipe
    method: str
    part: Part
    units: tuple[Unit, ...]
    data: str | None
    device: str
    folder: str | None = None  # of the study, where checkpoints go; None: none are written
    checkpoint_every: int | None = None

    @property
    def name(self) -> str:
        return fleet_name([unit.id for unit in self.units])

    def checkpoints(self) -> Checkpoints | None:
        """Where this fleet's checkpoints are, if the study's folder is in reach."""
        if self.folder is None or not (Path(self.folder) / FILE).is_file():
            return None
        # On a GPU rows of theta are padded.
        made_with = software() + (" on a GPU" if self.device.startswith("cuda") else "")
        folder = Path(self.folder) / "checkpoints" / self.name
        return Checkpoints(folder, self.name, self.checkpoint_every, made_with)


def work(
    job: Job, progress: Callable[[int], None] | None = None
) -> tuple[list[Record], Provenance]:
    """Train one fleet; return its records, in the order of its units, and their provenance."""
    with _one_fleet_at_a_time, _device(job.device, progress) as device:
        too_much = ""
        try:
            records = train(
                open_stream(job.recipe, job.data),
                job.part,
                method(job.method),
                [Run(unit.seed, unit.hyperparameters) for unit in job.units],
                job.recipe.setup(),
                job.recipe.method_options(job.method),
                device=device,
                progress=progress,
                keeper=job.checkpoints(),
            )
        except (MemoryError, RuntimeError) as reason:
            if not is_out_of_memory(reason):
                raise
            too_much = first_line(reason)
        finally:
            if device.startswith("cuda"):
                gc.collect()
                torch.cuda.empty_cache()  # the next fleet may be another process's
        # Not raised where it was caught: that error keeps everything alive that was in memory.
        if too_much:
            raise OutOfMemoryError(too_much)
        return records, provenance(device)


def open_stream(recipe: Recipe, data: str | None) -> Stream:
    """The stream of a recipe.

    If `data` is a folder of another machine, the data are searched for on this one.
    """
    needed = stream(recipe.stream).data
    if needed is not None and (data is None or not Path(data).is_dir()):
        data = fetch.locate(needed, None)
    return _cached_stream(recipe.stream, recipe.make_stream_options(), data)


@lru_cache(maxsize=1)
def _cached_stream(name: str, options: Any, data: str | None) -> Stream:
    return stream(name).make(options, data)


@contextmanager
def _device(device: str, progress: Callable[[int], None] | None) -> Iterator[str]:
    """The device to train on; of GPUs, the first one that is free.

    All processes of the machine together train one fleet per GPU at a time.
    """
    if device != "cuda":
        yield device
        return
    handles = [
        os.open(_lock_file(number), os.O_RDWR | os.O_CREAT, 0o666)
        for number in range(torch.cuda.device_count())
    ]
    try:
        yield f"cuda:{_first_free(handles, progress)}"
    finally:
        for handle in handles:
            os.close(handle)


def _lock_file(number: int) -> Path:
    device = torch.cuda.get_device_properties(number).uuid
    return Path(tempfile.gettempdir()) / f"onepass-{os.getuid()}-{device}.lock"


def _first_free(handles: list[int], progress: Callable[[int], None] | None = None) -> int:
    """The number of the first file that can be locked; logs what it waits for while none can."""
    began = time.monotonic()
    said = began + SOON - AGAIN
    while True:
        for number, handle in enumerate(handles):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return number
        now = time.monotonic()
        if now - said > AGAIN:
            log.warning(
                "waiting for a GPU: all are in use by other fleets (process %s)", _holders(handles)
            )
            said = now
        if now - began > LONGEST:
            hours = f"{LONGEST / 3600:.0f} hours"
            raise InputError(
                f"no GPU became free within {hours} (in use by process {_holders(handles)}): end"
                " what uses them, or try later"
            )
        if progress is not None:
            progress(0)  # which raises if the driver was interrupted
        time.sleep(0.1)


def _holders(handles: list[int]) -> str:
    return ", ".join(map(_holder, handles))


def _holder(handle: int) -> str:
    """The process that has locked a file, where the system shows it."""
    with suppress(OSError):
        inode = str(os.fstat(handle).st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            kind, pid, place = (line.split()[number] for number in (1, 4, 5))
            if kind == "FLOCK" and place.rpartition(":")[2] == inode:
                return pid
    return "unknown"
