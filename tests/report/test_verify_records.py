"""The records in the repository, and what the docs say about them."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from onepass.learners import METHODS
from onepass.protocol import Run, assemble
from onepass.recording import BETA, accuracy
from onepass.report.table import summaries
from onepass.report.verify import verify
from onepass.studies.fetch import locate
from onepass.studies.recipe import load
from onepass.studies.results import evaluation, results
from onepass.studies.store import Store
from onepass.studies.work import open_stream

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results"
DIFFERENT = {
    "permuted-mnist": {
        "van": {"A_T"},
        "gem": {"A_T", "LCA_10_trapezoid"},
        "a-gem": {"LCA_10_trapezoid"},
    },
    "split-cifar": {
        "icarl": {"A_T", "F_T", "worst_forgetting"},
        "ewc": {"LCA_10_trapezoid"},
        "pi": {"A_T", "F_T", "worst_forgetting", "LCA_10_trapezoid"},
        "mas": {"F_T", "worst_forgetting"},
        "rwalk": {"F_T"},
        "gem": {"A_T"},
        "s-gem": {"A_T", "F_T"},
        "multi-task": {"A_T"},
    },
}
UNEXPLAINED: dict[str, set[str]] = {"permuted-mnist": set(), "split-cifar": {"gem", "s-gem"}}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_verdict_on_the_record_is_the_one_in_the_docs(name: str) -> None:
    found = verify(RECORDS / name)
    assert not found.changes
    different: dict[str, set[str]] = {}
    for one in found.comparisons:
        if one.verdict == "differs":
            different.setdefault(one.method, set()).add(one.metric)
    assert different == DIFFERENT[name]
    assert {one.method for one in found.comparisons if not one.accepted} == UNEXPLAINED[name]


@pytest.mark.parametrize(
    ("recipe_name", "title"), [("permuted-mnist", "Permuted MNIST"), ("split-cifar", "Split CIFAR")]
)
def test_the_table_in_the_docs_is_that_of_the_record(recipe_name: str, title: str) -> None:
    recipe = load(recipe_name)
    with Store.read(RECORDS / recipe_name) as store:
        done = {name: result for name, result in results(recipe, store).items() if result.finished}
    found = {name: summaries(result) for name, result in done.items()}
    page = (ROOT / "docs" / "reproduction.md").read_text()
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if re.match(r"\| \S+ \| lr ", line)
    ]
    assert [name for name, *_ in rows] == list(done)
    for name, *cells in rows:
        values = [100 * value for value in found[name]["A_T"].values if value is not None]
        ours = f"{np.mean(values):.1f} ± {np.std(values):.1f}" if values else "diverged"
        assert cells[2] == ours
        for cell, metric, digits in ((cells[4], "F_T", 2), (cells[6], "LCA_10_trapezoid", 3)):
            some = [value for value in found[name][metric].values if value is not None]
            assert cell == (f"{np.mean(some):.{digits}f}" if some and values else "")


@pytest.mark.parametrize("method", ["van", "rwalk", "a-gem"])
def test_this_machine_begins_as_the_record_does(method: str) -> None:
    if "ONEPASS_DATA" not in os.environ:
        pytest.skip("ONEPASS_DATA does not say where MNIST is")
    recipe = load("permuted-mnist")
    stream = open_stream(recipe, locate("mnist", None))
    chosen = recipe.paper.selected[method]
    units = evaluation(recipe, method, chosen)
    with Store.read(RECORDS / "permuted-mnist") as store:
        curves = np.stack([store.record(unit.id).curve[0] for unit in units], 1)
    rows, options = [Run(seed, chosen) for seed in range(5)], recipe.method_options(method)
    setup = recipe.setup()
    feed, fleet, learner = assemble(stream, "ev", METHODS[method], rows, setup, options)
    test = feed.test(0)
    learner.begin_task(0)
    found = [accuracy(fleet, learner, test)]
    for batch in islice(feed.batches(0), BETA):
        fleet.learn(learner, batch)
        found.append(accuracy(fleet, learner, test))
    assert np.abs(torch.stack(found).numpy() - curves).max() < 0.01  # TF32 there, float32 here
