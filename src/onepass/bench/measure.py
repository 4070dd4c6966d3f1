"""The table of a machine: microseconds per run-step, by hand and ours, and the share of the floor.

On the shapes of the paper's Permuted MNIST, in the middle of its stream, with bytes that are made
up. *eager* is a plain loop for one run (see `by_hand`). *ours* is what `onepass run` does: on a GPU
one process that launches captured steps; on a CPU one process per core with one thread each, and
the runs dealt out. One run alone on a CPU gets one thread or all cores, whichever is faster.

A run-step of ours is the time of a step of all R runs, divided by R. The *floor* is counted from
shapes (see `floor`). Within a method everything is measured in turns, round by round, since
machines have slow minutes. Shown are medians over the rounds, of times and of ratios.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.table import Table

from onepass.bench.by_hand import PLAIN
from onepass.bench.floor import Rates, WatchedFleet, Work, work
from onepass.bench.processes import CLASSES, INPUTS, RECIPE, Case, Sizes, Workers, middle, workers
from onepass.engine.gradients import Mode
from onepass.errors import InputError, first_line, is_out_of_memory
from onepass.streams.base import TASKS
from onepass.studies.packing import deal
from onepass.studies.recipe import load

HEADINGS = ("method", "R", "way", "eager", "ours", "eager ÷ ours", "floor", "share")
ROUNDS = 10_000  # more would take days
FIRST = 5  # steps that say how many to take


@dataclass(frozen=True)
class Plan:
    """What to measure after `tasks` past tasks of `images` examples, in `rounds` of `seconds` each.

    Methods have each number of `runs` side by side. `both` adds the way of taking gradients that is
    not the default, where there are several runs.
    """

    device: str
    methods: list[str]
    runs: list[int]
    rounds: int = 5
    tasks: int = 8
    both: bool = False
    seconds: float = 0.4
    images: int = 55_000
    cores: int | None = None  # all of them
    sizes: Sizes = field(default_factory=Sizes)


@dataclass(frozen=True)
class Row:
    """What was measured, in microseconds per run-step, and the work of one.

    `eager` is None for a method that is not written by hand.
    """

    method: str
    runs: int
    way: str
    eager: float | None
    ours: float
    ratio: float | None  # eager / ours, the median of the rounds' ratios
    work: Work


@dataclass(frozen=True)
class Report:
    """The rows, and what they were measured on."""

    plan: Plan
    machine: str
    torch: str
    rates: Rates
    rows: list[Row]

    def floor(self, row: Row) -> float:
        """Microseconds per run-step."""
        return row.work.seconds(self.rates) * 1e6


def whole_numbers(text: str) -> list[int]:
    """`1,5,40` as numbers.

    >>> whole_numbers("1, 5,40")
    [1, 5, 40]
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(
        word.isascii() and word.isdecimal() and len(word) < 6 and int(word) > 0 for word in words
    ):
        raise InputError(
            f"--runs '{text[:40]}' is not possible: write whole numbers from 1 to 99999 with"
            " commas between them, such as 1,5,40"
        )
    return list(dict.fromkeys(int(word) for word in words))


def plan(device: str, methods: str, runs: str, rounds: int, tasks: int, both: bool) -> Plan:
    """What a command line asks for."""
    if not 1 <= rounds <= ROUNDS:
        raise InputError(f"--rounds {rounds} is not possible: use 1 to {ROUNDS}")
    if not 1 <= tasks < TASKS["ev"]:
        raise InputError(
            f"--tasks {tasks} is not possible: of the {TASKS['ev']} tasks of this stream,"
            f" 1 to {TASKS['ev'] - 1} can be past"
        )
    return Plan(
        device, load(RECIPE, methods=methods).methods, whole_numbers(runs), rounds, tasks, both
    )


def least_work(name: str, tasks: int, images: int) -> Work:
    """What a run-step has to do, over a whole period of the learner."""
    feed, fleet, learner, phase = middle(name, 1, tasks, images, fleet_type=WatchedFleet)
    assert isinstance(fleet, WatchedFleet)
    contract = learner.capture()
    return work(fleet, learner, islice(feed.batches(phase), contract.period if contract else 1))


