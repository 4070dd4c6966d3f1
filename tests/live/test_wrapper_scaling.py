"""A scaler of features that goes on moving makes the examples in the memory stale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from onepass import Memory, OnePass

TASKS, FEATURES = 4, 6


def data(task: int, examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sensor that drifts: features move away and spread, and their meaning does not change."""
    generator = torch.Generator().manual_seed(1000 * seed + task)
    x = torch.randn(examples, FEATURES, generator=generator) * (1 + 0.3 * task) + 1.0 * task
    return x, torch.sin(x[:, :1] / 4) + 0.1 * x[:, 1:2]


def quality(scale: Callable[[Tensor, bool], Tensor], module: nn.Module) -> float:
    """R² in % on new examples of the first task, after all tasks."""
    learner = OnePass(
        module, "er", learning_rate=0.02, loss=mse_loss, memory=Memory(per_task=200), seed=1
    )
    for task in range(TASKS):
        x, y = data(task, 1500, seed=1)
        for part, target in zip(x.split(10), y.split(10), strict=True):
            learner.observe(scale(part, True), target)
        learner.end_task()
    x, y = data(0, 500, seed=2)
    return 100 * float(r2_score(y, learner.predict(scale(x, False))))


class Scale(nn.Module):
    """Scales by the mean and spread of all that came, in learning and in answers alike."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in (
            ("count", torch.zeros(())),
            ("mean", torch.zeros(FEATURES)),
            ("square", torch.ones(FEATURES)),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean += (x.mean(0) - self.mean) / self.count
            self.square += (x.square().mean(0) - self.square) / self.count
        return (x - self.mean) / (self.square - self.mean.square()).clamp(min=1e-6).sqrt()


def net(*first: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def test_a_running_scaler_spoils_what_is_kept_and_a_frozen_one_or_one_in_the_module_does_not() -> (
    None
):
    running, frozen = StandardScaler(), StandardScaler().fit(data(0, 500, seed=3)[0].numpy())

    def moving(x: Tensor, learning: bool) -> Tensor:
        if learning:
            running.partial_fit(x.numpy())
        return torch.tensor(running.transform(x.numpy()), dtype=torch.float32)

    def fixed(x: Tensor, _: bool) -> Tensor:
        return torch.tensor(frozen.transform(x.numpy()), dtype=torch.float32)

    stale = quality(moving, net())
    once = quality(fixed, net())
    inside = quality(lambda x, _: x, net(Scale()))
    assert stale < 0  # -200 %
    assert once > 70  # 89 %
    assert inside > 70  # 96 %
