"""Short training runs on the digits, comparisons of where they end, and unusual methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners import Method
from onepass.learners.declarations import Capture
from onepass.learners.van import Van
from onepass.metrics import Record
from onepass.protocol import Run, Setup, Snapshot
from onepass.streams.base import Stream
from tests.toys import shipped

SETUP = Setup(hidden=(12, 12), memory_per_task=8, batch_size=2, tf32=False)
RESIDUAL = Setup(network="resnet18-reduced", memory_per_task=6, batch_size=5, tf32=False)
STREAM = {"icarl": "split-digits"}  # which needs classes of its own


def runs(method: Method, seeds: int = 3, rate: float = 0.1) -> list[Run]:
    chosen = dict.fromkeys(method.hyperparameters, 0.5) | {"learning_rate": rate}
    return [Run(seed, chosen) for seed in range(seeds)]


def digits(name: str, examples: int = 200) -> Stream:
    return shipped(name, train_examples=examples, test_examples=60)


def same(one: list[Record], other: list[Record], tolerance: float = 0.0) -> None:
    for a, b in zip(one, other, strict=True):
        for name in ("accuracy", "initial", "curve"):
            mine, theirs = (torch.as_tensor(getattr(r, name)) for r in (a, b))
            assert torch.allclose(mine, theirs, atol=tolerance, equal_nan=True)
        assert a.violations == b.violations


class Ends:
    """Keeps everything that there is at the end of a task."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def last(self) -> None:
        return None

    def due(self, batches: int, since: int) -> bool:
        return batches == 0

    def keep(self, snapshot: Snapshot) -> None:
        self.kept.append({name: tensor.clone() for name, tensor in snapshot.tensors.items()})


def _kept(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the last place of the memory, where what is thrown away is written.

    On a GPU, several such writes are in no order.
    """
    places = {f"memory.{name}" for name in ("x", "slots", "task", "place")}
    return {name: tensor[:, :-1] if name in places else tensor for name, tensor in state.items()}


def same_bits(one: Ends, other: Ends) -> None:
    assert len(one.kept) == len(other.kept) > 0  # one, of a method of which all runs diverge
    for mine, theirs in zip(map(_kept, one.kept), map(_kept, other.kept), strict=True):
        assert mine.keys() == theirs.keys()
        different = [
            name
            for name, tensor in mine.items()
            if not torch.equal(tensor.nan_to_num(7), theirs[name].nan_to_num(7))
        ]
        assert not different


class Counting(Van):
    """A method whose author has not read about captured steps: Python counts its steps."""

    turn = 0

    def direction(self, batch: Batch) -> Tensor:
        self.turn += 1
        return super().direction(batch) * (self.turn % 7)


class Replacing(Van):
    """Its state is another tensor after every step."""

    def direction(self, batch: Batch) -> Tensor:
        self.last = super().direction(batch).clone()
        return self.last


class Asking(Van):
    """It branches on a tensor."""

    def direction(self, batch: Batch) -> Tensor:
        g = super().direction(batch)
        return g if g.abs().max() > 1e-3 else 0 * g


class Told(Van):
    """It reads the number of the task in every step."""

    def capture(self) -> Capture | None:
        return Capture(reads_task=True)

    def direction(self, batch: Batch) -> Tensor:
        return super().direction(batch) * (1 + (batch.task or 0))


class Listing(Van):
    """Python keeps a list of its steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[int] = []

    def direction(self, batch: Batch) -> Tensor:
        self.seen.append(len(self.seen))
        return super().direction(batch)
