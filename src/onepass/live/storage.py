"""Where the examples of an episodic memory lie: in main memory, on the device of the module, or in a file that is mapped into memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onepass.errors import InputError
from onepass.streams.batch import Batch


class Storage:
    """Columns `[rows, …]`, a row an example. `folder` keeps them in files there, which vanish with the process.

    `limit` rows are taken at once, if given: what is not used yet costs address space, not memory, except on a GPU.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device, folder: Path | None, limit: int | None) -> None:
        self._device, self._folder = device, folder
        self._kinds = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in like.items()}
        self.columns: dict[str, Tensor] = {name: self._room(0, name) for name in self._kinds}
        self.rows = 0
        if limit is not None:
            self.reserve(limit)

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def _room(self, rows: int, name: str) -> Tensor:
        dtype, shape = self._kinds[name]
        size = rows * shape.numel() * dtype.itemsize
        if self._folder is None or size == 0:
            return torch.empty(rows, *shape, dtype=dtype, device=self._device)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a crash when a page is first written
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
        except OSError as reason:
            raise InputError(
                f"cannot keep {size} bytes in {self._folder} ({reason.strerror or reason}): make room, or choose another folder"
            ) from None
        return torch.from_numpy(mapped).view(dtype).view(rows, *shape)

    def reserve(self, rows: int) -> None:
        """Make room for at least so many rows."""
        if rows <= self.rows:
            return
        for name, old in self.columns.items():
            self.columns[name] = self._room(rows, name)
            self.columns[name][: self.rows] = old
        self.rows = rows

    def write(self, rows: list[int], values: Mapping[str, Tensor], places: list[int]) -> None:
        """Row `rows[i]` becomes example `places[i]` of `values`."""
        target, source = torch.tensor(rows), torch.tensor(places)
        for name, column in self.columns.items():
            value = values[name]
            column.index_copy_(0, target.to(column.device), value.index_select(0, source.to(value.device)).to(column.device))

    def first(self, count: int, device: torch.device) -> dict[str, Tensor]:
        """The first rows, on a device: not copied if they are there, so not to be kept."""
        return {name: column[:count].to(device) for name, column in self.columns.items()}

    def take(self, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Some rows, as copies on a device."""
        return {name: column.index_select(0, rows.to(column.device)).to(device) for name, column in self.columns.items()}


def columns_of(batch: Batch) -> dict[str, Tensor]:
    return {"x": batch.x[0], "slots": batch.slots[0], **{name: tensor[0] for name, tensor in batch.extra.items()}}


def batch_of(values: dict[str, Tensor]) -> Batch:
    extra = {name: tensor[None] for name, tensor in values.items() if name not in ("x", "slots")}
    return Batch(values["x"][None], values["slots"][None], extra=extra)
