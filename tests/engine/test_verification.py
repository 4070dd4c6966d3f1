"""A traced program is verified against plain autograd before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gpu import kernel_checks
from onepass.engine.gpu.norm import norm_backward
from onepass.engine.gradients import Mode
from onepass.engine.slots import Slots
from onepass.engine.tracing import trace
from onepass.engine.verification import _in_double, verify_trace
from onepass.models.resnet import ResNet
from onepass.streams.base import Pool, separate_heads
from tests.toys import Normed, batch_of, by_hand, fleet_of, small_net

as_on_a_gpu = partial(trace, on_gpu=True)


class Unused(nn.Module):
    """Has a parameter whose gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(6, 8), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Masked(nn.Module):
    """Writes into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(1, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((6, 6), -torch.inf).triu_(1)
        q = self.layer(x[..., None])
        out: Tensor = self.head((torch.softmax(q @ q.mT + mask, -1) @ q).mean(-2))
        return out


class Warm(nn.Module):
    """Counts its passes, and its outputs grow with each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.passes = nn.Linear(6, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.head(torch.tanh(self.body(x))) * min(1.0, self.passes / 100)
        return out


def changed(
    change: Callable[[Callable[..., Tensor], list[Tensor], int], Tensor],
) -> Callable[..., fx.GraphModule]:
    """A tracer whose programs do something else."""

    def tracer(function: Any, arguments: list[Tensor], outputs: list[Tensor]) -> fx.GraphModule:
        made = as_on_a_gpu(function, arguments, outputs)
        program = made.forward
        made.forward = lambda *given: change(program, list(given), len(outputs))  # type: ignore[method-assign]
        return made

    return tracer


def halved(program: Callable[..., Tensor], given: list[Tensor], outputs: int) -> Tensor:
    value = program(*given)
    for out in given[-outputs:]:
        out.mul_(0.5)
    return value


def images(build: Callable[[], nn.Module], size: int = 8) -> tuple[Fleet, Batch]:
    torch.manual_seed(0)
    fleet = Fleet(
        build, range(1), Slots(separate_heads(2, 3)), [0.1], device="cpu", gradients="looped"
    )
    return fleet, Batch(
        torch.randn(1, 10, size, size, 3).permute(0, 1, 4, 2, 3), torch.arange(10)[None] % 3
    )


@pytest.mark.parametrize("value", [0.5, float("nan")])
@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_wrong_program_is_not_used(
    mode: Mode, value: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(program: object, given: list[Tensor], outputs: int) -> Tensor:
        for out in given[-outputs:]:
            out.fill_(value)
        return torch.zeros(())

    monkeypatch.setattr("onepass.engine.gradients.trace", changed(wrong))
    fleet, batch = fleet_of(mode=mode), batch_of()
    assert torch.allclose(fleet.grad(batch)[0][2], by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert "off by" in caplog.text


@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_wrong_program_is_not_used_though_the_model_writes_into_constants(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onepass.engine.gradients.trace", changed(halved))
    fleet, batch = fleet_of(Masked, mode=mode), batch_of()
    assert torch.allclose(fleet.grad(batch)[0][2], by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert "and in float64 its gradient is off by 0.5" in caplog.text


def test_gradients_of_zero_verify_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onepass.engine.gradients.trace", changed(halved))
    fleet, batch = fleet_of(mode="looped"), batch_of()

    def weighted(logits: Tensor, slots: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        return fleet.cross_entropy(logits, slots, {}) * extra["weight"].sum()

    for weight in (0.0, 1.0):
        assert not caplog.records
        g, _ = fleet.grad(
            replace(batch, extra={"weight": torch.full((3, 1), weight)}), loss=weighted
        )
        assert torch.allclose(g[2], weight * by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert "off by 0.5" in caplog.text


class FailsInDouble(nn.Linear):
    """Returns NaN in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.nan if x.dtype == torch.float64 else 1.0)


def test_a_program_that_is_off_is_not_used_if_nothing_is_finite_in_float64(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onepass.engine.gradients.trace", changed(halved))
    fleet, batch = fleet_of(lambda: FailsInDouble(6, 8), mode="looped"), batch_of()
    assert torch.allclose(fleet.grad(batch)[0][2], by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert "nothing is finite" in caplog.text


def test_no_program_is_made_or_verified_while_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, batch = fleet_of(mode="looped"), batch_of()
    fleet.theta.fill_(torch.nan)
    fleet.grad(batch)
    monkeypatch.setattr("onepass.engine.gradients.is_capturing", lambda: True)
    monkeypatch.setattr("onepass.engine.gradients.trace", None)
    monkeypatch.setattr("onepass.engine.gradients.verify_trace", None)
    fleet.grad(batch)
    fleet.grad(batch_of(size=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_programs_in_half_precision_are_verified_in_float64(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onepass.engine.gradients.trace", as_on_a_gpu)

    def convolutional() -> nn.Module:
        layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 6))
        return nn.Sequential(*layers).to(dtype)

    def normed() -> nn.Module:
        layers = (nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        return nn.Sequential(*layers).to(dtype)

    fleet, batch = images(convolutional)
    fleet.grad(replace(batch, x=batch.x.to(dtype)))
    fleet, batch = fleet_of(normed, mode="stacked"), batch_of()
    fleet.grad(replace(batch, x=batch.x.to(dtype)))
    assert not caplog.records


@pytest.mark.parametrize("build", [small_net, Unused])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_runs_that_have_not_diverged_verify_the_program(
    mode: Mode,
    right: bool,
    build: Callable[[], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    called = traced = 0

    def program(program: Callable[..., Tensor], given: list[Tensor], outputs: int) -> Tensor:
        nonlocal called
        called += 1
        return program(*given) if right else halved(program, given, outputs)

    def tracer(*arguments: Any) -> fx.GraphModule:
        nonlocal traced
        traced += 1
        return changed(program)(*arguments)

    monkeypatch.setattr("onepass.engine.gradients.trace", tracer)
    fleet, batch = fleet_of(build, mode=mode), batch_of()
    theta = fleet.theta.clone()
    fleet.theta.fill_(torch.nan)
    fleet.grad(batch)
    assert not caplog.records
    fleet.theta[1:] = theta[1:]
    for _ in range(2):
        called = 0
        assert torch.allclose(fleet.grad(batch)[0][2], by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert ("off by" in caplog.text) != right
    assert (called > 0) == right
    assert traced == (1 if mode == "looped" else 2)  # the others one by one in between


@pytest.mark.parametrize(("mode", "most"), [("looped", 14), ("stacked", 22)])
def test_a_program_is_not_compared_for_ever_if_all_runs_have_diverged(
    mode: Mode, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def watched(*arguments: Any) -> bool:
        nonlocal compared
        compared += 1
        return verify_trace(*arguments)

    monkeypatch.setattr("onepass.engine.gradients.verify_trace", watched)
    fleet = fleet_of(mode=mode)
    fleet.theta.fill_(torch.nan)
    for _ in range(40):
        fleet.grad(batch_of())
    assert compared == most


@pytest.mark.parametrize("number", [0, 20, 40, 61])
def test_a_program_with_one_gradient_a_little_too_long_is_not_used(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def longer(program: Callable[..., Tensor], given: list[Tensor], outputs: int) -> Tensor:
        value = program(*given)
        given[-outputs:][number].mul_(1.02)
        return value

    monkeypatch.setattr("onepass.engine.gradients.trace", changed(longer))
    fleet, batch = images(lambda: ResNet(8, 6))
    fleet.grad(batch)
    assert "off by 0.02" in caplog.text


@pytest.mark.parametrize(("rounds", "scale"), [(True, 1.0), (True, 1e8), (False, 1.0)])
def test_a_program_may_round_otherwise_where_a_gradient_is_nothing_but_rounding(
    rounds: bool, scale: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Its bias in front of batch-norm has no other gradient.
    fleet, batch = fleet_of(Normed, mode="looped"), batch_of()
    parameters, generator = len(fleet.architecture.names), torch.Generator().manual_seed(0)

    def otherwise(program: Callable[..., Tensor], given: list[Tensor], outputs: int) -> Tensor:
        noise = torch.finfo(given[0].dtype).eps if rounds else 1e-2
        nudged = [
            t * (1 + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype))
            for t in given[:parameters]
        ]
        return program(*nudged, *given[parameters:])

    monkeypatch.setattr("onepass.engine.gradients.trace", changed(otherwise))
    fleet.grad(batch, loss=lambda logits, slots, _: scale * cross_entropy(logits, slots))
    assert ("off by" not in caplog.text) == rounds


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3)),
        lambda: (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)),
        lambda: (nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)),
    ],
)
def test_batch_norm_behind_batch_norm_is_traced(
    layers: Callable[[], tuple[nn.Module, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("onepass.engine.gradients.trace", as_on_a_gpu)
    fleet, batch = images(lambda: nn.Sequential(*layers(), nn.Flatten(), nn.Linear(192, 6)))
    fleet.grad(batch)
    assert not caplog.records


def test_no_program_is_made_from_one_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def longer(program: Callable[..., Tensor], given: list[Tensor], outputs: int) -> Tensor:
        value = program(*given)
        given[-1].mul_(1.01)
        return value

    monkeypatch.setattr("onepass.engine.gradients.trace", changed(longer))
    fleet = fleet_of(mode="looped")
    for size in (3, 4, 5):
        fleet.grad(batch_of(size=size))
    assert caplog.text.count("off by 0.01 of its length, and") == 3


def test_a_program_of_images_that_are_stored_as_bytes_is_verified_in_float64(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked: list[torch.dtype] = []
    monkeypatch.setattr("onepass.engine.gradients.trace", as_on_a_gpu)
    monkeypatch.setattr(
        "onepass.engine.verification.check_kernels",
        lambda _, arguments: checked.append(arguments[0].dtype),
    )
    pool = Pool(
        torch.randint(0, 256, (10, 192), dtype=torch.uint8),
        torch.arange(10) % 3,
        10,
        1 / 255,
        torch.randn(192),
        (8, 8, 3),
    )
    nets = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 6)
    )
    fleet = Fleet(
        lambda: nets,
        range(1),
        Slots(separate_heads(2, 3)),
        [0.1],
        device="cpu",
        gradients="looped",
        prepare=pool.prepare_images,
    )
    fleet.grad(Batch(pool.x[None], pool.classes[None]))
    assert checked == [torch.float32]
    assert not caplog.records


def test_a_model_that_changes_from_call_to_call_is_not_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, batch = fleet_of(Warm, runs=1, mode="looped"), batch_of(runs=1)
    lengths = [float(fleet.grad(batch)[0].norm()) for _ in range(4)]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 4
    assert "off by" in caplog.text


@torch.library.custom_op(
    "onepass_tests::twice", mutates_args=(), schema="(Tensor x, bool right) -> Tensor"
)
def twice(x: Tensor, right: bool) -> Tensor:
    return 2 * x if right or x.dtype == torch.float64 else 2.1 * x


def test_kernels_are_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "OPERATIONS", {twice._opoverload})
    for right in (True, False):
        graph = fx.Graph()
        graph.output(graph.call_function(twice._opoverload, (graph.placeholder("x"), right)))
        made = fx.GraphModule({}, graph)
        if right:
            kernel_checks.check_kernels(made, [torch.ones(3)])
        else:
            with pytest.raises(ArithmeticError, match="onepass_tests"):
                kernel_checks.check_kernels(made, [torch.ones(3)])


@pytest.mark.parametrize(
    "failure",
    [ArithmeticError("a kernel is wrong"), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=["wrong", "no room"],
)
def test_a_program_that_is_off_is_not_used_if_a_kernel_is_wrong_or_cannot_be_checked(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise failure

    monkeypatch.setattr("onepass.engine.gradients.trace", as_on_a_gpu)
    monkeypatch.setattr("onepass.engine.verification.check_kernels", refuse)
    fleet, batch = images(
        lambda: nn.Sequential(
            nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 6)
        )
    )
    fleet.grad(batch)
    assert "off by" in caplog.text


def test_a_relu_that_rounding_turns_on_is_no_fault_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    x, ones = torch.randn(10, 3, 8, 8), torch.ones(3)
    mean = x.mean((0, 2, 3))
    # With this bias the first pixels are zero in float32, and above zero in float64.
    bias = mean - x[0, :, 0, 0]
    arguments = [torch.randn_like(x), x, ones, bias, mean, ones]
    single, double = (
        norm_backward(t[0], None, *t[1:], None, True, False)[0]
        for t in (arguments, [t.double() for t in arguments])
    )
    assert float((single - double).norm()) > 1e-2 * float(double.norm())
    graph = fx.Graph()
    names = ("g", "x", "weight", "bias", "mean", "inverse")
    g, *given = [graph.placeholder(name) for name in names]
    inputs = (g, None, *given, None, True, False)
    graph.output(graph.call_function(norm_backward._opoverload, inputs))
    made = fx.GraphModule({}, graph)
    kernel_checks.check_kernels(made, arguments)
    monkeypatch.setattr(
        fx.Interpreter,
        "call_function",
        lambda _, target, args, kwargs: [1.01 * part for part in target(*args)],
    )
    with pytest.raises(ArithmeticError, match="norm_backward"):
        kernel_checks.check_kernels(made, arguments)


def test_a_program_that_was_traced_in_float32_is_verified_in_float64() -> None:
    with _in_double():  # a traced program names its dtypes
        assert torch.zeros(3, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(3, dtype=torch.float64).to(torch.float32).dtype == torch.float64
