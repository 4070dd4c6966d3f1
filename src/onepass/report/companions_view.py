"""The paper's side tables, printed."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from onepass.learners import METHODS
from onepass.report.companions import Companion, Companions
from onepass.report.formats import NONE, number, size

STATE = (
    "state is what a run keeps between steps: the parameters of one network, the examples of its"
    " episodic memory (as bytes), and the rest: importances and anchors, further columns,"
    " exemplars, label and task of each example in memory (16 bytes), and the padding of rows on a"
    " GPU"
)
FORMULAS = (
    "the paper's formulas count numbers of 4 bytes. Their terms in H are activations, which are no"
    " state, so state compares with the terms in P; of these it lacks the gradients, since none is"
    " kept: a reference gradient in 2*P, those of past tasks in P*T. The formulas lack the memory's"
    " examples"
)

Shown = Mapping[str, tuple[float, int]]  # scale and digits of each metric


def view(found: Companions) -> Group:
    """The tables, and notes on them."""
    parts = [
        *_worst(found),
        Text(),
        *_families(found),
        *_violations(found),
        Text(),
        *_time(found),
        Text(),
        *_memory(found),
    ]
    notes = [f"{c.method} {c.trouble}" for c in found.methods if c.trouble]
    some = [c for c in found.methods if 0 < c.runs < found.seeds]
    notes += [f"{c.method}: {c.runs} of {found.seeds} seeds" for c in some]
    if found.changes:
        notes.append(f"with {', '.join(found.changes)}")
        if any(_is_published(companion) for companion in found.methods):
            notes.append(
                "the paper's numbers are for the recipe as it stands, not for these changes"
            )
    return Group(*parts, *([Text()] if notes else []), *map(Text, notes))


def _is_published(companion: Companion) -> bool:
    paper = companion.paper
    return bool(
        paper.outcome or paper.metrics or paper.violations_by_task or paper.seconds or paper.state
    )


def _table(*headings: str) -> Table:
    made = Table(box=None, padding=(0, 0, 0, 1))
    for heading in headings:
        left = heading in ("method", "formula")
        made.add_column(heading, justify="left" if left else "right", no_wrap=True)
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
    what = "worst-case forgetting, on test sets and on the episodic memory"
    return [Text(f"{found.recipe}: {what}{_over(found)}"), made]


def _families(found: Companions) -> list[Table | Text]:
    """One table per family of methods, as the registry names them."""
    families: dict[str, list[str]] = {}
    for name, entry in METHODS.items():
        if entry.family is not None:
            families.setdefault(entry.family, []).append(name)
    parts: list[Table | Text] = []
    for names in families.values():
        *others, last = map(str.upper, names)
        title = f"{', '.join(others)} and {last}"
        mine = [c for name in names for c in found.methods if c.method == name]
        made = _table("method", "A_T %", "F_T")
        for companion in mine:
            _add_metrics(made, companion, {"A_T": (100.0, 1), "F_T": (1.0, 3)}, spread=True)
        if mine:
            parts += [Text(f"{title}{_over(found)} ± population standard deviation"), made, Text()]
        else:
            parts += [Text(f"{title}: none of them is in this study"), Text()]
    return parts


def _add_metrics(made: Table, companion: Companion, shown: Shown, spread: bool = False) -> None:
    """Add a row of our numbers, and one of the paper's."""
    if companion.trouble:
        made.add_row(companion.method, _word(companion))
    else:
        ours = {name: companion.ours[name] for name in shown}
        means = {
            name: [value for value in (summary.mean, summary.std) if value is not None]
            for name, summary in ours.items()
        }
        made.add_row(companion.method, *(cell or NONE for cell in _cells(means, shown, spread)))
    paper = companion.paper
    if paper.outcome:
        made.add_row("  paper", paper.outcome, style="dim")
    elif any(name in paper.metrics for name in shown):
        made.add_row("  paper", *_cells(paper.metrics, shown, spread), style="dim")