def run(asked: Plan, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure everything; `tell` hears what is found meanwhile."""
    rows: list[Row] = []
    torch.set_num_threads(1)  # here steps are only counted
    with workers(asked.device, asked.cores) as processes:
        rates = processes.rates(asked.sizes)
        for name in asked.methods:
            for row in _measure(processes, asked, name):
                rows.append(row)
                tell(f"{name}, R = {row.runs}, {row.way}: {_number(row.ours)} µs per run-step")
            processes.forget()
            rates = rates.best(
                processes.rates(asked.sizes)
            )  # a slow minute at the start would flatter everything
        machine = (
            torch.cuda.get_device_name()
            if asked.device == "cuda"
            else f"{processes.cores} cores, {platform.machine()}"
        )
    return Report(asked, machine, torch.__version__, rates, rows)


class _Timed(NamedTuple):
    """Cases that run at the same time in processes of their own, and how many runs they have."""

    pipes: list[Connection]
    cases: list[Case]
    runs: int


def _measure(processes: Workers, asked: Plan, name: str) -> list[Row]:
    """The rows of a method. Where there are several candidates, the fastest one counts."""
    least = least_work(name, asked.tasks, asked.images)

    def case(runs: int, mode: Mode | None) -> Case:
        return Case(name, runs, mode, asked.tasks, asked.images)

    eager = [_Timed([pipe], [case(1, None)], 1) for pipe in processes.plain if name in PLAIN]
    ours: dict[tuple[int, str], list[_Timed]] = {}
    for runs in asked.runs:
        modes: list[Mode] = ["auto", "looped"] if asked.both and runs > 1 else ["auto"]
        shares = [len(share) for share in deal(range(runs), min(runs, len(processes.each)))]
        for mode in modes:
            alone = [_Timed([pipe], [case(1, mode)], 1) for pipe in processes.alone]
            dealt = [
                _Timed(processes.each[: len(shares)], [case(share, mode) for share in shares], runs)
            ]
            ours[runs, _way(asked.device, mode, runs)] = alone if runs == 1 else dealt
    everything = [*eager, *(one for candidates in ours.values() for one in candidates)]
    found: dict[int, list[float]] = {id(one): [] for one in everything}
    try:
        counts = [
            max(1, int(asked.seconds / processes.time(one.pipes, one.cases, FIRST)))
            for one in everything
        ]
        for _ in range(asked.rounds):
            for one, count in zip(everything, counts, strict=True):
                found[id(one)].append(processes.time(one.pipes, one.cases, count) / one.runs * 1e6)
    except (RuntimeError, MemoryError, EOFError) as reason:
        if not isinstance(reason, EOFError) and not is_out_of_memory(reason):
            raise
        why = "a process has died" if isinstance(reason, EOFError) else first_line(reason)
        raise InputError(
            f"there is no room for {name} with up to {max(asked.runs)} runs ({why}):"
            " use fewer --runs, or leave it out"
        ) from None

    def best(candidates: list[_Timed]) -> list[float]:
        return min((found[id(one)] for one in candidates), key=median)

    by_hand, rows = best(eager) if eager else None, []
    for (runs, way), candidates in ours.items():
        mine, theirs, ratio = best(candidates), None, None
        if by_hand is not None:
            theirs = median(by_hand)
            ratio = median(one / other for one, other in zip(by_hand, mine, strict=True))
        rows.append(Row(name, runs, way, theirs, median(mine), ratio, least))
    return rows


def _way(device: str, mode: Mode, runs: int) -> str:
    """How gradients are taken: in one batched program, or one run at a time.

    In a captured step each run is a branch of the graph.
    """
    if mode == "auto" and runs > 1:
        return "stacked"
    return "branches" if device == "cuda" else "looped"


def _cells(report: Report, row: Row) -> list[str]:
    numbers = [_number(value) for value in (row.eager, row.ours, row.ratio, report.floor(row))]
    return [row.method, str(row.runs), row.way, *numbers, f"{report.floor(row) / row.ours:.1%}"]


def _number(value: float | None) -> str:
    """Three digits.

    >>> [_number(value) for value in (None, 0.5321, 12.34, 98765.4)]
    ['–', '0.532', '12.3', '98765']
    """
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _shown(report: Report) -> list[int]:
    """The columns that are shown: without `way` where there is only one."""
    return [n for n, heading in enumerate(HEADINGS) if heading != "way" or report.plan.both]


def _notes(report: Report) -> list[str]:
    shared, asked, rates = load(RECIPE).setup(), report.plan, report.rates
    widths = "-".join(map(str, (INPUTS, *shared.hidden, CLASSES)))
    kind = "TF32" if asked.device == "cuda" else "float32"
    past = f"{asked.tasks} past tasks with {shared.memory_per_task} examples each"
    product = f"{_number(rates.flops / 1e9)} GFLOP/s of a large product ({kind})"
    copy = f"{_number(rates.bytes / 1e9)} GB/s of a large copy"
    return [
        f"{report.machine}, torch {report.torch}; medians of {asked.rounds} rounds",
        f"{widths}, batch {shared.batch_size}, {past}",
        f"floor: at {product} or {copy}",
    ]


def table(report: Report) -> Table:
    """For people."""
    title = "microseconds per run-step"
    made = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 1))
    for number in _shown(report):
        left = HEADINGS[number] in ("method", "way")
        made.add_column(HEADINGS[number], justify="left" if left else "right", no_wrap=True)
    for row in report.rows:
        made.add_row(*(_cells(report, row)[number] for number in _shown(report)))
    made.caption, made.caption_justify = "\n".join(_notes(report)), "left"
    return made


def markdown(report: Report) -> str:
    """The same as Markdown."""
    whole = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(report, row) for row in report.rows)]
    lines = [[line[number] for number in _shown(report)] for line in whole]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Microseconds per run-step (`onepass bench`)\n\n{body}\n\n{'; '.join(_notes(report))}\n"


def document(report: Report) -> dict[str, Any]:
    """For programs: numbers as they were measured."""
    rows = [
        asdict(row) | {"floor": report.floor(row), "share": report.floor(row) / row.ours}
        for row in report.rows
    ]
    return asdict(report) | {"rows": rows}
