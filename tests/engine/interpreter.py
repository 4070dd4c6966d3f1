"""Where tests of Triton kernels run: on a GPU, or on a CPU by Triton's interpreter.

Triton reads `TRITON_INTERPRET=1` when it is imported, so `make test` interprets kernels in a
process of its own, which runs the tests that are marked `kernels` once more. On Linux they fail
there without Triton; elsewhere Triton does not exist.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and sys.platform == "linux"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1"
)
