"""Two versions of the source, measured in turns in one run: what a change costs.

    python benchmarks/before_after.py BEFORE AFTER [--rounds 7] [--only steps,wrapper]

BEFORE and AFTER are checkouts (`git worktree add /tmp/before REVISION`). Every round runs each
measurement once with either, in alternating order, in a process of its own with one thread. The
table has the median of the rounds' ratios AFTER / BEFORE and their quartiles:

- `steps`: microseconds per run-step as `onepass bench` measures them, for van, ewc and a-gem;
- `wrapper`: a step of `OnePass` around small nets and a residual one, and `predict`;
- `modules`: a step of `OnePass` over the plain steps that it consists of (`wrapper.py`);
- `quickstart`: seconds of `onepass run quickstart`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from revisions import run

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


def steps(tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        options = ["--methods", "van,ewc,a-gem", "--runs", "1,5", "--rounds", "3"]
        run(tree, ["-m", "onepass", "bench", *options, "--json", str(path)])
        rows = json.loads(path.read_text())["rows"]
    return {f"{row['method']}, {row['runs']} runs": row["ours"] for row in rows}


def wrapper(tree: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(run(tree, ["-c", WRAPPER]))
    return found


def modules(tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrapper.md"
        program = str(Path(__file__).with_name("wrapper.py"))
        run(tree, [program, "--rounds", "10", "--markdown", str(path)])
        rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines()[2:]]
    return {
        f"A-GEM over plain steps, {row[0]}": float(row[4]) / (float(row[2]) + float(row[3]))
        for row in rows
    }


def quickstart(tree: Path) -> dict[str, float]:
    began = time.perf_counter()
    run(tree, ["-m", "onepass", "run", "quickstart"])
    return {"onepass run quickstart": time.perf_counter() - began}


def main() -> None:
    measurements = {
        "steps": steps,
        "wrapper": wrapper,
        "modules": modules,
        "quickstart": quickstart,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(measurements))
    given = parser.parse_args()
    ratios: dict[str, list[float]] = {}
    for number in range(given.rounds):
        for name in given.only.split(","):
            order = (given.before, given.after) if number % 2 == 0 else (given.after, given.before)
            times = {tree: measurements[name](tree) for tree in order}
            for what, after in times[given.after].items():
                ratios.setdefault(what, []).append(after / times[given.before][what])
    print("| what | after / before, median | quartiles |\n|---|---|---|")
    for what, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        print(f"| {what} | {middle:.3f} | {low:.3f} – {high:.3f} |")


if __name__ == "__main__":
    main()
