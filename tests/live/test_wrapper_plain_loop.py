"""OnePass without anything against forgetting is the plain loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from onepass import OnePass
from tests.live.modules import CLASSES, MODULES, Flat, Half, alike, plainly, pure, sgd, stream
from tests.toys import FEATURES, Normed, Tied


@pytest.mark.parametrize("build", MODULES, ids=lambda b: b.__name__)
def test_van_is_the_plain_loop_for_any_module(build: Callable[[], nn.Module]) -> None:
    module = build()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    losses = [learner.observe(x, y) for x, y in stream()]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), stream()), rel=1e-6)
    assert alike(module, twin)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
}


# Tied and Half have parameters that get no gradient: an optimizer passes over them.
# Flat has some whose gradient is zero: it does not.
@pytest.mark.parametrize(
    ("name", "build"),
    [
        *itertools.product(OPTIMIZERS, [Normed, pure]),
        *itertools.product(["momentum", "Adam", "AdamW"], [Tied, Half, Flat]),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_van_is_the_plain_loop_for_any_optimizer(name: str, build: Callable[[], nn.Module]) -> None:
    module = build()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", optimizer=OPTIMIZERS[name](module.parameters()))
    for x, y in stream():
        learner.observe(x, y)
    plainly(twin, OPTIMIZERS[name](twin.parameters()), stream())
    assert alike(module, twin)
    assert all(p.grad is None for p in module.parameters())


def test_learning_rates_of_groups_and_a_schedule_are_those_of_the_plain_loop() -> None:
    def made(module: Normed) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        groups = [
            {"params": module.conv.parameters(), "lr": 0.3},
            {"params": [*module.norm.parameters(), *module.fc.parameters()]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    module = Normed()
    twin = copy.deepcopy(module)
    (optimizer, schedule), (plain, other) = made(module), made(twin)
    learner = OnePass(module, "van", optimizer=optimizer)
    for x, y in stream():
        learner.observe(x, y)
        schedule.step()
        plainly(twin, plain, [(x, y)])
        other.step()
    assert alike(module, twin)


def test_an_optimizer_of_some_parameters_moves_only_these() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", optimizer=torch.optim.Adam(module.fc.parameters(), lr=0.01))
    for x, y in stream():
        learner.observe(x, y)
    plainly(twin, torch.optim.Adam(twin.fc.parameters(), lr=0.01), stream())
    assert alike(module, twin)


def test_van_is_the_plain_loop_for_a_loss_of_ones_own() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    data = [(x, torch.cat([x, x], 1)[:, :8]) for x, _ in stream()]
    learner = OnePass(module, "van", learning_rate=0.1, loss=mse_loss)
    losses = [learner.observe(x, y) for x, y in data]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), data, mse_loss), rel=1e-6)
    assert alike(module, twin)


def test_outputs_may_be_of_any_kind_for_a_loss_of_ones_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"mean": self.mean(x), "spread": self.spread(x)}

    def likelihood(outputs: dict[str, Tensor], y: Tensor) -> Tensor:
        return ((outputs["mean"] - y) / outputs["spread"].exp()).square().mean() + 2 * outputs[
            "spread"
        ].mean()

    module = Two()
    twin = copy.deepcopy(module)
    data = [(x, x[:, :1]) for x, _ in stream()]
    learner = OnePass(module, "van", learning_rate=0.1, loss=likelihood)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data, likelihood)
    assert alike(module, twin)
    answer = learner.predict(data[0][0])
    assert torch.equal(answer["mean"], twin.eval()(data[0][0])["mean"])  # type: ignore[call-overload]


@pytest.mark.parametrize("build", [Normed, pure], ids=lambda b: b.__name__)
def test_van_is_the_plain_loop_in_double_precision(build: Callable[[], nn.Module]) -> None:
    module = build().double()
    twin = copy.deepcopy(module)
    data = [(x.double(), y) for x, y in stream()]
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert alike(module, twin)


def test_a_module_in_half_precision_learns_while_its_gradient_is_finite() -> None:
    module = nn.Linear(FEATURES, CLASSES).half()
    twin = copy.deepcopy(module)
    data = [
        (300 * x.half(), y) for x, y in stream(2)
    ]  # squares of such gradients are beyond float16
    learner = OnePass(module, "van", learning_rate=0.001)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, torch.optim.SGD(twin.parameters(), lr=0.001), data)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=0.01)


def test_batches_may_have_any_size() -> None:
    module = pure()
    twin = copy.deepcopy(module)
    data = [(x[:n], y[:n]) for (x, y), n in zip(stream(7), [8, 1, 5, 8, 8, 2, 1], strict=True)]
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert alike(module, twin)
