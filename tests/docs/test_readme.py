"""The ten lines of the README, on models that are not ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onepass import OnePass
from onepass.models.resnet import ResNet

README = Path(__file__).parents[2] / "README.md"
Data = Callable[[int], Tensor]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(x)).mean(1))
        return out


MODELS: list[tuple[Callable[[], nn.Module], Data]] = [
    (lambda: ResNet(4, 4), lambda n: torch.randn(n, 3, 16, 16)),
    (Lstm, lambda n: torch.randn(n, 7, 5)),
    (Transformer, lambda n: torch.randint(0, 30, (n, 9))),
]


def ten_lines() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_ten_lines_are_ten_lines() -> None:
    assert len([line for line in ten_lines().splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(("build", "data"), MODELS, ids=["resnet", "lstm", "transformer"])
def test_the_ten_lines_learn_from_a_stream(
    build: Callable[[], nn.Module], data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = [[(data(6), torch.randint(0, 4, (6,))) for _ in range(4)] for _ in range(3)]
    names: dict[str, object] = {"model": model, "stream": stream}
    exec(ten_lines(), names)
    learner, labels = names["learner"], names["labels"]
    assert isinstance(learner, OnePass)
    assert isinstance(labels, Tensor)
    assert labels.shape == (6,)
    assert learner.steps == 12
    assert learner.memory is not None
    assert learner.memory.counts() == {0: 24, 1: 24, 2: 24}
    assert list(model.state_dict()) == list(before)
    trained = [not torch.equal(value, before[name]) for name, value in model.named_parameters()]
    assert all(trained)
    resumed = OnePass.load("learner.safetensors", build())
    x, y = stream[0][0]
    assert resumed.observe(x, y) == learner.observe(x, y)
    for mine, theirs in zip(model.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
