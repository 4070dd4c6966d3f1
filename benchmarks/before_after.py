"""Two versions of the source, measured in turns in one run: what a change costs.

    python benchmarks/before_after.py BEFORE AFTER [--rounds 7]
                                      [--only steps,wrapper,modules,quickstart]

BEFORE and AFTER are checkouts (`git worktree add /tmp/before REVISION`). Every round runs each
measurement once with either, in alternating order, in a process of its own with one thread. The
table has the median of the rounds' ratios AFTER / BEFORE and their quartiles:

- `steps`: microseconds per run-step as `onepass bench` measures them, for van, ewc and a-gem;
- `wrapper`: a step of `OnePass` around small nets and a residual one, and `predict`;
- `modules`: a step of `OnePass` over the plain steps it consists of, by `benchmarks/wrapper.py`;
- `quickstart`: seconds of `onepass run quickstart`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import heading, parser, row

WRAPPER = """
import json, sys, time
import torch
from onepass import OnePass
from onepass.models.mlp import mlp
from onepass.models.resnet import ResNet
torch.set_num_threads(1)
torch.manual_seed(0)
found = {}
nets = {
    "small net": (mlp(16, [32], 10), (16,), 32, 3000),
    "784-256-256-10": (mlp(784, [256, 256], 10), (784,), 256, 200),
    "ResNet-18 (reduced)": (ResNet(20, 10), (3, 32, 32), 32, 8),
}
for name, (net, shape, reference, steps) in nets.items():
    learner = OnePass(net, learning_rate=0.001, reference_batch=reference)
    x, y = torch.randn(10, *shape), torch.arange(10)
    for _ in range(2):
        for _ in range(max(3, 2 * reference // 10)):
            learner.observe(x + torch.randn_like(x), y)
        learner.end_task()
    calls = {"observe": lambda: learner.observe(x, y), "predict": lambda: learner.predict(x)}
    for what, call in calls.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(steps):
                call()
            times.append((time.perf_counter() - began) / steps)
        found[f"{what}, {name}"] = sorted(times)[1]
print(json.dumps(found))
"""


def run(tree: Path, *arguments: str) -> str:
    """What Python prints with these arguments and the source of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def steps(tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        measured = ["--methods", "van,ewc,a-gem", "--runs", "1,5", "--rounds", "3"]
        run(tree, "-m", "onepass", "bench", *measured, "--json", str(path))
        found = json.loads(path.read_text())["rows"]
    return {f"{one['method']}, {one['runs']} runs": one["ours"] for one in found}


def wrapper(tree: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(run(tree, "-c", WRAPPER))
    return found


def modules(tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrapper.md"
        program = str(Path(__file__).with_name("wrapper.py"))
        run(tree, program, "--rounds", "10", "--markdown", str(path))
        lines = path.read_text().splitlines()[2:]
    ratios = {}
    for line in lines:
        name, _, plain, on_reference, agem, *_ = line.strip("| ").split(" | ")
        ratios[f"A-GEM over plain steps, {name}"] = float(agem) / (
            float(plain) + float(on_reference)
        )
    return ratios


def quickstart(tree: Path) -> dict[str, float]:
    began = time.perf_counter()
    run(tree, "-m", "onepass", "run", "quickstart")
    return {"onepass run quickstart": time.perf_counter() - began}


MEASUREMENTS = {"steps": steps, "wrapper": wrapper, "modules": modules, "quickstart": quickstart}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("before", type=Path)
    arguments.add_argument("after", type=Path)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--only", default=",".join(MEASUREMENTS))
    given = arguments.parse_args()
    ratios: dict[str, list[float]] = {}
    for number in range(given.rounds):
        for name in given.only.split(","):
            order = (given.before, given.after) if number % 2 == 0 else (given.after, given.before)
            times = {tree: MEASUREMENTS[name](tree) for tree in order}
            for what, after in times[given.after].items():
                ratios.setdefault(what, []).append(after / times[given.before][what])
    print("\n".join(heading("what", "after / before, median", "quartiles")))
    for what, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        print(row(what, f"{middle:.3f}", f"{low:.3f} – {high:.3f}"))


if __name__ == "__main__":
    main()
