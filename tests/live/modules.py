"""Modules of all kinds, and the plain loop they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
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
    name
    for name, found in METHODS.items()
    if not found.joined and not found.learner.needs.own_network
]
Pair = tuple[Any, Tensor]


def stream(
    batches: int = 6, size: int = 8, classes: range = range(CLASSES), seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(size, FEATURES, generator=generator)
        return x, torch.randint(classes.start, classes.stop, (size,), generator=generator)

    return [batch() for _ in range(batches)]


def plainly(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Pair],
    loss: Callable[..., Tensor] = cross_entropy,
) -> list[float]:
    """The plain training loop; returns the losses before the steps."""
    losses = []
    for x, y in data:
        module.train()
        optimizer.zero_grad()
        if isinstance(x, dict):
            outputs = module(**x)
        else:
            outputs = module(*x) if isinstance(x, tuple) else module(x)
        value = loss(outputs, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Equal up to rounding: the last bits of a product may depend on where its factors lie."""
    a, b = one.state_dict(), other.state_dict()
    close = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- modules of all kinds


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.unflatten(1, (2, 3)))[0][:, -1])
        return out


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.lift = nn.Linear(1, 4)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, CLASSES)

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
        self.one, self.two = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.passes = 0

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
    """A part of it has a gradient of zero, which is not the same as none: weight decay goes on."""

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
        self.body = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return out


def normed_weights() -> nn.Module:
    body = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5))
    return nn.Sequential(body, nn.Tanh(), nn.Linear(5, CLASSES))


def spectral() -> nn.Module:
    body = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 5))
    return nn.Sequential(body, nn.Tanh(), nn.Linear(5, CLASSES))


def partly_frozen() -> nn.Module:
    frozen = nn.Linear(5, 5).requires_grad_(False)
    body = nn.Linear(FEATURES, 5)
    return nn.Sequential(body, nn.Tanh(), frozen, nn.Tanh(), nn.Linear(5, CLASSES))


def pure() -> nn.Module:
    lift, body = nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 3, 3, padding=1)
    head = nn.Linear(3 * FEATURES, CLASSES)
    return nn.Sequential(lift, body, nn.LeakyReLU(), nn.Flatten(), head)


MODULES: list[Callable[[], nn.Module]] = [
    *(small_net, Normed, Tied, Asking, Reader, Attending, Seeing, Counting, Half, Saving),
    *(normed_weights, spectral, partly_frozen, pure),
]


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    twin = copy.deepcopy(module).train()
    found = torch.autograd.grad(cross_entropy(twin(x), y), list(twin.parameters()))
    return torch.cat([g.reshape(-1) for g in found])
