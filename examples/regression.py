"""Numbers instead of classes: a loss and an optimizer of one's own, on tabular data that drifts.

A plant is run in six regimes, one after the other. The law that ties its eight sensors to the yield
is the same all along. But each regime keeps the sensors near a set point of its own, so the network
sees one region of the law at a time and bends the others out of shape. What is measured is how much
of the variance within each old regime is still explained (R², 100 is perfect, 0 is no better than
the regime's mean).

    python examples/regression.py --seeds 5 --method a-gem
"""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from onepass import Memory, OnePass

SENSORS = 8
APART = 3.0  # distance of the set points from the middle
SPREAD = 0.7  # of the readings around their set point
NOISE = 0.1  # of the measured yield, in standard deviations
TEST_ROWS = 300
LEARNING_RATE = 0.001  # of Adam, for both methods
BATCH = 20

Rows = tuple[Tensor, Tensor]


def plant(seed: int, regimes: int, rows: int) -> list[tuple[Rows, Rows]]:
    """Training and test rows (readings, yield) of each regime; the law is random and smooth."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    set_points = APART * torch.linalg.qr(normal(SENSORS, SENSORS))[0]
    slopes = normal(SENSORS, 40)
    offsets = normal(40)
    weights = normal(40, 1)

    def law(x: Tensor) -> Tensor:
        return torch.tanh(x @ slopes / 2 + offsets) @ weights

    # The mean and deviation of the whole plant scale the yield: targets of about unit size.
    typical = law(set_points.repeat(100, 1) + SPREAD * normal(100 * SENSORS, SENSORS))

    def observed(regime: int, count: int) -> Rows:
        x = set_points[regime] + SPREAD * normal(count, SENSORS)
        y = (law(x) - typical.mean()) / typical.std() + NOISE * normal(count, 1)
        return x, y

    return [(observed(regime, rows), observed(regime, TEST_ROWS)) for regime in range(regimes)]


def explained(predicted: Tensor, y: Tensor) -> float:
    """R² in %."""
    return 100 * (1 - (y - predicted).square().mean() / y.var(correction=0)).item()


def learn(method: str, seed: int, regimes: int, rows: int) -> tuple[float, float]:
    """R² in % on new rows of the old regimes (mean), and of the last one, after the stream."""
    torch.manual_seed(seed)  # van and the other method begin with the same weights
    model = nn.Sequential(
        nn.Linear(SENSORS, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
    )
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    # Any function of (outputs, y) that gives one number is a loss. Without classes the memory keeps
    # a uniform sample of each regime.
    loss = nn.functional.mse_loss
    memory = Memory(per_task=250)
    learner = OnePass(model, method, loss=loss, optimizer=adam, memory=memory, seed=seed)
    stream = plant(seed, regimes, rows)
    for (readings, yields), _ in stream:
        for x, y in zip(torch.split(readings, BATCH), torch.split(yields, BATCH), strict=True):
            learner.observe(x, y)
        learner.end_task()
    scores = [explained(learner.predict(x), y) for _, (x, y) in stream]
    return fmean(scores[:-1]), scores[-1]


def measure(
    methods: list[str], seeds: int, regimes: int = 6, rows: int = 3000
) -> dict[str, list[tuple[float, float]]]:
    """(old regimes, last one) for each seed, for each method."""
    return {
        method: [learn(method, seed, regimes, rows) for seed in range(seeds)] for method in methods
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Regression on tabular data that drifts.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--regimes", type=int, default=6, choices=range(2, SENSORS + 1))
    parser.add_argument("--rows", type=int, default=3000, help="of each regime")
    methods = ["a-gem", "gem", "s-gem", "er", "mega-1", "mega-2"]
    compared = "what van is compared with"
    parser.add_argument("--method", default="a-gem", choices=methods, help=compared)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other

    found = measure(["van", given.method], given.seeds, given.regimes, given.rows)
    setting = f"{given.regimes} regimes, {given.seeds} seeds, Adam at {LEARNING_RATE}"
    print(f"{setting}: R² in %, mean ± standard deviation")
    print(f"{'method':10}{'old regimes':>15}{'last regime':>15}")
    for method, scores in found.items():
        cells = [f"{fmean(x):8.1f} ± {pstdev(x):4.1f}" for x in zip(*scores, strict=True)]
        print(f"{method:10}{''.join(cells)}")
    kept = {method: fmean(old for old, _ in scores) for method, scores in found.items()}
    more = kept[given.method] - kept["van"]
    print(f"{given.method} keeps {more:.1f} points more of the old regimes than van")


if __name__ == "__main__":
    main()
