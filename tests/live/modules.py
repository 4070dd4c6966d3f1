"""Modules of all kinds, and the plain loop they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from onepass.learners import METHODS
from onepass.models.resnet import ResNet
from tests.toys import FEATURES, Asking, Normed, Tied, small_net

CLASSES = 4
LIVE = [
    name for name, found in METHODS.items() if not found.joined and not found.learner.own_network
]
Pair = tuple[Any, Tensor]


def stream(
    batches: int = 6, size: int = 8, classes: range = range(CLASSES), seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(classes.start, classes.stop, (size,), generator=generator),
        )
        for _ in range(batches)
    ]


def plainly(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Pair],
    loss: Callable[..., Tensor] = cross_entropy,
) -> list[float]:
    """The loop that everybody writes; the losses before the steps."""
    losses = []
    for x, y in data:
        module.train()
        optimizer.zero_grad()
        outputs = (
            module(**x)
            if isinstance(x, dict)
            else module(*x)
            if isinstance(x, tuple)
            else module(x)
        )
        value = loss(outputs, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Equal up to rounding: on some CPUs the last bits of a product depend on where its factors lie in memory."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-6) for name in a
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- modules of all kinds


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = (
            nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True),
            nn.Linear(10, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.unflatten(1, (2, 3)))[0][:, -1])
        return out


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.lift, self.encoder, self.head = (
            nn.Linear(1, 4),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.lift(x[:, :, None])).mean(1))
        return out


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet(2, CLASSES, (1, 1), channels=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unflatten(1, (1, 2, 3)))
        return out


class Counting(nn.Module):
    """Python state that decides what it does: every second pass in training goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.passes = (
            nn.Linear(FEATURES, CLASSES),
            nn.Linear(FEATURES, CLASSES),
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.one(x) if self.passes % 2 else self.two(x)
        return out


class Half(nn.Module):
    """A part of it gets no gradient on some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.high(x) if x[0, 0] > 0 else self.low(x)
        return out


class Flat(nn.Module):
    """A part of it has a gradient that is zero, which is not the same as none: weight decay goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unheard = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) + 0 * self.unheard(x)
        return out


class Saving(nn.Module):
    """It forgets activations and computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()),
            nn.Linear(5, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return out


def normed_weights() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5)),
        nn.Tanh(),
        nn.Linear(5, CLASSES),
    )


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 5)),
        nn.Tanh(),
        nn.Linear(5, CLASSES),
    )


def partly_frozen() -> nn.Module:
    module = nn.Sequential(
        nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    )
    module[2].requires_grad_(False)
    return module


def pure() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 3, 3, padding=1),
        nn.LeakyReLU(),
        nn.Flatten(),
        nn.Linear(3 * FEATURES, CLASSES),
    )


MODULES: list[Callable[[], nn.Module]] = [
    small_net,
    Normed,
    Tied,
    Asking,
    Reader,
    Attending,
    Seeing,
    Counting,
    Half,
    Saving,
    normed_weights,
    spectral,
    partly_frozen,
    pure,
]


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    twin = copy.deepcopy(module).train()
    found = torch.autograd.grad(cross_entropy(twin(x), y), list(twin.parameters()))
    return torch.cat([g.reshape(-1) for g in found])
