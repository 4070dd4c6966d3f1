"""A stream of a million batches."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "endless.py"


@pytest.mark.long
def test_over_a_million_batches_resident_memory_and_step_time_are_flat() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    windows = [json.loads(line) for line in done.stdout.splitlines()]
    assert windows[-1]["batches"] == 1_000_000
    warm = windows[2:]  # by then the memory is full
    assert max(w["megabytes"] for w in warm) - min(w["megabytes"] for w in warm) < 10
    third = len(warm) // 3
    early, late = (
        statistics.median(w["microseconds"] for w in part) for part in (warm[:third], warm[-third:])
    )
    assert late < 1.25 * early
    assert all(w["memory_bytes"] <= 200_000 for w in windows)
