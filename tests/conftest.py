from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import Started

# A mistake in a command is to be seen, not reported in a sentence.
os.environ["ONEPASS_TRACEBACK"] = "1"
torch.set_num_threads(1)  # tests are many small steps; threads only get in each other's way


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands, and ends what is left of them after the test."""
    started: list[Started] = []

    def begin(*arguments: str, code: str | None = None) -> Started:
        started.append(Started(tmp_path, *arguments, code=code))
        return started[-1]

    yield begin
    for process in started:
        process.clean_up()
