"""A network of one's own on a stream of tasks that are announced.

Six tasks of ten handwritten digits: every task reads the 8×8 pixels in an order of its own, as if
the sensor had been rewired. The network learns each new order in one pass over 1 437 images. In the
end it is tested on the old orders too. Labels never contradict each other, and the network has room
for all six orders: what is lost was overwritten.

    python examples/own_model.py --seeds 5 --method a-gem
"""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from onepass import Memory, OnePass

TEST_IMAGES = 360
LEARNING_RATE = 0.05  # of both methods
BATCH = 10


class Net(nn.Module):
    """Any module will do: onepass trains it where it is, and `net.state_dict()` stays its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 100)
        self.out = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.hidden(x)))
        return scores


def learn(method: str, seed: int, tasks: int) -> tuple[float, float]:
    """Accuracy in % on the test images of the old tasks, and of the last one, after the stream."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32), torch.tensor(digits)
    x = (x - x.mean()) / x.std()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    wirings = [torch.randperm(64, generator=generator) for _ in range(tasks)]

    torch.manual_seed(seed)  # van and the other method begin with the same weights
    memory = Memory(per_task=250)
    learner = OnePass(Net(), method, learning_rate=LEARNING_RATE, memory=memory, seed=seed)
    for wiring in wirings:
        data = TensorDataset(x[training][:, wiring], y[training])
        for inputs, labels in DataLoader(data, BATCH, shuffle=True, generator=generator):
            learner.observe(inputs, labels)
        # From now on the examples kept of this task are part of the past that must not get worse.
        learner.end_task()

    # `predict` is not told which task an image is from.
    accuracy = [
        100 * (learner.predict(x[test][:, wiring]) == y[test]).double().mean().item()
        for wiring in wirings
    ]
    return fmean(accuracy[:-1]), accuracy[-1]


def measure(methods: list[str], seeds: int, tasks: int = 6) -> dict[str, list[tuple[float, float]]]:
    """(old tasks, last task) for each seed, for each method."""
    return {method: [learn(method, seed, tasks) for seed in range(seeds)] for method in methods}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A network of one's own on permuted digits.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=6)
    methods = ["a-gem", "gem", "s-gem", "er", "mega-1", "mega-2"]
    compared = "what van is compared with"
    parser.add_argument("--method", default="a-gem", choices=methods, help=compared)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other

    found = measure(["van", given.method], given.seeds, given.tasks)
    setting = f"{given.tasks} orders of the pixels, {given.seeds} seeds"
    figures = "accuracy in %, mean ± standard deviation"
    print(f"{setting}, learning rate {LEARNING_RATE}: {figures}")
    print(f"{'method':10}{'old tasks':>15}{'last task':>15}")
    for method, scores in found.items():
        cells = [f"{fmean(x):8.1f} ± {pstdev(x):4.1f}" for x in zip(*scores, strict=True)]
        print(f"{method:10}{''.join(cells)}")
    kept = {method: fmean(old for old, _ in scores) for method, scores in found.items()}
    more = kept[given.method] - kept["van"]
    print(f"{given.method} keeps {more:.1f} points more of the old tasks than van")


if __name__ == "__main__":
    main()
