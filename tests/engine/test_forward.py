"""Forward passes that are traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onepass.engine import forward as module_under_test
from onepass.engine.architecture import Architecture
from onepass.engine.forward import TracedForward
from onepass.models.mlp import mlp
from onepass.models.progressive import Progressive
from onepass.models.resnet import ResNet

ENOUGH = 2


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "ENOUGH", ENOUGH)
    monkeypatch.setattr(module_under_test, "LONG_ENOUGH", ENOUGH)


class Moody(nn.Module):
    """What it does depends on its inputs, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if x.sum() > 0 else -out


class Counted(Architecture):
    calls = 0

    def call(self, *arguments: object) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().call(*arguments)  # type: ignore[arg-type]


def answers_of(
    module: nn.Module, traces: bool = True
) -> tuple[TracedForward, Counted, Callable[..., tuple[Tensor, Tensor]]]:
    architecture = Counted(module.eval(), lambda x: x)
    answers = TracedForward(architecture, traces)
    parameters, buffers = (
        architecture.views(architecture.flatten(module)),
        dict(module.named_buffers()),
    )
    return (
        answers,
        architecture,
        lambda x, variant=None: answers(parameters, buffers, x, None, variant),
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: ResNet(4, 6, (1, 1), channels=2),
        lambda: nn.Sequential(nn.Flatten(), mlp(128, [5], 3)),
    ],
)
def test_a_pass_that_comes_again_is_a_program_that_answers_as_the_module_does(
    build: Callable[[], nn.Module],
) -> None:
    module, x = build(), torch.randn(5, 2, 8, 8)
    _, architecture, ask = answers_of(module)
    for _ in range(ENOUGH + 3):
        x = torch.randn(5, 2, 8, 8)
        logits, features = ask(x)
        assert torch.allclose(logits, module(x), atol=1e-5)
        assert features.shape[0] == 5
    assert architecture.calls == ENOUGH + 2  # once more to trace, and once to compare


class Sized(nn.Module):
    """What it computes has the number of examples in it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x) * len(x)
        return out.view(len(x), 3)


@pytest.mark.parametrize(
    ("build", "extra"),
    [(lambda: mlp(4, [5], 3), 0), (Sized, 1)],
    ids=["any number", "its own number"],
)
def test_a_program_serves_other_numbers_of_examples_if_it_can(
    build: Callable[[], nn.Module], extra: int
) -> None:
    module = build()
    _, architecture, ask = answers_of(module)
    for _ in range(ENOUGH + 2):
        ask(torch.randn(5, 4))
    assert architecture.calls == ENOUGH + 2
    for _ in range(3):
        for number in (7, 5, 1):
            x = torch.randn(number, 4)
            assert torch.allclose(ask(x)[0], module(x), atol=1e-5)
    assert (
        architecture.calls == ENOUGH + 4 + 2 * extra
    )  # each number is compared once, and traced if it must be


def test_without_traces_every_pass_is_the_modules_own() -> None:
    _, architecture, ask = answers_of(mlp(4, [5], 3), traces=False)
    for _ in range(ENOUGH + 3):
        ask(torch.randn(5, 4))
    assert architecture.calls == ENOUGH + 3


def test_each_column_of_a_progressive_network_has_a_program_of_its_own() -> None:
    network = Progressive(lambda: mlp(4, [5], 3), 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    _, _, ask = answers_of(network)
    x, found = torch.randn(5, 4), []
    for shown in (0, 1) * (ENOUGH + 2):
        network.shown = shown
        found.append(ask(x, shown)[0])
        assert torch.allclose(found[-1], network(x), atol=1e-5)
    assert not torch.allclose(found[0], found[1])


def test_a_module_that_cannot_be_traced_answers_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    module = Moody()
    _, architecture, ask = answers_of(module)
    for sign in (1, -1, 1, -1, 1, -1):
        x = sign * torch.rand(5, 4)
        assert torch.allclose(ask(x)[0], module(x))
    ask(torch.rand(7, 4))
    assert (
        caplog.text.count("forward passes are not traced") == 1
    )  # whatever the number of examples
    assert architecture.calls >= 6


class Fickle(nn.Module):
    """Every other answer is turned round, and a trace would not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(x)
        return out if self.calls % 2 else -out


def test_a_program_that_answers_otherwise_than_the_module_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Fickle()
    _, _, ask = answers_of(module)
    x = torch.rand(5, 4)
    for _ in range(ENOUGH + 4):
        answer = ask(x)[0]
        assert torch.allclose(answer, module.fc(x) * (1 if module.calls % 2 else -1))
    assert "computes something else than the module" in caplog.text


def test_a_run_that_has_diverged_answers_by_itself_and_says_nothing_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    architecture = Counted(mlp(4, [5], 3).eval(), lambda x: x)
    answers, row = TracedForward(architecture, True), architecture.flatten(architecture.module)
    lost = architecture.views(torch.full_like(row, torch.nan))
    for _ in range(ENOUGH + 1):
        assert answers(lost, {}, torch.rand(5, 4), None)[0].isnan().all()
    x = torch.rand(5, 4)
    for _ in range(2):
        assert torch.allclose(
            answers(architecture.views(row), {}, x, None)[0], architecture.module(x)
        )
    assert answers(lost, {}, torch.rand(7, 4), None)[0].isnan().all()
    assert not caplog.records


def test_images_of_another_layout_have_a_program_of_their_own() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    _, _, ask = answers_of(module)
    for layout in (torch.contiguous_format, torch.channels_last):
        for _ in range(ENOUGH + 2):
            x = torch.rand(5, 2, 8, 8).contiguous(memory_format=layout)
            assert torch.allclose(ask(x)[0], module(x), atol=1e-5)


def test_no_convolution_is_timed_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(nn.Linear):
        seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(torch.backends.cudnn.benchmark)
            return super().forward(x)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    _, _, ask = answers_of(Watching(4, 3))
    with monkeypatch.context() as patched:
        patched.setattr(
            module_under_test,
            "make_fx",
            lambda function: nn.Module() and type("Made", (), {"forward": staticmethod(function)}),
        )
        for _ in range(ENOUGH + 3):  # a program is among them
            ask(torch.rand(5, 4))
    with pytest.raises(RuntimeError):
        ask(torch.rand(5, 9))
    assert len(Watching.seen) > ENOUGH + 3
    assert not any(Watching.seen)
    assert torch.backends.cudnn.benchmark