def _cells(numbers: Mapping[str, list[float]], shown: Shown, spread: bool) -> list[str]:
    most = None if spread else 1
    return [number(numbers.get(name, [])[:most], *form) for name, form in shown.items()]


def _violations(found: Companions) -> list[Table | Text]:
    mine = [companion for companion in found.methods if companion.counts_violations]
    if not mine:
        return [Text("violations per task: no method here has counted any")]
    made = _table("method", *(str(task + 1) for task in range(found.sizes.T)), "total")
    for companion in mine:
        ours, paper = companion.violations_by_task, companion.paper.violations_by_task
        cells = [_word(companion)]
        if ours is not None:
            cells = [f"{count:.0f}" for count in [*ours, sum(ours)]]
        made.add_row(companion.method, *cells)
        if paper is not None:
            made.add_row("  paper", *(str(count) for count in [*paper, sum(paper)]), style="dim")
    return [Text(f"violations: steps of each task that violated a constraint{_over(found)}"), made]


def _time(found: Companions) -> list[Table | Text]:
    published = any(companion.paper.seconds for companion in found.methods)
    headings = ["method", "per run", "runs per fleet", "per fleet"]
    made = _table(*headings, *(("paper", "paper ÷ ours") if published else ()))
    for companion in found.methods:
        seconds, paper = companion.ours["seconds"].mean, companion.paper.seconds
        cells = [_word(companion), "", ""]
        if seconds is not None and companion.fleet_seconds is not None:
            least, most = companion.fleets[0], companion.fleets[-1]
            runs = str(least) if least == most else f"{least}–{most}"
            cells = [_seconds(seconds), runs, _seconds(companion.fleet_seconds)]
        if published:
            cells.append("" if paper is None else f"{paper:.0f}")
            cells.append("" if companion.faster is None else f"{companion.faster:.3g}")
        made.add_row(companion.method, *cells)
    notes = [f"ours on {', '.join(found.devices)}"] if found.devices else []
    notes += ["those of the paper on a GPU of 2018"] if published else []
    if any(runs > 1 for companion in found.methods for runs in companion.fleets):
        notes.append(
            "runs of a fleet train side by side: the seconds of a run are its share of the fleet's"
        )
    return [Text(f"seconds of training, without evaluation{_over(found)}"), made, *map(Text, notes)]


def _memory(found: Companions) -> list[Table | Text]:
    letters = found.sizes
    published = any(companion.paper.state for companion in found.methods)
    headings = ["method", "parameters", "examples", "rest", "state", "after task 1"]
    notes = [STATE]
    if published:
        headings += ["formula", "terms in P", f"all, M={letters.M}", f"all, M={letters.M_all}"]
        notes += [
            FORMULAS,
            f"P = {letters.P}, B = {letters.B}, H = {letters.H}, T = {letters.T}; M = {letters.M}"
            f" per task, as the paper defines it, which is {letters.M_all} in all",
        ]
    made = _table(*headings)
    for companion in found.methods:
        state, paper = companion.state, companion.paper.state
        cells = [_word(companion), "", "", "", ""]
        if state is not None:
            first = state.by_task[0] if state.by_task else 0
            parts = (state.parameters, state.examples, state.rest, state.total, first)
            cells = [_bytes(count) for count in parts]
        if paper is not None:
            terms = (paper.terms_in_P, paper.all_terms, paper.all_terms_M_all)
            cells += [paper.text, *map(_bytes, terms)]
        made.add_row(companion.method, *cells)
    return [Text("bytes of state of a run, at its end and in parts"), made, *map(Text, notes)]


def _over(found: Companions) -> str:
    return f", mean over {found.seeds} seeds" if found.seeds > 1 else ", one seed"


def _word(companion: Companion) -> str:
    return (companion.trouble or NONE).partition(":")[0]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(count: int) -> str:
    return size(count, 2) if count else NONE
