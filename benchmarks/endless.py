"""A stream that does not end: resident memory and step time of `OnePass` stay what they are.

    python benchmarks/endless.py [--batches 1000000] [--windows 20]

A tiny net, A-GEM without task boundaries, batches of 4 out of a concept that drifts, labels that
appear on the way. Printed for each window of the stream: megabytes resident at its end,
microseconds of CPU per step in it, and the bytes of the memory.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from common import parser
from onepass import Memory, OnePass

BUDGET = 200_000  # bytes of the memory


def resident() -> float:
    """Megabytes of this process in main memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--batches", type=int, default=1_000_000)
    arguments.add_argument("--windows", type=int, default=20)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    learner = OnePass(
        module, learning_rate=0.01, task_free=True, memory=Memory(bytes=BUDGET), reference_batch=16
    )
    noise = torch.randn(1000, 4, 8)
    length = chosen.batches // chosen.windows
    for window in range(chosen.windows):
        began = time.process_time()
        for step in range(window * length, (window + 1) * length):
            x = noise[step % 1000] + 2.0 * (step / chosen.batches)
            learner.observe(x, (x[:, 0] > x[:, 1]).long() + 2 * (step * 5 // chosen.batches))
        spent = (time.process_time() - began) / length
        assert learner.memory is not None
        found = {
            "batches": learner.steps,
            "megabytes": round(resident(), 1),
            "microseconds": round(1e6 * spent, 1),
            "memory_bytes": learner.memory.nbytes,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
