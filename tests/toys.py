"""Small streams and models for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.slots import Slots
from onepass.learners.declarations import Needs
from onepass.streams import STREAMS
from onepass.streams.base import Heads, Part, Pool, Stream, Task, separate_heads, shared_heads

FEATURES = 6


class ToyStream(Stream):
    """Four tasks of two classes with a head each.

    With `ragged`, the lengths of tasks differ from seed to seed.
    """

    def __init__(self, ragged: bool = False, shared: bool = False, examples: int = 47) -> None:
        generator = torch.Generator().manual_seed(3)
        classes = torch.arange(8).repeat(40)
        prototypes = torch.randint(0, 206, (8, FEATURES), generator=generator)
        x = prototypes[classes] + torch.randint(0, 50, (320, FEATURES), generator=generator)
        super().__init__(Pool(x.to(torch.uint8), classes, 240, scale=1 / 255))
        self.ragged, self.shared, self.examples = ragged, shared, examples

    def heads(self, part: Part) -> Heads:
        return shared_heads(4, 2) if self.shared else separate_heads(4, 2)

    def tasks(self, part: Part, seed: int) -> list[Task]:
        made = []
        for k in range(4):
            slot_of_class = torch.full((8,), -1)
            slot_of_class[2 * k : 2 * k + 2] = torch.arange(2) + (0 if self.shared else 2 * k)
            members = (self.pool.classes // 2 == k).nonzero()[:, 0]
            count = self.examples - (7 * seed + 5 * k) % 23 if self.ragged else self.examples
            train, test = members[members < 240][:count], members[members >= 240]
            made.append(Task(train, test, slot_of_class, None))
        return made


def shipped(name: str, **options: Any) -> Stream:
    """A stream of the package that needs no data."""
    return STREAMS[name].make(STREAMS[name].options(**options), None)


def small_net(outputs: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs))


class Normed(nn.Module):
    """A convolution, batch-norm, and a head: buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)
        self.fc = nn.Linear(3 * FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))
        return out


class Tied(nn.Module):
    """Two layers that share a weight, and a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Dropped(nn.Module):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.relu(self.body(x))))
        return out


class Asking(nn.Module):
    """A model that branches on its data: neither traceable nor stackable."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out * 2 if x.sum().item() > 0 else out


class Described(nn.Module):
    """A joint embedding: logits are features times embedded descriptors of the slots."""

    def __init__(self, attributes: int = 4, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, width)
        self.embedding = nn.Parameter(torch.randn(attributes, width) * 0.3)

    def forward(self, x: Tensor, descriptors: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) @ (descriptors @ self.embedding).T


def fleet_of(
    build: Callable[[], nn.Module] = small_net, runs: int = 3, mode: Mode = "auto", **more: object
) -> Fleet:
    seeds, slots = list(range(10, 10 + runs)), Slots(separate_heads(4, 2))
    return Fleet(build, seeds, slots, [0.1] * runs, gradients=mode, **more)  # type: ignore[arg-type]


def batch_of(
    runs: int = 3, size: int = 7, seed: int = 0, sizes: tuple[int, ...] | None = None
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(runs, size, FEATURES, generator=generator),
        torch.randint(0, 8, (runs, size), generator=generator),
        sizes,
    )


def by_hand(fleet: Fleet, batch: Batch, run: int) -> tuple[Tensor, Tensor]:
    """Gradient and loss of one run by plain autograd on a plain module."""
    parameters = [p[run].clone().requires_grad_() for p in fleet.architecture.views(fleet.theta)]
    buffers = {name: b[run].clone() for name, b in fleet.buffers.items()}
    size = batch.slots.shape[1] if batch.sizes is None else batch.sizes[run]
    descriptors = None if fleet.descriptors is None else fleet.descriptors[run]
    fleet.architecture.module.train()
    logits, _ = fleet.architecture.call(parameters, buffers, batch.x[run, :size], descriptors)
    rows = []
    for example, slot in zip(logits, batch.slots[run, :size].tolist(), strict=True):
        rivals = next(row for row in fleet.slots.table if slot in row)
        rows.append(example[list(rivals)].logsumexp(0) - example[slot])
    loss = torch.stack(rows).mean()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.reshape(-1) for g in gradients]), loss.detach()


class Follow:
    """A learner that takes the direction it is given."""

    def __init__(self, direction: Callable[[Batch], Tensor], delta: bool = False) -> None:
        self.direction = direction
        self.needs = Needs(delta=delta)
        self.deltas: list[Tensor] = []

    def accept(self) -> None: ...

    def after_step(self, delta: Tensor) -> None:
        self.deltas.append(delta)
