"""What the results on a stream of the paper depend on: hyper-parameters varied, all their values and seeds side by side in one fleet on `D^EV`.

    python benchmarks/sensitivity.py METHOD HYPERPARAMETER=VALUE,VALUE,… … [--recipe permuted-mnist] [--seeds 10] [--set KEY=VALUE …]
                                     [--variant NAME] [--device cuda] [--data DIR] [--markdown FILE]

The other hyper-parameters are those that the paper chose. No cross-validation: this looks at `D^EV`, to explain a result and not to choose one. The
spread is that of single runs; a mean over five runs, as published, varies by its share of 1/√5. Single runs are printed too: seed by seed, two
settings differ by less than seeds do.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch
from full_length import UNPUBLISHED
from variants import VARIANTS

from onepass import streams
from onepass.engine.cpu import keep_freed_memory
from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.metrics import metrics
from onepass.protocol import Run, train
from onepass.studies.fetch import locate
from onepass.studies.recipe import load
from onepass.studies.work import open_stream

SHOWN = ("A_T", "F_T", "worst_forgetting", "LCA_10", "LCA_10_trapezoid", "violations")


def varied(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    try:
        return name, [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,VALUE,… such as learning_rate=0.03,0.1, got {text!r}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("varied", nargs="+", type=varied, help="such as learning_rate=0.03,0.1")
    parser.add_argument("--recipe", default="permuted-mnist", choices=["permuted-mnist", "split-cifar"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], help="as for onepass run")
    parser.add_argument("--variant", help="of variants.py: " + ", ".join(f"{name} of {method}" for method in VARIANTS for name in VARIANTS[method]))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    try:
        recipe = load(arguments.recipe, arguments.set)
        stream = open_stream(recipe, locate(streams.stream(recipe.stream).data or "", arguments.data))
    except InputError as reason:
        parser.error(str(reason))
    axes = dict(arguments.varied)
    known = UNPUBLISHED | recipe.paper.selected
    if not axes.keys() <= known.get(arguments.method, {}).keys() or arguments.seeds < 1:
        named = ", ".join(f"{method} ({', '.join(point)})" for method, point in known.items())
        parser.error(f"needs at least one seed, and one of these methods with a hyper-parameter of it: {named}")
    method = METHODS[arguments.method] if arguments.variant is None else VARIANTS.get(arguments.method, {}).get(arguments.variant)
    if method is None:
        parser.error(f"there is no variant {arguments.variant!r} of {arguments.method}: see --help")
    chosen = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    points = [known[arguments.method] | point for point in chosen]
    runs = [Run(seed, point) for point in points for seed in range(arguments.seeds)]
    options = recipe.method_options(arguments.method)
    records = train(stream, "ev", method, runs, recipe.setup(), options, device=arguments.device)
    written = [f"{name}={','.join(f'{value:g}' for value in values)}" for name, values in axes.items()]
    heads = [arguments.method, *(f"{metric} (single runs)" for metric in SHOWN)]
    command = ["python benchmarks/sensitivity.py", arguments.method, *written, f"--recipe {arguments.recipe} --seeds {arguments.seeds}"]
    command += [f"--set {setting}" for setting in arguments.set] + ([f"--variant {arguments.variant}"] if arguments.variant else [])
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    lines = [f"`{' '.join(command)}`, {where}, torch {torch.__version__}", ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    singles = []
    for number, point in enumerate(chosen):
        mine = [metrics(record) for record in records[number * arguments.seeds : (number + 1) * arguments.seeds]]
        cells = [", ".join(f"{name} {value:g}" for name, value in point.items())]
        for metric in SHOWN:
            found = [value for one in mine if (value := getattr(one, metric)) is not None]
            cells.append(f"{np.mean(found):.4g} ± {np.std(found):.2g}" if found else "–")
        lines.append("| " + " | ".join(cells) + " |")
        singles.append(
            f"`A_T` of seeds 0 to {arguments.seeds - 1} at {cells[0]}: {', '.join(f'{one.A_T:.4f}' for one in mine if one.A_T is not None)}"
        )
    lines += ["", *singles]
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
