"""The paper's side tables for a stored study, from its raw records.

They show worst-case forgetting, families of methods, violations per task, time and memory. Beside
our numbers are the published ones, where the recipe has them (Chaudhry, Ranzato, Rohrbach,
Elhoseiny: Efficient Lifelong Learning with A-GEM, ICLR 2019, appendix, and the authors' plotting
notebook). `companions_view` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from onepass.engine.slots import Slots
from onepass.errors import InputError, first_line
from onepass.learners import method
from onepass.metrics import Record, Summary
from onepass.report.table import summaries
from onepass.streams import stream
from onepass.streams.base import TASKS
from onepass.studies.recipe import Recipe, from_stored
from onepass.studies.results import Result, evaluation, results
from onepass.studies.store import Store

NUMBER = 4  # bytes of a float32
METRICS = (
    "A_T",
    "F_T",
    "worst_forgetting",
    "memory_accuracy",
    "memory_worst_forgetting",
    "violations",
    "seconds",
)


@dataclass(frozen=True)
class Sizes:
    """The letters of the paper's formulas for a recipe, and the bytes of one stored example.

    M is "the size of the episodic memory M per task" in the caption of the paper's table; `M_all`
    is that of all tasks together.
    """

    P: int
    B: int
    H: int
    M: int
    M_all: int
    T: int
    example: int


@dataclass(frozen=True)
class Formula:
    """The paper's formula of what a method holds while it trains, in bytes.

    The terms in P are those without activations (without H); all terms count the memory of one
    task, or that of all tasks.
    """

    text: str
    terms_in_P: int
    all_terms: int
    all_terms_M_all: int


@dataclass(frozen=True)
class State:
    """Bytes of a run's state at its end, in parts, and all of them at the end of each task."""

    parameters: int
    examples: int
    rest: int
    total: int
    by_task: list[int] | None


@dataclass(frozen=True)
class Published:
    """What the paper has on a method: `[mean]` or `[mean, deviation]` per metric, or a failure."""

    outcome: str | None
    metrics: dict[str, list[float]]
    violations_by_task: list[int] | None
    seconds: float | None
    state: Formula | None


@dataclass(frozen=True)
class Companion:
    """One method of a study. `trouble` says why it has no numbers, if it has none.

    The seconds of a run are its share of the time of its fleet; `fleets` has the numbers of runs
    that the fleets had, `fleet_seconds` is the mean time of a whole fleet, and `faster` the paper's
    seconds divided by ours (none if the study has other settings than the paper).
    """

    method: str
    trouble: str | None
    runs: int
    ours: dict[str, Summary]
    violations_by_task: list[float] | None
    counts_violations: bool
    fleets: list[int]
    fleet_seconds: float | None
    faster: float | None
    state: State | None
    paper: Published


@dataclass(frozen=True)
class Companions:
    """The side tables of a study."""

    recipe: str
    seeds: int
    changes: list[str]
    devices: list[str]
    sizes: Sizes
    methods: list[Companion]


def sizes(recipe: Recipe) -> Sizes:
    """Count P and H of the recipe's network, built without values.

    H are its hidden units, "the total size of the network hidden state": of a residual network the
    numbers in the feature maps behind its batch-norms.

    >>> from onepass.studies.recipe import load
    >>> sizes(load("permuted-mnist"))
    Sizes(P=269322, B=10, H=512, M=250, M_all=4250, T=17, example=784)
    >>> sizes(load("split-cifar"))
    Sizes(P=1106825, B=10, H=192000, M=65, M_all=1105, T=17, example=3072)
    """
    entry, setup, tasks = stream(recipe.stream), recipe.setup(), TASKS["ev"]
    shape = entry.kind.shape
    outputs = Slots(entry.heads("ev", recipe.make_stream_options())).count
    try:
        with torch.device("meta"):
            network = setup.build(shape, outputs)
    except RuntimeError as reason:
        raise InputError(
            f"the network of this study cannot be built ({first_line(reason)}):"
            f" hidden={list(setup.hidden[:5])} is too large"
        ) from None
    hidden = _feature_maps(network, shape) if setup.convolutional else sum(setup.hidden)
    parameters, memory = sum(p.numel() for p in network.parameters()), setup.memory_per_task
    example = math.prod(shape)
    return Sizes(parameters, setup.batch_size, hidden, memory, tasks * memory, tasks, example)


def _feature_maps(network: nn.Module, shape: tuple[int, ...]) -> int:
    made: list[int] = []
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.register_forward_hook(lambda _, __, out: made.append(out.numel()))
    height, width, channels = shape
    network.eval()(torch.empty(1, channels, height, width, device="meta"))
    return sum(made)


