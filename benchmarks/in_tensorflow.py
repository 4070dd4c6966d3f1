"""Learning curves of plain SGD and A-GEM on Permuted MNIST in plain TensorFlow.

    pip install tensorflow-cpu
    python benchmarks/in_tensorflow.py {van,a-gem} --data FOLDER_OF_THE_FOUR_MNIST_FILES
                                       [--learning-rate 0.03] [--runs 5] [--first 0]

Nothing of this package is used: so it shows which side a difference from the paper comes from.
Permutations, the order of examples, and what A-GEM keeps and draws come from numpy's generator,
called in the same order as in the A-GEM authors' scripts. These seed it with `1234 + r` in run `r`,
but then read MNIST by `tensorflow.examples.tutorials.mnist`, whose `DataSet` seeds it again, with
the seed of the graph: 1234. So their five runs have the same tasks in the same order and differ in
their initial weights alone, and so do the runs here. Initial weights are TensorFlow's own truncated
normal numbers, though not those of 2018. `--first` leaves out the runs before. A run takes 1 (van)
to 10 (a-gem) minutes on one core.
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

TASKS = 17
STEPS = 5500  # of a task
BATCH = 10
BETA = 10  # steps of a learning curve
PER_CLASS = 25  # examples kept
REFERENCE = 256

# What the paper chose.
LEARNING_RATES = {"van": 0.03, "a-gem": 0.1}


def read(folder: Path, name: str) -> np.ndarray:
    raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


class Network:
    """784-256-256-10 with its steps as a graph, trained by plain SGD.

    Weights come from a truncated normal distribution, biases are 0.1.
    """

    def __init__(self, learning_rate: float) -> None:
        tf1 = tf.compat.v1
        tf1.disable_eager_execution()
        tf1.set_random_seed(1234)
        self.x = tf1.placeholder(tf.float32, [None, 784])
        self.y = tf1.placeholder(tf.int64, [None])
        h, parameters = self.x, []
        normal = tf1.truncated_normal_initializer(stddev=0.1)
        constant = tf1.constant_initializer(0.1)
        for i, (before, after) in enumerate(((784, 256), (256, 256), (256, 10))):
            weights = tf1.get_variable(f"w{i}", [before, after], initializer=normal)
            biases = tf1.get_variable(f"b{i}", [after], initializer=constant)
            parameters += [weights, biases]
            h = tf.matmul(h, weights) + biases
            h = tf.nn.relu(h) if i < 2 else h
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        loss = tf.reduce_mean(cross_entropy(labels=self.y, logits=h))
        self.accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(h, 1), self.y), tf.float32))
        optimiser = tf1.train.GradientDescentOptimizer(learning_rate)
        g = tf.gradients(loss, parameters)
        self.step = optimiser.apply_gradients(zip(g, parameters, strict=True))
        zeros = tf1.zeros_initializer()
        reference = [
            tf1.get_variable(f"r{i}", p.shape, initializer=zeros, trainable=False)
            for i, p in enumerate(parameters)
        ]
        self.remember = tf.group(*[tf1.assign(r, v) for r, v in zip(reference, g, strict=True)])
        dot = tf.add_n([tf.reduce_sum(r * v) for r, v in zip(reference, g, strict=True)])
        square = tf.add_n([tf.reduce_sum(r * r) for r in reference])
        share = tf.where(dot < 0, dot / square, 0.0)
        self.projected_step = optimiser.apply_gradients(
            [(v - share * r, p) for v, r, p in zip(g, reference, parameters, strict=True)]
        )
        self.violated = tf.cast(dot < 0, tf.int32)
        self.initialise = tf1.global_variables_initializer()
        threads = {"intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 1}
        self.session = tf1.Session(config=tf1.ConfigProto(**threads))

    def run(self, what: object, x: np.ndarray, y: np.ndarray) -> Any:
        return self.session.run(what, {self.x: x, self.y: y})


def runs(
    network: Network, method: str, count: int, first: int, folder: Path
) -> Iterator[tuple[float, float, int]]:
    """`A_T`, the mean area under the learning curves, and the violations of each run."""
    x = read(folder, "train-images-idx3-ubyte").reshape(-1, 784)[5000:].astype(np.float32) / 255
    y = read(folder, "train-labels-idx1-ubyte")[5000:].astype(np.int64)
    test_x = read(folder, "t10k-images-idx3-ubyte").reshape(-1, 784).astype(np.float32) / 255
    test_y = read(folder, "t10k-labels-idx1-ubyte").astype(np.int64)
    for number in range(count):
        network.session.run(network.initialise)
        if number < first:
            continue
        np.random.seed(1234)
        permutations = [list(range(784)) for _ in range(TASKS)]
        for permutation in permutations:
            np.random.shuffle(permutation)
        memory_x, memory_y = np.zeros((0, 784), np.float32), np.zeros(0, np.int64)
        curves, violations = np.zeros((TASKS, BETA + 1)), 0
        for task, permutation in enumerate(permutations):
            order = np.arange(len(x))
            np.random.shuffle(order)
            task_x, task_y, seen = x[order][:, permutation], y[order], test_x[:, permutation]
            for step in range(STEPS):
                if step <= BETA:
                    curves[task, step] = network.run(network.accuracy, seen, test_y)
                start = step * BATCH % (len(x) - BATCH)
                batch = task_x[start : start + BATCH], task_y[start : start + BATCH]
                if method == "van" or task == 0:
                    network.run(network.step, *batch)
                    continue
                reference = memory_x, memory_y
                if len(memory_y) > REFERENCE:
                    drawn = np.random.choice(len(memory_y), REFERENCE, replace=False)
                    reference = memory_x[drawn], memory_y[drawn]
                network.run(network.remember, *reference)
                _, violated = network.run([network.projected_step, network.violated], *batch)
                violations += violated
            for label in range(10) if method == "a-gem" and task < TASKS - 1 else ():
                members = np.flatnonzero(y == label)
                # With probabilities numpy draws other numbers than without.
                evenly = np.ones(len(members), np.float32) / np.float32(len(members))
                kept = np.random.choice(members, PER_CLASS, p=evenly, replace=False)
                memory_x = np.concatenate([memory_x, x[kept][:, permutation]])
                memory_y = np.concatenate([memory_y, y[kept]])
        accuracies = [network.run(network.accuracy, test_x[:, p], test_y) for p in permutations]
        area = np.mean(np.trapezoid(curves, axis=1) / BETA)
        yield float(np.mean(accuracies)), float(area), violations


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("method", choices=["van", "a-gem"])
    parser.add_argument("--data", type=Path, required=True)
    as_chosen = "0.03 for van and 0.1 for a-gem, as the paper chose, if not given"
    parser.add_argument("--learning-rate", type=float, help=as_chosen)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    if not (given.data / "train-images-idx3-ubyte.gz").is_file():
        missing = f"{given.data} has no train-images-idx3-ubyte.gz"
        parser.error(f"{missing}: give the folder of the four gzipped files of MNIST")
    if not 0 <= given.first < given.runs:
        parser.error("nothing to do: --first must be below --runs")
    learning_rate = given.learning_rate or LEARNING_RATES[given.method]
    print(f"{given.method} at {learning_rate:g}, TensorFlow {tf.__version__}\n")
    print("| run | A_T | LCA_10 (trapezoid) | violations |\n|---|---|---|---|")
    found = []
    done = runs(Network(learning_rate), given.method, given.runs, given.first, given.data)
    for number, (final, area, violations) in enumerate(done, given.first):
        found.append((final, area, violations))
        print(f"| {number} | {final:.4f} | {area:.4f} | {violations} |", flush=True)
    mean, spread = np.mean(found, 0), np.std(found, 0)
    cells = [f"{m:.4g} ± {s:.2g}" for m, s in zip(mean, spread, strict=True)]
    print(f"| mean ± spread | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
