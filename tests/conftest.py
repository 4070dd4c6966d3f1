from __future__ import annotations

import os

import pytest
import torch

os.environ["ONEPASS_TRACEBACK"] = (
    "1"  # a mistake in a command is to be seen, not reported in a sentence
)
torch.set_num_threads(1)  # tests are many small steps; threads only get in each other's way


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
