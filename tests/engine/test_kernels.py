"""Our kernels against plain torch in float64: on a GPU, or anywhere by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from onepass.engine.gpu import kernel_checks
from onepass.engine.gpu import norm as norms
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.engine.precision import products
from tests.engine.interpreter import DEVICE, INTERPRETED, needs_kernels

pytestmark = [pytest.mark.kernels, needs_kernels]


def images(*shape: int, around: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + around).contiguous(
        memory_format=torch.channels_last
    )


def close(found: Tensor, expected: Tensor, error: float = 2e-6) -> bool:
    return float((found.double() - expected).norm()) <= error * float(expected.norm()) + 1e-9


ALONE = [(3, 20, 5, 5), (2, 40, 3, 3), (7, 80, 4, 4), (2, 160, 2, 2), (1, 3, 4, 4)]
SHARED = [(2, 7, 33, 33)] if INTERPRETED else [(2, 7, 33, 33), (5, 20, 32, 32)]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [(shape, norms.PARTS) for shape in ALONE + SHARED] + [(shape, 16) for shape in SHARED],
    ids=str,
)
@pytest.mark.parametrize(
    ("relu", "adds", "by_out"),
    [
        (False, False, False),
        (True, False, False),
        (True, False, True),
        (True, True, True),
        (False, True, False),
    ],
)
@pytest.mark.parametrize("more", [False, True], ids=["one gradient", "two gradients"])
def test_batch_norm_and_what_surrounds_it_and_its_gradient(
    shape: tuple[int, ...],
    relu: bool,
    adds: bool,
    by_out: bool,
    more: bool,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norms, "PARTS", parts)
    torch.manual_seed(0)
    channels = shape[1]
    x, g, extra = images(*shape, around=5), images(*shape), images(*shape) if more else None
    shortcut = images(*shape) if adds else None
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.randn(channels, device=DEVICE)
    running = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE)
    exact = [t.double() for t in running]

    a, w, b = (t.double().requires_grad_() for t in (x, weight, bias))
    y = functional.batch_norm(a, exact[0], exact[1], w, b, True, 0.1, 1e-3)
    y = y + (0 if shortcut is None else shortcut.double())

    out, mean, inverse = norm(x, weight, bias, shortcut, *running, 0.1, 1e-3, relu)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert close(out, y.relu().detach() if relu else y.detach())
    assert close(mean, a.detach().mean((0, 2, 3)))
    assert close(inverse, (a.detach().var((0, 2, 3), correction=0) + 1e-3).rsqrt(), 1e-5)
    assert close(running[0], exact[0])
    assert close(running[1], exact[1], 1e-5)

    # By the sign of the outputs: in float64 it may be another one next to zero.
    z = (g.double() + (0 if extra is None else extra.double())) * (out > 0 if relu else 1)
    expected = torch.autograd.grad(y, (a, w, b), z)
    for keep in (False, True):
        *found, kept = norm_backward(
            g, extra, x, weight, bias, mean, inverse, out if by_out else None, relu, keep
        )
        assert all(close(one, other, 2e-5) for one, other in zip(found, expected, strict=True))
        assert close(kept, z) if keep else kept.numel() == 0


def test_batch_norm_without_running_statistics_moves_none() -> None:
    for shape in ALONE[:2] + SHARED:
        x = images(*shape)
        weight, bias = torch.rand(shape[1], device=DEVICE), torch.randn(shape[1], device=DEVICE)
        out, *_ = norm(x, weight, bias, None, None, None, 0.1, 1e-5, True)
        wide = x.double(), None, None, weight.double(), bias.double()
        assert close(out, functional.batch_norm(*wide, True).relu())


@pytest.mark.parametrize("shape", [ALONE[0], SHARED[-1]], ids=str)
def test_weights_and_statistics_may_lie_anywhere(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, g, table = images(*shape), images(*shape), torch.rand(shape[1], 4, device=DEVICE) + 0.5
    first = norm(x, table[:, 0], table[:, 1], None, None, None, 0.1, 1e-3, True)
    second = norm(x, table[:, 0].clone(), table[:, 1].clone(), None, None, None, 0.1, 1e-3, True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    _, mean, inverse = first
    back = norm_backward(g, None, x, table[:, 0], table[:, 1], mean, inverse, None, True, True)
    again = norm_backward(
        g, None, x, table[:, 0].clone(), table[:, 1].clone(), mean, inverse, None, True, True
    )
    assert all(torch.equal(one, other) for one, other in zip(back, again, strict=True))
    w = images(shape[1], shape[1], 3, 3)
    columns = table.unbind(1)
    one = convolve_norm(x, w, 1, 1, *columns, 1e-3, None, True)
    other = convolve_norm(x, w, 1, 1, *(c.clone() for c in columns), 1e-3, None, True)
    assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [ALONE[0], SHARED[-1]], ids=str)
@pytest.mark.parametrize("by_out", [False, True])
def test_what_is_not_a_number_stays_so(shape: tuple[int, ...], by_out: bool) -> None:
    x, g, ones = images(*shape), images(*shape), torch.ones(shape[1], device=DEVICE)
    x[0, 3, 2, 2] = torch.nan
    out, mean, inverse = norm(x, ones, ones, None, None, None, 0.1, 1e-3, True)
    assert out[:, 3].isnan().all()
    assert out[:, :3].isfinite().all()
    *found, kept = norm_backward(
        g, None, x, ones, ones, mean, inverse, out if by_out else None, True, True
    )
    assert found[0][:, 3].isnan().all()
    assert torch.equal(kept[:, 3], g[:, 3])  # as torch's derivative of ReLU
    w, columns = images(4, shape[1], 3, 3), torch.ones(4, 4, device=DEVICE)
    assert convolve_norm(x, w, 1, 1, *columns, 1e-3, None, True)[0, :, 2, 2].isnan().all()


def test_the_variance_does_not_depend_on_the_first_pixel_being_typical() -> None:
    torch.manual_seed(0)
    x, ones = images(5, 4, 32, 32), torch.ones(4, device=DEVICE)
    x[0, :, 0, 0] = 70.0
    out, *_ = norm(x, ones, ones, None, None, None, 0.1, 1e-5, False)
    assert close(
        out, functional.batch_norm(x.double(), None, None, ones.double(), ones.double(), True)
    )


@pytest.mark.parametrize(
    "exact",
    [True] if INTERPRETED else [True, False],
    ids=lambda exact: "float32" if exact else "TF32",
)
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "stride", "side"),
    [
        (20, 20, 8, 1, 3),
        (3, 20, 8, 1, 3),
        (20, 40, 8, 2, 3),
        (20, 40, 8, 2, 1),
        (40, 40, 4, 1, 3),
        (80, 80, 4, 1, 3),
        (20, 20, 9, 2, 3),
        (20, 7, 6, 3, 3),
        (7, 20, 6, 3, 1),
        (5, 7, 5, 1, 1),
    ],
)
def test_convolutions_and_their_gradients(
    inputs: int, outputs: int, size: int, stride: int, side: int, exact: bool
) -> None:
    torch.manual_seed(0)
    x, padding = images(2 if INTERPRETED else 7, inputs, size, size), side // 2
    w = images(outputs, inputs, side, side)
    a, b = (t.double().requires_grad_() for t in (x, w))
    y = torch.conv2d(a, b, stride=stride, padding=padding)
    g = images(*y.shape)
    by_inputs, by_weights = torch.autograd.grad(y, (a, b), g.double())
    with products(DEVICE, tf32=not exact):
        found = {
            "outputs": convolve(x, w, stride, padding),
            "weights": convolve_weights(g, x, side, stride, padding),
        }
        if size % stride == 0:
            found["inputs"] = convolve_inputs(g, w, stride, padding, size, size)
    expected = {"outputs": y.detach(), "weights": by_weights, "inputs": by_inputs}
    for name, value in found.items():
        assert value.shape == expected[name].shape
        assert value.is_contiguous(memory_format=torch.channels_last)
        assert close(value, expected[name], 2e-6 if exact else 2e-3)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "stride", "side"),
    [(20, 20, 1, 3), (20, 40, 2, 1), (40, 80, 2, 3), (80, 160, 1, 1)],
)
def test_a_convolution_and_what_comes_behind_it_in_evaluation(
    inputs: int, outputs: int, stride: int, side: int, adds: bool, relu: bool
) -> None:
    torch.manual_seed(0)
    x, w = images(5, inputs, 6, 6), images(outputs, inputs, side, side)
    gamma, beta, mean = torch.randn(3, outputs, device=DEVICE)
    variance = torch.rand(outputs, device=DEVICE) * 9
    expected = torch.conv2d(x.double(), w.double(), stride=stride, padding=side // 2)
    shortcut = images(*expected.shape) if adds else None
    expected = functional.batch_norm(
        expected, mean.double(), variance.double(), gamma.double(), beta.double(), eps=1e-3
    )
    expected = expected + (0 if shortcut is None else shortcut.double())
    with products(DEVICE, tf32=False):
        found = convolve_norm(
            x, w, stride, side // 2, gamma, beta, mean, variance, 1e-3, shortcut, relu
        )
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert close(found, expected.relu() if relu else expected)


def test_kernels_are_tried_out_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_checks.try_out(DEVICE)
    monkeypatch.setattr(kernel_checks, "convolve_weights", lambda *given: -convolve_weights(*given))
    with pytest.raises(ArithmeticError):
        kernel_checks.try_out(DEVICE)
    if DEVICE.type == "cuda":
        kernel_checks.usable.cache_clear()
        assert not kernel_checks.usable(DEVICE)
        assert "kernels of our own are not used" in caplog.text
        kernel_checks.usable.cache_clear()
