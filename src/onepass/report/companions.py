"""The paper's side tables for a stored study, from its raw records: worst-case forgetting, the GEM family, violations a task, time and memory.

Beside our numbers are the published ones, where the recipe has them (Chaudhry, Ranzato, Rohrbach, Elhoseiny: Efficient Lifelong Learning
with A-GEM, ICLR 2019, appendix, and the authors' plotting notebook).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
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
NONE = "–"
FAMILY = ("gem", "s-gem", "a-gem")
METRICS = (
    "A_T",
    "F_T",
    "worst_forgetting",
    "memory_accuracy",
    "memory_worst_forgetting",
    "violations",
    "seconds",
)

STATE = (
    "state is what a run keeps between steps: the parameters of one network, the examples of its episodic memory (as bytes), and the rest:"
    " importances and anchors, further columns, exemplars, label and task of each example in memory (16 bytes), and what rows are rounded up"
    " by on a GPU"
)
FORMULAS = (
    "the paper's formulas count numbers of 4 bytes. Their terms in H are activations, which are no state, so state compares with the terms in P;"
    " of these it lacks the gradients, since none is kept: the reference one in a-gem's 2*P, those of past tasks in gem's P*T. The formulas lack"
    " the memory's examples"
)


@dataclass(frozen=True)
class Sizes:
    """The letters of the paper's formulas for a recipe, and the bytes of one stored example.

    M is "the size of the episodic memory M per task" in the caption of the paper's table; `M_all` is that of all tasks together.
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
    """The paper's formula of what a method holds while it trains, in bytes: the terms without activations (those in H), and all terms, with
    the memory of one task and with that of all."""

    text: str
    terms_in_P: int
    all_terms: int
    all_terms_M_all: int


@dataclass(frozen=True)
class State:
    """Bytes of state of a run at the end, in parts, and all of them at the end of each task."""

    parameters: int
    examples: int
    rest: int
    total: int
    by_task: list[int] | None


@dataclass(frozen=True)
class Published:
    """What the paper has on a method: `[mean]` or `[mean, standard deviation]` a metric, or how it failed."""

    outcome: str | None
    metrics: dict[str, list[float]]
    violations_by_task: list[int] | None
    seconds: float | None
    state: Formula | None


