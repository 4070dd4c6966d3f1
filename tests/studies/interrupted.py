"""Runs that are killed right after a checkpoint, and a folder of two checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onepass.files import canonical, digest
from onepass.learners import METHODS
from onepass.metrics import Record
from onepass.protocol import Setup, Snapshot, train
from onepass.studies.checkpoint import Checkpoints
from tests.toys import ToyStream
from tests.training import runs

SETUP = Setup(hidden=(8,), memory_per_task=6)


class StopHereError(Exception):
    pass


class Interrupting(Checkpoints):
    """Checkpoints that kill the run right after one of them was written."""

    def __init__(self, folder: Path, every: int, after: int) -> None:
        super().__init__(folder, "fleet", every)
        self._left = after

    def keep(self, snapshot: Snapshot) -> None:
        super().keep(snapshot)
        self._left -= 1
        if self._left == 0:
            raise StopHereError


def learn(
    name: str,
    keeper: Checkpoints | None,
    count: int = 3,
    ragged: bool = True,
    setup: Setup = SETUP,
    options: Any = None,
    device: str = "cpu",
) -> list[Record]:
    stream, method = ToyStream(ragged), METHODS[name]
    rows = runs(method, count, rate=0.2)
    return train(stream, "ev", method, rows, setup, options, keeper=keeper, device=device)


def assert_same(found: list[Record], expected: list[Record]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.same_as(other)
        assert one.state_bytes == other.state_bytes


TENSORS = {"theta": torch.arange(12.0).view(3, 4), "alive": torch.tensor([True, False])}
SNAPSHOT = Snapshot(1, 4, TENSORS, {"seconds": 0.1})


def two(folder: Path) -> Checkpoints:
    """A folder with two checkpoints, after batches 4 and 8."""
    keeper = Checkpoints(folder, "fleet")
    keeper.keep(SNAPSHOT)
    keeper.keep(replace(SNAPSHOT, batches=8))
    return keeper


def rewrite(folder: Path, **changes: object) -> None:
    """Change what the newest checkpoint says of itself, with the right checksum."""
    path = folder / "0001-00000008.json"
    about = json.loads(path.read_text()) | changes
    del about["checksum"]
    path.write_text(canonical(about | {"checksum": digest(canonical(about))}))
