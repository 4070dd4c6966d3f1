"""Seconds that a stream of the paper takes at full length, all seeds in one fleet: 17 tasks of 5 500 steps (Permuted MNIST) or 250 (Split CIFAR).

    python benchmarks/full_length.py [--recipe permuted-mnist] --data DIR [--device cuda] [--methods van,ewc,a-gem,gem] [--seeds 5]
                                     [--no-evaluation] [--exact] [--set KEY=VALUE …] [--markdown FILE]

Hyper-parameters are those that the paper chose (its grids for GEM are not known: learning rate 0.1 and margin 0.5, those of GEM's own code).
`wall` is everything from the first byte on the device to the last accuracy: building the fleet, tracing, capturing, training, evaluating. What
a process does once, starting CUDA and its libraries, is done before by a short training of the same method. `training` leaves evaluation out.
With `--seeds 1 --no-evaluation` these are the seconds of the paper's time table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

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
    train(
        stream,
        "cv",
        METHODS[method],
        [run, run],
        recipe.setup(),
        recipe.method_options(method),
        device=device,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", default="permuted-mnist", choices=["permuted-mnist", "split-cifar"]
    )
    parser.add_argument("--data", help="the folder of data sets; or ONEPASS_DATA")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default="van,ewc,a-gem,gem")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument("--exact", action="store_true", help="products in float32, not TF32")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="changes of the recipe, as for 'onepass run'",
    )
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    methods = arguments.methods.split(",")
    try:
        recipe = load(
            arguments.recipe,
            [*arguments.set, *(["tf32=false"] if arguments.exact else [])],
            methods=arguments.methods,
        )
        unchosen = [
            method for method in methods if method not in {*recipe.paper.selected, *UNPUBLISHED}
        ]
        if unchosen:
            raise InputError(
                f"the paper chose nothing for {unchosen[0]}: take some of {', '.join([*recipe.paper.selected, *UNPUBLISHED])}"
            )
        folder = locate(streams.stream(recipe.stream).data or "", arguments.data)
        stream = open_stream(recipe, folder)
        little = open_stream(
            load(arguments.recipe, ["train_examples=100", "test_examples=100"]), folder
        )
    except InputError as reason:
        parser.error(str(reason))
    paper = recipe.paper.companions.seconds  # a run, its table of training times
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    lines = [
        f"{device}, torch {torch.__version__}, {arguments.seeds} runs in one fleet, {'float32' if arguments.exact else 'TF32'}",
        "",
        "| method | wall s | training s | training s a run | paper's s a run | A_T % |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for method in methods:
        chosen = recipe.paper.selected.get(method) or UNPUBLISHED[method]
        warm_up(recipe, little, method, arguments.device)
        began = time.perf_counter()
        runs = [Run(seed, chosen) for seed in range(arguments.seeds)]
        options = recipe.method_options(method)
        evaluate = not arguments.no_evaluation
        records = train(
            stream,
            "ev",
            METHODS[method],
            runs,
            recipe.setup(),
            options,
            device=arguments.device,
            evaluate=evaluate,
        )
        wall = time.perf_counter() - began
        share = records[0].seconds
        accuracies = [100 * average_accuracy(record.accuracy) for record in records]
        score = f"{np.mean(accuracies):.2f} ± {np.std(accuracies):.2f}" if evaluate else "–"
        lines.append(
            f"| {method} | {wall:.1f} | {share * len(records):.1f} | {share:.2f} | {paper.get(method, '–')} | {score} |"
        )
        print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
