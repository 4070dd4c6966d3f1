from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.engine import gpu
from tests.engine.interpreter import INTERPRETED


@pytest.fixture(autouse=True)
def _by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are marked `kernels` use the kernels on a CPU too, if those are interpreted."""

    def is_single(x: Tensor, numbers: int = 0) -> bool:
        return x.dtype == torch.float32

    if INTERPRETED and request.node.get_closest_marker("kernels"):
        monkeypatch.setattr(gpu, "by_kernels", is_single)
        # The interpreter multiplies the bits of bfloat16.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
