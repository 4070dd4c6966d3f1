"""Checks of the kernels: on a device before they are used, and inside a program."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from onepass.engine import gpu
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)
OPERATIONS = {
    operation._opoverload
    for operation in (
        *(convolve, convolve_inputs, convolve_norm, convolve_weights),
        *(norm, norm_backward),
    )
}


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernels run correctly on this device: an NVIDIA GPU from Ampere on."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (8, 0)
        or not gpu.has_triton()
    ):
        return False
    try:
        try_out(device)
    except Exception as reason:  # no C compiler, say
        if is_out_of_memory(reason):
            raise
        log.warning("kernels of our own are not used: %s", first_line(reason))
        return False
    return True


@torch.inference_mode(False)
def try_out(device: torch.device) -> None:
    """Raise unless a convolution, batch-norm and their gradients are right.

    Batch-norm is tried on images that one kernel handles alone, and on larger ones. Each result is
    compared with float64 on the CPU, given what the kernels before it have found. Otherwise a ReLU
    next to zero would make rounding look like an error.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def images(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device="cpu").to(device)
        return made.contiguous(memory_format=torch.channels_last)

    def compare(what: str, *pairs: tuple[Tensor, Tensor]) -> None:
        for found, expected in pairs:
            off = float((found.cpu() - expected).norm() / expected.norm())
            if not off < 5e-3:  # in TF32
                raise ArithmeticError(f"{what} is off by {off:.2g} of its length")

    x, w = images(5, 4, 4, 4), images(4, 4, 3, 3)
    gamma, beta = torch.randn(2, 4, generator=generator, device="cpu").to(device)
    y, g = convolve(x, w, 1, 1), images(5, 4, 4, 4)
    a, b = (t.cpu().double().requires_grad_() for t in (x, w))
    with torch.enable_grad():
        expected = torch.conv2d(a, b, padding=1)
        by_inputs, by_weights = torch.autograd.grad(expected, (a, b), g.cpu().double())
    compare("a convolution", (y, expected.detach()))
    compare("its gradient by the inputs", (convolve_inputs(g, w, 1, 1, 4, 4), by_inputs))
    compare("its gradient by the weights", (convolve_weights(g, x, 3, 1, 1), by_weights))
    for inputs, back in ((y, g), (images(5, 4, 33, 33), images(5, 4, 33, 33))):
        out, mean, inverse = norm(inputs, gamma, beta, None, None, None, 0.1, 1e-5, True)
        *found, _ = norm_backward(back, None, inputs, gamma, beta, mean, inverse, None, True, False)
        leaves = a, b, c = [t.cpu().double().requires_grad_() for t in (inputs, gamma, beta)]
        with torch.enable_grad():
            expected = torch.batch_norm(a, b, c, None, None, True, 0.1, 1e-5, False)
            gradients = torch.autograd.grad(expected, leaves, (back * (out > 0)).cpu().double())
        compare("batch-norm", (out, expected.detach().relu()))
        compare("its gradient", *zip(found, gradients, strict=True))


def check_kernels(program: fx.GraphModule, arguments: list[Tensor]) -> None:
    """Raise unless each kernel in a program computes the operation that it replaces."""
    _OneByOne(program).run(*arguments)


class _OneByOne(fx.Interpreter):
    """Run a program and compare its operations of ours with torch's in float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in OPERATIONS:
            return super().call_function(target, args, kwargs)
        if target == norm_backward._opoverload:
            args = _without_doubtful(args)
        # Before ours, since running statistics move.
        expected = target(
            *(value.double() if isinstance(value, Tensor) else value for value in args)
        )
        found = super().call_function(target, args, kwargs)
        ours, torchs = ([part] if isinstance(part, Tensor) else part for part in (found, expected))
        for one, other, floor in zip(ours, torchs, _floors(target, args), strict=False):
            relative = max(1e-3, 8 * torch.finfo(one.dtype).eps)
            if not float((one - other).norm()) <= relative * float(other.norm()) + floor:
                raise ArithmeticError(f"{target} is wrong")
        return found


def _without_doubtful(args: Any) -> Any:
    """Arguments of `norm_backward` without gradients where rounding decides if a ReLU is on."""
    g, more, x, weight, bias, mean, inverse, out, relu, keep = args
    if not relu or out is not None:
        return args
    exact = x.double()
    gamma, beta, m, scale = (t.double()[:, None, None] for t in (weight, bias, mean, inverse))
    terms = (gamma * scale).abs() * (exact.abs() + m.abs()) + beta.abs()
    doubtful = (gamma * scale * (exact - m) + beta).abs() < 1e-5 * terms
    g, more = (None if t is None else t.masked_fill(doubtful, 0.0) for t in (g, more))
    return g, more, x, weight, bias, mean, inverse, out, relu, keep


def _floors(target: Any, args: Any) -> tuple[float, ...]:
    """The part of each result that may be rounding: a sum is as exact as its longest terms."""
    if target != norm_backward._opoverload:
        return 1e-12, 1e-12, 1e-12
    total = sum(float(t.double().abs().sum()) for t in args[:2] if t is not None)
    return 1e-12, 1e-12 + 1e-6 * total, 1e-12 + 1e-6 * total, 1e-12
