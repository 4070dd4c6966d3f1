"""Forward passes that are traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable

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
    """Branches on its inputs on the host."""

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


def traced_of(
    module: nn.Module, traces: bool = True
) -> tuple[Counted, Callable[..., tuple[Tensor, Tensor]]]:
    architecture = Counted(module.eval(), lambda x: x)
    traced = TracedForward(architecture, traces)
    parameters = architecture.views(architecture.flatten(module))
    buffers = dict(module.named_buffers())

    def run(x: Tensor, variant: Hashable = None) -> tuple[Tensor, Tensor]:
        return traced(parameters, buffers, x, None, variant)

    return architecture, run


@pytest.mark.parametrize(
    "build",
    [
        lambda: ResNet(4, 6, (1, 1), channels=2),
        lambda: nn.Sequential(nn.Flatten(), mlp(128, [5], 3)),
    ],
)
def test_a_repeated_pass_becomes_a_program_with_the_modules_outputs(
    build: Callable[[], nn.Module],
) -> None:
    module, x = build(), torch.randn(5, 2, 8, 8)
    architecture, run = traced_of(module)
    for _ in range(ENOUGH + 3):
        x = torch.randn(5, 2, 8, 8)
        logits, features = run(x)
        assert torch.allclose(logits, module(x), atol=1e-5)
        assert features.shape[0] == 5
    assert architecture.calls == ENOUGH + 2  # once more to trace, and once to compare


class Sized(nn.Module):
    """Multiplies by the number of examples."""

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
    architecture, run = traced_of(module)
    for _ in range(ENOUGH + 2):
        run(torch.randn(5, 4))
    assert architecture.calls == ENOUGH + 2
    for _ in range(3):
        for number in (7, 5, 1):
            x = torch.randn(number, 4)
            assert torch.allclose(run(x)[0], module(x), atol=1e-5)
    # Each number of examples is compared once, and traced if it must be.
    assert architecture.calls == ENOUGH + 4 + 2 * extra


def test_without_traces_every_pass_is_the_modules_own() -> None:
    architecture, run = traced_of(mlp(4, [5], 3), traces=False)
    for _ in range(ENOUGH + 3):
        run(torch.randn(5, 4))
    assert architecture.calls == ENOUGH + 3


def test_each_column_of_a_progressive_network_has_a_program_of_its_own() -> None:
    network = Progressive(lambda: mlp(4, [5], 3), 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    _, run = traced_of(network)
    x, found = torch.randn(5, 4), []
    for shown in (0, 1) * (ENOUGH + 2):
        network.shown = shown
        found.append(run(x, shown)[0])
        assert torch.allclose(found[-1], network(x), atol=1e-5)
    assert not torch.allclose(found[0], found[1])


def test_a_module_that_cannot_be_traced_is_called(caplog: pytest.LogCaptureFixture) -> None:
    module = Moody()
    architecture, run = traced_of(module)
    for sign in (1, -1, 1, -1, 1, -1):
        x = sign * torch.rand(5, 4)
        assert torch.allclose(run(x)[0], module(x))
    run(torch.rand(7, 4))
    # Once, though there are two numbers of examples.
    assert caplog.text.count("forward passes are not traced") == 1
    assert architecture.calls >= 6


class Fickle(nn.Module):
    """Negates its outputs in every second pass, which a trace would not see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(x)
        return out if self.calls % 2 else -out


def test_a_program_with_other_outputs_than_the_module_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Fickle()
    _, run = traced_of(module)
    x = torch.rand(5, 4)
    for _ in range(ENOUGH + 4):
        logits = run(x)[0]
        assert torch.allclose(logits, module.fc(x) * (1 if module.calls % 2 else -1))
    assert "computes something else than the module" in caplog.text


def test_a_run_that_has_diverged_verifies_no_program(caplog: pytest.LogCaptureFixture) -> None:
    architecture = Counted(mlp(4, [5], 3).eval(), lambda x: x)
    run, row = TracedForward(architecture, True), architecture.flatten(architecture.module)
    lost = architecture.views(torch.full_like(row, torch.nan))
    for _ in range(ENOUGH + 1):
        assert run(lost, {}, torch.rand(5, 4), None)[0].isnan().all()
    x = torch.rand(5, 4)
    for _ in range(2):
        logits, _ = run(architecture.views(row), {}, x, None)
        assert torch.allclose(logits, architecture.module(x))
    assert run(lost, {}, torch.rand(7, 4), None)[0].isnan().all()
    assert not caplog.records


def test_images_of_another_layout_have_a_program_of_their_own() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    _, run = traced_of(module)
    for layout in (torch.contiguous_format, torch.channels_last):
        for _ in range(ENOUGH + 2):
            x = torch.rand(5, 2, 8, 8).contiguous(memory_format=layout)
            assert torch.allclose(run(x)[0], module(x), atol=1e-5)


def test_no_convolution_is_timed_in_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(nn.Linear):
        seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(torch.backends.cudnn.benchmark)
            return super().forward(x)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    _, run = traced_of(Watching(4, 3))
    with monkeypatch.context() as patched:
        patched.setattr(
            module_under_test,
            "make_fx",
            lambda function: nn.Module() and type("Made", (), {"forward": staticmethod(function)}),
        )
        for _ in range(ENOUGH + 3):  # a program is among them
            run(torch.rand(5, 4))
    with pytest.raises(RuntimeError):
        run(torch.rand(5, 9))
    assert len(Watching.seen) > ENOUGH + 3
    assert not any(Watching.seen)
    assert torch.backends.cudnn.benchmark
