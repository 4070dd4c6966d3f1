"""A stream without boundaries, whose classes come and go.

Handwritten digits drift: at first 0 to 4 are seen, in the end 5 to 9, and the order in which the
sensor delivers the pixels changes on the way. That makes six concepts, each with five digits and an
order of its own. The stream moves from one to the next by mixing them, so that no batch is the end
of a concept, and the learner is told nothing about them. The network starts with two outputs and
gets more as new digits appear. The memory of the past has a budget in bytes that it never exceeds,
however long the stream.

    python examples/task_free.py --seeds 5 --method a-gem
"""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from onepass import Memory, OnePass

CONCEPTS, DIGITS = 6, 5  # concept k has the digits k, k + 1, …, k + 4
TEST_IMAGES = 360
LEARNING_RATE = 0.05  # of both methods
BATCH = 10
BUDGET = 500_000  # bytes: about 960 of the 3 600 examples

Concept = tuple[Tensor, Tensor]


def stream(seed: int, examples: int) -> tuple[Concept, list[Concept]]:
    """Images and digits as they come, and test images and digits of each concept.

    The stream has `examples` of each concept on average.
    """
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(digits)
    x = (x - x.mean()) / x.std()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)

    # Between k and k + 1, the nearer concept is the likelier one: rounding up or down at random
    # moves smoothly from each to the next.
    position = torch.linspace(-0.5, CONCEPTS - 0.5, CONCEPTS * examples).clamp(0, CONCEPTS - 1)
    concept = (position + torch.rand(len(position), generator=generator)).floor()
    seen_x = torch.empty(len(position), 64)
    seen_y = torch.empty(len(position), dtype=torch.int64)
    tests = []
    for k in range(CONCEPTS):
        rows = order[(y[order] >= k) & (y[order] < k + DIGITS)]
        pixels = torch.randperm(64, generator=generator)
        test = rows[torch.isin(rows, order[:TEST_IMAGES])]
        tests.append((x[test][:, pixels], y[test]))
        places = (concept == k).nonzero()[:, 0]
        # Each image occurs at most once in a concept.
        training = rows[torch.isin(rows, order[TEST_IMAGES:])][: len(places)]
        seen_x[places] = x[training][:, pixels]
        seen_y[places] = y[training]
    return (seen_x, seen_y), tests


def learn(method: str, seed: int, examples: int) -> tuple[float, float]:
    """Accuracy in % on test images of the old concepts, and of the last one, after the stream."""
    (images, digits), tests = stream(seed, examples)
    torch.manual_seed(seed)  # van and the other method begin with the same weights
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 2))
    # The last 50 batches are the present; the reference batch is drawn from what is older.
    past = Memory(bytes=BUDGET, recent=50)
    learner = OnePass(
        net, method, learning_rate=LEARNING_RATE, task_free=True, grow=True, memory=past, seed=seed
    )
    for x, y in zip(torch.split(images, BATCH), torch.split(digits, BATCH), strict=True):
        learner.observe(x, y)
    assert learner.memory is None or learner.memory.nbytes <= BUDGET
    accuracy = [100 * (learner.predict(x) == y).double().mean().item() for x, y in tests]
    return fmean(accuracy[:-1]), accuracy[-1]


def measure(
    methods: list[str], seeds: int, examples: int = 600
) -> dict[str, list[tuple[float, float]]]:
    """(old concepts, last one) for each seed, for each method."""
    return {method: [learn(method, seed, examples) for seed in range(seeds)] for method in methods}


def main(argv: list[str] | None = None) -> None:
    description = "A stream without boundaries, whose classes come and go."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=5)
    at_most = "of each concept, at most 600: there are not many more images"
    parser.add_argument("--examples", type=int, default=600, help=at_most)
    methods = ["a-gem", "er", "mega-1", "mega-2"]
    compared = "what van is compared with"
    parser.add_argument("--method", default="a-gem", choices=methods, help=compared)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other

    found = measure(["van", given.method], given.seeds, given.examples)
    setting = f"{CONCEPTS} concepts, {given.seeds} seeds, learning rate {LEARNING_RATE}"
    print(f"{setting}: accuracy in %, mean ± standard deviation")
    print(f"{'method':10}{'old concepts':>15}{'last concept':>15}")
    for method, scores in found.items():
        cells = [f"{fmean(x):8.1f} ± {pstdev(x):4.1f}" for x in zip(*scores, strict=True)]
        print(f"{method:10}{''.join(cells)}")
    kept = {method: fmean(old for old, _ in scores) for method, scores in found.items()}
    more = kept[given.method] - kept["van"]
    print(f"{given.method} keeps {more:.1f} points more of the old concepts than van")


if __name__ == "__main__":
    main()