def formula(terms: Mapping[str, int], size: Sizes) -> Formula:
    """A sum of products of the letters, evaluated: `4 Σ factor · Π letters` bytes.

    >>> formula({"P": 2, "B*H": 1, "M*H": 1}, Sizes(P=100, B=2, H=5, M=3, M_all=6, T=2, example=1))
    Formula(text='2*P + B*H + M*H', terms_in_P=800, all_terms=900, all_terms_M_all=960)
    """
    letters = {"P": size.P, "B": size.B, "H": size.H, "M": size.M, "T": size.T}

    def value(values: Mapping[str, int], activations: bool = True) -> int:
        chosen = {term: factor for term, factor in terms.items() if activations or "H" not in term}
        return NUMBER * sum(
            factor * math.prod(values[letter] for letter in term.split("*"))
            for term, factor in chosen.items()
        )

    text = " + ".join(term if factor == 1 else f"{factor}*{term}" for term, factor in terms.items())
    return Formula(
        text, value(letters, activations=False), value(letters), value(letters | {"M": size.M_all})
    )


def collect(folder: Path) -> Companions:
    """Everything the side tables show, from the raw records of a study."""
    with Store.read(folder) as store:
        recipe = from_stored(store.contents.study["recipe"])
        changes, size = recipe.changes(), sizes(recipe)
        made: list[Companion] = []
        devices: set[str] = set()
        for name, result in results(recipe, store).items():
            wanted = evaluation(recipe, name, result.hyperparameters) if result.records else []
            done = [unit.id for unit in wanted if unit.id in store.contents.records]
            devices |= {store.contents.records[unit].provenance.device for unit in done}
            shared = [store.trained_together(unit) for unit in done]
            made.append(_companion(recipe, result, shared, size, compare=not changes))
    return Companions(recipe.name, recipe.seeds, changes, sorted(devices), size, made)


def _companion(
    recipe: Recipe, result: Result, shared: list[int], size: Sizes, compare: bool
) -> Companion:
    """`shared` has the number of runs of its fleet for each of the records."""
    paper, trouble = _published(recipe, result.method, size), _trouble(result)
    records = [] if trouble else result.records
    found = {name: summary for name, summary in summaries(result).items() if name in METRICS}
    every = [*result.records, *result.cross_validation]
    counted = [record.violations for record in records if record.violations is not None]
    seconds = found["seconds"].mean
    fleet_seconds, faster = None, None
    if records:
        pairs = zip(records, shared, strict=True)
        fleet_seconds = float(np.mean([record.seconds * runs for record, runs in pairs]))
    if compare and paper.seconds is not None and seconds:
        faster = paper.seconds / seconds
    return Companion(
        method=result.method,
        trouble=trouble,
        runs=len(result.records),
        ours=found,
        violations_by_task=[float(mean) for mean in np.mean(counted, axis=0)] if counted else None,
        counts_violations=any(record.violations is not None for record in every),
        fleets=sorted(set(shared)),
        fleet_seconds=fleet_seconds,
        faster=faster,
        state=_state(result.method, records[0], size) if records else None,
        paper=paper,
    )


def _trouble(result: Result) -> str | None:
    """Why a method has no numbers, in a word, and in how many of its runs or units."""
    lost = sum(record.diverged for record in result.records)
    if lost:
        return f"diverged: {lost} of {len(result.records)} runs"
    if result.diverged:
        return "diverged: every grid point"
    if result.records:
        return None
    return (
        f"failed: {len(result.failed)} units" if result.failed else f"to do: {result.missing} units"
    )


def _state(name: str, record: Record, size: Sizes) -> State:
    parameters = NUMBER * size.P
    examples = size.M_all * size.example if method(name).learner.needs.memory else 0
    return State(
        parameters,
        examples,
        record.state_bytes - parameters - examples,
        record.state_bytes,
        record.state_by_task,
    )


def _published(recipe: Recipe, name: str, size: Sizes) -> Published:
    found, side = recipe.paper.published.get(name, {}), recipe.paper.companions
    outcome, numbers = (found, {}) if isinstance(found, str) else (None, found)
    return Published(
        outcome=outcome,
        metrics={metric: values for metric, values in numbers.items() if metric in METRICS},
        violations_by_task=side.violations.get(name),
        seconds=side.seconds.get(name),
        state=formula(side.state[name], size) if name in side.state else None,
    )


def document(found: Companions) -> dict[str, Any]:
    """The tables as data: fractions in [0, 1], one value per seed, null for what is no number."""
    methods = {companion.method: asdict(companion) for companion in found.methods}
    return asdict(found) | {"methods": methods}