@dataclass(frozen=True)
class Companion:
    """One method of a study. `trouble` says why it has no numbers, if it has none.

    Seconds a run are its share of the time of its fleet; `fleets` has the numbers of runs that the fleets had, `fleet_seconds` is the mean time
    of a whole fleet, and `faster` the paper's seconds divided by ours (none if the study has other settings than the paper).
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
            units = (
                [unit.id for unit in evaluation(recipe, name, result.hyperparameters)]
                if result.records
                else []
            )
            units = [unit for unit in units if unit in store.contents.records]
            devices |= {store.contents.records[unit].provenance.device for unit in units}
            made.append(
                _companion(
                    recipe,
                    result,
                    [store.trained_together(unit) for unit in units],
                    size,
                    compare=not changes,
                )
            )
    return Companions(recipe.name, recipe.seeds, changes, sorted(devices), size, made)


def _companion(
    recipe: Recipe, result: Result, shared: list[int], size: Sizes, compare: bool
) -> Companion:
    """`shared` has the number of runs of its fleet for each of the records."""
    paper, trouble = _published(recipe, result.method, size), _trouble(result)
    records = [] if trouble else result.records
    found = {name: summary for name, summary in summaries(result).items() if name in METRICS}
    counted = [record.violations for record in records if record.violations is not None]
    seconds = found["seconds"].mean
    return Companion(
        method=result.method,
        trouble=trouble,
        runs=len(result.records),
        ours=found,
        violations_by_task=[float(mean) for mean in np.mean(counted, axis=0)] if counted else None,
        counts_violations=any(
            record.violations is not None for record in [*result.records, *result.cross_validation]
        ),
        fleets=sorted(set(shared)),
        fleet_seconds=float(
            np.mean([record.seconds * runs for record, runs in zip(records, shared, strict=True)])
        )
        if records
        else None,
        faster=paper.seconds / seconds
        if compare and paper.seconds is not None and seconds
        else None,
        state=_state(result.method, records[0], size) if records else None,
        paper=paper,
    )


def _trouble(result: Result) -> str | None:
    """Why a method has no numbers: a word, and how much of it."""
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
    """The tables as data: fractions in [0, 1], a value a seed, null where there is no number."""
    return asdict(found) | {
        "methods": {companion.method: asdict(companion) for companion in found.methods}
    }


# ---- printing


def view(found: Companions) -> Group:
    """The tables, and what is to be said about them."""
    parts = [
        *_worst(found),
        Text(),
        *_family(found),
        Text(),
        *_violations(found),
        Text(),
        *_time(found),
        Text(),
        *_memory(found),
    ]
    notes = [f"{c.method} {c.trouble}" for c in found.methods if c.trouble]
    notes += [
        f"{c.method}: {c.runs} of {found.seeds} seeds"
        for c in found.methods
        if 0 < c.runs < found.seeds
    ]
    if found.changes:
        notes.append(f"with {', '.join(found.changes)}")
        if any(_is_there(companion.paper) for companion in found.methods):
            notes.append(
                "the paper's numbers are for the recipe as it stands, not for these changes"
            )
    return Group(*parts, *([Text()] if notes else []), *map(Text, notes))


def _is_there(paper: Published) -> bool:
    return bool(
        paper.outcome or paper.metrics or paper.violations_by_task or paper.seconds or paper.state
    )


def _table(*headings: str) -> Table:
    made = Table(box=None, padding=(0, 0, 0, 1))
    for heading in headings:
        made.add_column(
            heading, justify="left" if heading in ("method", "formula") else "right", no_wrap=True
        )
    return made


def _worst(found: Companions) -> list[Table | Text]:
    shown = {
        "A_T": (100.0, 1),
        "worst_forgetting": (1.0, 2),
        "memory_accuracy": (100.0, 1),
        "memory_worst_forgetting": (1.0, 3),
    }
    made = _table("method", "A_T %", "worst F", "memory A_T %", "memory worst F")
    for companion in found.methods:
        _add_metrics(made, companion, shown)
    return [
        Text(
            f"{found.recipe}: worst-case forgetting, on test sets and on the episodic memory{_over(found)}"
        ),
        made,
    ]


def _family(found: Companions) -> list[Table | Text]:
    mine = [companion for name in FAMILY for companion in found.methods if companion.method == name]
    if not mine:
        return [Text("GEM, S-GEM and A-GEM: none of them is in this study")]
    made = _table("method", "A_T %", "F_T")
    for companion in mine:
        _add_metrics(made, companion, {"A_T": (100.0, 1), "F_T": (1.0, 3)}, spread=True)
    return [Text(f"GEM, S-GEM and A-GEM{_over(found)} ± population standard deviation"), made]


def _add_metrics(
    made: Table, companion: Companion, shown: Mapping[str, tuple[float, int]], spread: bool = False
) -> None:
    """A row of our numbers, and one of the paper's; `shown` has scale and digits of each."""
    if companion.trouble:
        made.add_row(companion.method, _word(companion))
    else:
        means = {
            name: [
                v for v in (companion.ours[name].mean, companion.ours[name].std) if v is not None
            ]
            for name in shown
        }
        made.add_row(
            companion.method,
            *(_number(means[name], *shown[name], spread) or NONE for name in shown),
        )
    paper = companion.paper
    if paper.outcome:
        made.add_row("  paper", paper.outcome, style="dim")
    elif any(name in paper.metrics for name in shown):
        made.add_row(
            "  paper",
            *(_number(paper.metrics.get(name, []), *shown[name], spread) for name in shown),
            style="dim",
        )


