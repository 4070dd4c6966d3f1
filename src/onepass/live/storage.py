"""Where the examples of a memory lie: in main memory, on a device, or in a mapped file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.errors import InputError, first_line


class Storage:
    """Columns `[rows, …]`, one row per example.

    `folder` keeps them in files, which vanish with the process. `limit` rows are taken at once, if
    given: what is not used yet costs address space, not memory, except on a GPU. A process that was
    forked shares the files with its parent: it is refused, since one would write into the other's
    examples.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        device: torch.device,
        folder: Path | None,
        limit: int | None,
    ) -> None:
        self._device, self._folder = device, folder
        self._kinds = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in like.items()}
        self._process = os.getpid()
        self._columns: dict[str, Tensor] = {name: self._room(0, name) for name in self._kinds}
        self.rows = 0
        if limit is not None:
            self.reserve(limit)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    @property
    def columns(self) -> dict[str, Tensor]:
        self.check_process()
        return self._columns

    def check_process(self) -> None:
        """Raise in a process that shares its files with the one that made them."""
        if self._folder is not None and os.getpid() != self._process:
            owner = f"process {self._process}, from which this one was forked"
            how = "save the learner there, and load it here"
            raise InputError(f"the memory in {self._folder} belongs to {owner}: {how}")

    def _room(self, rows: int, name: str) -> Tensor:
        dtype, shape = self._kinds[name]
        size = rows * shape.numel() * dtype.itemsize
        what, fewer = f"cannot keep {size} bytes", "give the memory fewer examples or bytes"
        if size >= 2**62:
            raise InputError(f"{what} of examples: {fewer}")
        if self._folder is None or size == 0:
            try:
                return torch.empty(rows, *shape, dtype=dtype, device=self._device)
            except torch.OutOfMemoryError:  # of a GPU, which every other step may raise too
                raise
            except (RuntimeError, MemoryError):
                raise InputError(f"{what} of examples in main memory: {fewer}") from None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # A full disk is an error now, not a crash when a page is first written.
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
        except (OSError, MemoryError) as reason:
            why = getattr(reason, "strerror", None) or first_line(reason)
            how = "make room, or choose another folder"
            raise InputError(f"{what} in {self._folder} ({why}): {how}") from None
        return torch.from_numpy(mapped).view(dtype).view(rows, *shape)

    def reserve(self, rows: int) -> None:
        """Make room for at least this many rows, or for none at all."""
        if rows <= self.rows:
            return
        old, new = self.columns, {name: self._room(rows, name) for name in self._kinds}
        for name, column in new.items():
            column[: self.rows] = old[name]
        self._columns, self.rows = new, rows

    def write(self, rows: list[int], values: Mapping[str, Tensor], places: list[int]) -> None:
        """Row `rows[i]` becomes example `places[i]` of `values`."""
        target, source = torch.tensor(rows), torch.tensor(places)
        for name, column in self.columns.items():
            value = values[name].index_select(0, source.to(values[name].device))
            column.index_copy_(0, target.to(column.device), value.to(column.device))

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for column in self.columns.values():
            column[target] = column[source]

    def first(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """The first rows, on a device: not copied if they are there, so not to be kept."""
        return {name: column[:count].to(device) for name, column in self.columns.items()}

    def take(self, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Some rows, as copies on a device."""
        columns = self.columns.items()
        return {n: one.index_select(0, rows.to(one.device)).to(device) for n, one in columns}


def columns_of(batch: Batch) -> dict[str, Tensor]:
    extra = {name: tensor[0] for name, tensor in batch.extra.items()}
    return {"x": batch.x[0], "slots": batch.slots[0], **extra}


def batch_of(values: dict[str, Tensor]) -> Batch:
    extra = {name: tensor[None] for name, tensor in values.items() if name not in ("x", "slots")}
    return Batch(values["x"][None], values["slots"][None], extra=extra)
