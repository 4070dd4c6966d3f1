"""Every kernel compiles for an NVIDIA GPU of the oldest kind that we support, with none at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.engine import gpu, quadratic
from onepass.engine.gpu import norm as norms
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from tests.engine.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED or not gpu.has_triton(), reason="needs Triton")
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1"}


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that have been launched since: they are compiled and not run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        signature = {}
        for parameter in kernel.params:
            value = given[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
            elif isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        constants = {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(kernel, signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        assert made.asm["cubin"]
        names.append(kernel.fn.__name__)

    names: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(gpu, "by_kernels", lambda *_: True)
    return names


def images(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("size", "kernels"),
    [
        (5, ["alone", "alone_backward"]),
        (40, ["moments", "total", "normalise", "products", "total", "spread"]),
    ],
)
def test_batch_norm(
    size: int, kernels: list[str], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "PARTS", 16)
    x, (gamma, beta, mean, variance) = images(3, 20, size, size), torch.rand(4, 20)
    norm(x, gamma, beta, x, mean, variance, 0.1, 1e-5, True)
    norm_backward(x, x, x, gamma, beta, mean, variance, None, True, False)
    assert compiled == kernels


@pytest.mark.parametrize("tf32", [True, False])
def test_convolutions(tf32: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    x, w, columns = images(5, 20, 8, 8), images(40, 20, 3, 3), torch.rand(4, 40)
    g = convolve(x, w, 2, 1)
    convolve_norm(x, w, 2, 1, *columns, 1e-5, g, True)
    convolve_inputs(g, w, 2, 1, 8, 8)
    convolve_weights(g, x, 3, 2, 1)
    assert compiled == ["convolve", "convolve", "turn", "inputs", "weights"]


@pytest.mark.parametrize("side", quadratic.WARPS)
def test_pivoting(side: int, compiled: list[str]) -> None:
    quadratic._on_device(torch.zeros(2, side, side).double(), torch.zeros(2, side).double(), 2**-16)
    assert compiled == ["pivot"]