def _violations(found: Companions) -> list[Table | Text]:
    mine = [companion for companion in found.methods if companion.counts_violations]
    if not mine:
        return [Text("violations a task: no method here has counted any")]
    made = _table("method", *(str(task + 1) for task in range(found.sizes.T)), "total")
    for companion in mine:
        ours, paper = companion.violations_by_task, companion.paper.violations_by_task
        made.add_row(
            companion.method,
            *(
                [_word(companion)]
                if ours is None
                else (f"{count:.0f}" for count in [*ours, sum(ours)])
            ),
        )
        if paper is not None:
            made.add_row("  paper", *(str(count) for count in [*paper, sum(paper)]), style="dim")
    return [Text(f"violations: steps of each task that violated a constraint{_over(found)}"), made]


def _time(found: Companions) -> list[Table | Text]:
    published = any(companion.paper.seconds for companion in found.methods)
    made = _table(
        "method",
        "a run",
        "runs a fleet",
        "a fleet",
        *(("paper", "paper ÷ ours") if published else ()),
    )
    for companion in found.methods:
        seconds, paper, fleets = (
            companion.ours["seconds"].mean,
            companion.paper.seconds,
            companion.fleets,
        )
        ours = [_word(companion), "", ""]
        if seconds is not None and companion.fleet_seconds is not None:
            runs = str(fleets[0]) if len(fleets) == 1 else f"{fleets[0]}–{fleets[-1]}"
            ours = [_seconds(seconds), runs, _seconds(companion.fleet_seconds)]
        theirs = [
            "" if paper is None else f"{paper:.0f}",
            "" if companion.faster is None else f"{companion.faster:.3g}",
        ]
        made.add_row(companion.method, *ours, *(theirs if published else ()))
    notes = [f"ours on {', '.join(found.devices)}"] if found.devices else []
    notes += ["those of the paper on a GPU of 2018"] if published else []
    if any(runs > 1 for companion in found.methods for runs in companion.fleets):
        notes.append(
            "runs of a fleet train side by side: the seconds of a run are its share of the fleet's"
        )
    return [Text(f"seconds of training, without evaluation{_over(found)}"), made, *map(Text, notes)]


def _memory(found: Companions) -> list[Table | Text]:
    size, published = found.sizes, any(companion.paper.state for companion in found.methods)
    headings = (
        ("formula", "terms in P", f"all, M={size.M}", f"all, M={size.M_all}") if published else ()
    )
    made = _table("method", "parameters", "examples", "rest", "state", "after task 1", *headings)
    for companion in found.methods:
        state, paper = companion.state, companion.paper.state
        ours = [_word(companion), "", "", "", ""]
        if state is not None:
            first = state.by_task[0] if state.by_task else 0
            ours = [
                _bytes(count)
                for count in (state.parameters, state.examples, state.rest, state.total, first)
            ]
        theirs = (
            []
            if paper is None
            else [
                paper.text,
                *map(_bytes, (paper.terms_in_P, paper.all_terms, paper.all_terms_M_all)),
            ]
        )
        made.add_row(companion.method, *ours, *theirs)
    letters = f"P = {size.P}, B = {size.B}, H = {size.H}, T = {size.T}; M = {size.M} a task, as the paper defines it, which is {size.M_all} in all"
    notes = [STATE, *([FORMULAS, letters] if published else [])]
    return [Text("bytes of state of a run, at its end and in parts"), made, *map(Text, notes)]


def _over(found: Companions) -> str:
    return f", mean over {found.seeds} seeds" if found.seeds > 1 else ", one seed"


def _word(companion: Companion) -> str:
    return (companion.trouble or NONE).partition(":")[0]


def _number(values: list[float], scale: float, digits: int, spread: bool) -> str:
    return "±".join(f"{value * scale:.{digits}f}" for value in (values if spread else values[:1]))


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(count: int) -> str:
    """
    >>> _bytes(1_077_288), _bytes(9640), _bytes(0)
    ('1.08MB', '9.6kB', '–')
    """
    if count == 0:
        return NONE
    return f"{count / 1e6:.2f}MB" if count >= 1e5 else f"{count / 1e3:.1f}kB"
