from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tests are many small steps; threads only get in each other's way


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
