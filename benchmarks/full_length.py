"""Seconds that a stream of the paper takes at full length, all seeds in one fleet.

    python benchmarks/full_length.py [--recipe permuted-mnist] --data DIR [--device cuda]
                                     [--methods van,ewc,a-gem,gem] [--seeds 5] [--no-evaluation]
                                     [--exact] [--set KEY=VALUE …] [--markdown FILE]

The streams have 17 tasks of 5 500 steps (Permuted MNIST) or 250 (Split CIFAR). Hyper-parameters are
those that the paper chose (its grids for GEM are not known: learning rate 0.1 and margin 0.5, those
of GEM's own code). `wall` is everything from the first byte on the device to the last accuracy:
building the fleet, tracing, capturing, training, evaluating. What a process does once, starting
CUDA and its libraries, is done before by a short training of the same method. `training` leaves
evaluation out. With `--seeds 1 --no-evaluation` these are the seconds of the paper's time table.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from common import Lines, heading, machine, parser, row
from onepass import streams
from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.metrics import average_accuracy
from onepass.protocol import Run, train
from onepass.streams.base import Stream
from onepass.studies.fetch import locate
from onepass.studies.recipe import Recipe, load
from onepass.studies.work import open_stream

UNPUBLISHED = {
    "gem": {"learning_rate": 0.1, "margin": 0.5},
    "s-gem": {"learning_rate": 0.1},
    "er": {"learning_rate": 0.1},
    "icarl": {"learning_rate": 0.1, "distillation": 1.0},
}


def warm_up(recipe: Recipe, stream: Stream, method: str, device: str) -> None:
    """A short training of the same shapes."""
    run = Run(0, dict.fromkeys(METHODS[method].hyperparameters, 0.01))
    setup, options = recipe.setup(), recipe.method_options(method)
    train(stream, "cv", METHODS[method], [run, run], setup, options, device=device)


def main() -> None:
    arguments = parser(__doc__)
    recipes = ["permuted-mnist", "split-cifar"]
    arguments.add_argument("--recipe", default=recipes[0], choices=recipes)
    arguments.add_argument("--data", help="the folder of data sets; or ONEPASS_DATA")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--methods", default="van,ewc,a-gem,gem")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--no-evaluation", action="store_true")
    arguments.add_argument("--exact", action="store_true", help="products in float32, not TF32")
    changes = "changes of the recipe, as for 'onepass run'"
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=changes)
    arguments.add_argument("--markdown", type=Path)
    given = arguments.parse_args()
    keep_freed_memory()
    methods = given.methods.split(",")
    try:
        settings = [*given.set, "tf32=false"] if given.exact else given.set
        recipe = load(given.recipe, settings, methods=given.methods)
        known = UNPUBLISHED | recipe.paper.selected
        if unknown := [method for method in methods if method not in known]:
            offered = ", ".join([*recipe.paper.selected, *UNPUBLISHED])
            raise InputError(f"the paper chose nothing for {unknown[0]}: take some of {offered}")
        folder = locate(streams.stream(recipe.stream).data or "", given.data)
        stream = open_stream(recipe, folder)
        few_examples = ["train_examples=100", "test_examples=100"]
        small_stream = open_stream(load(given.recipe, few_examples), folder)
    except InputError as reason:
        arguments.error(str(reason))
    paper = recipe.paper.companions.seconds  # per run, in its table of training times
    precision = "float32" if given.exact else "TF32"
    columns = "method", "wall s", "training s", "training s per run", "paper's s per run", "A_T %"
    lines = Lines()
    lines.add(f"{machine(given.device)}, {given.seeds} runs in one fleet, {precision}", "")
    lines.add(*heading(*columns))
    for method in methods:
        warm_up(recipe, small_stream, method, given.device)
        began = time.perf_counter()
        runs = [Run(seed, known[method]) for seed in range(given.seeds)]
        setup, options = recipe.setup(), recipe.method_options(method)
        evaluate = not given.no_evaluation
        learner, device = METHODS[method], given.device
        records = train(
            stream, "ev", learner, runs, setup, options, device=device, evaluate=evaluate
        )
        wall = time.perf_counter() - began
        share = records[0].seconds
        accuracies = [100 * average_accuracy(record.accuracy) for record in records]
        score = f"{np.mean(accuracies):.2f} ± {np.std(accuracies):.2f}" if evaluate else "–"
        training = f"{share * len(records):.1f}", f"{share:.2f}"
        lines.add(row(method, f"{wall:.1f}", *training, paper.get(method, "–"), score))
    lines.write(given.markdown)


if __name__ == "__main__":
    main()
