"""The command line: thin. Commands import what they need, since torch takes longer to import than most of them take to run."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from onepass import output
from onepass.errors import InputError, first_line, one_line, shortened
from onepass.stopping import TerminatedError, interruptible

if TYPE_CHECKING:
    from onepass.studies.recipe import Recipe
    from onepass.studies.results import Result

app = typer.Typer(add_completion=False)
data_app = typer.Typer(help="Data sets.")
app.add_typer(data_app, name="data")

output.forget_odd_sizes()  # which a console reads when it is made
screen = Console(stderr=True, markup=False, highlight=False, emoji=False)

TRACEBACK = (
    "ONEPASS_TRACEBACK"  # in the environment: show the traceback of an error that was not foreseen
)

MOST = (
    1024  # processes, and threads of each: more than any machine has, and few enough to be started
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onepass {metadata.version('onepass')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Learn from a stream of tasks in a single pass, without forgetting."""


@app.command()
def run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe; 'onepass list' shows them. Default: the study in --out.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas, or 'all'.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each method on the evaluation stream.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    data: Annotated[
        str | None, typer.Option(help="Folder with data sets (default: ONEPASS_DATA).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study: what it has already is not done again."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: change something in the recipe.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes (default: one a core on a CPU, one on a GPU).")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler, tcp://…: train on its cluster.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Write a checkpoint every so many steps, not only at task ends."),
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard.")] = None,
) -> None:
    """Run a recipe: choose hyper-parameters on the cross-validation stream, learn the evaluation stream once, print the table."""
    asked = _asked(name, change, methods, seeds, out)
    for flag, value, most in (
        ("--workers", workers, MOST),
        ("--threads", threads, MOST),
        ("--checkpoint-every", checkpoint_every, None),
    ):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value} is not possible: use at least 1")
        if value is not None and most is not None and value > most:
            raise InputError(f"{flag} {value} is not possible: use at most {most}")

    from onepass.report.targets import check_targets
    from onepass.report.tracking import check_folder
    from onepass.report.watch import Watch
    from onepass.streams import stream
    from onepass.studies import cluster, executors, fetch, study

    device = study.check_device(device)
    check_targets(json, study=out)
    if tensorboard is not None:
        check_folder(tensorboard, study=out)
    needed = stream(asked.stream).data
    folder = None if needed is None else fetch.locate(needed, data)
    study.try_stream(asked, folder)  # before anything is written
    if scheduler is not None:
        cluster.check_address(scheduler)
    with (
        interruptible(),
        _folder(out) as place,
        study.opened(place, asked) as (store, recipe),
        Watch(screen, tensorboard, store) as watch,
    ):
        if seeds is not None and seeds < recipe.seeds:
            screen.print(f"the study has {recipe.seeds} seeds already")
        try:
            with executors.executor(
                workers or executors.default_workers(device), threads, scheduler
            ) as executor:
                means = study.Means(
                    folder,
                    device,
                    workers or executor.workers,
                    keep=out is not None,
                    checkpoint_every=checkpoint_every,
                )
                results = study.run(recipe, store, means, executor, watch)
        except KeyboardInterrupt as stop:
            watch.interrupted(out)
            raise typer.Exit(143 if isinstance(stop, TerminatedError) else 130) from None
    _print_table(recipe, results, json, None)
    if any(result.failed for result in results.values()):
        screen.print(
            f"some units failed: see 'onepass status {out}'"
            if out
            else "some units failed: give --out DIR to see why",
            soft_wrap=True,
        )
        raise typer.Exit(1)


def _asked(
    name: str | None,
    change: list[str] | None,
    methods: str | None,
    seeds: int | None,
    out: Path | None,
) -> Recipe:
    from onepass.studies import recipe
    from onepass.studies.folder import FILE
    from onepass.studies.store import Store

    if name is not None:
        if os.path.exists(Path(name) / FILE):  # a name that no file can have is simply no study
            raise InputError(
                f"{name} is the folder of a study, not a recipe: go on with it by 'onepass run --out {name}'"
            )
        return recipe.load(name, change, methods, seeds)
    if out is None:
        raise InputError(
            "name a recipe to run ('onepass list' shows them), or the folder of a study to go on with by --out"
        )
    with Store.read(out) as store:
        stored = store.contents.study["recipe"]
    return recipe.load(recipe.from_stored(stored).name, change, methods, seeds, stored)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The study's folder; without one, a place for as long as the command runs."""
    if out is not None:
        yield out
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="onepass-")
    except OSError as reason:
        raise InputError(
            f"there is no place for temporary files ({reason.strerror or reason}): set TMPDIR to a folder, or use --out"
        ) from None
    with temporary as place:
        yield Path(place)


@app.command()
def status(folder: Folder) -> None:
    """Show what of a study is done, running, failed and still to do."""
    from onepass.report.status import show

    show(folder, _wide())


@app.command(name="table")
def print_table(
    folder: Folder,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="File for the table as CSV, a line a run.")
    ] = None,
) -> None:
    """Print the table of a study from its raw records."""
    from onepass.report.targets import check_targets
    from onepass.studies.recipe import from_stored
    from onepass.studies.results import results
    from onepass.studies.store import Store

    check_targets(json, csv)
    with Store.read(folder) as store:
        recipe = from_stored(store.contents.study["recipe"])
        found = results(recipe, store)
    _print_table(recipe, found, json, csv)


def _print_table(
    recipe: Recipe, results: dict[str, Result], json: Path | None, csv: Path | None
) -> None:
    from onepass import files
    from onepass.report import table
    from onepass.report.targets import hand_out

    hand_out(
        partial(files.write_json, json, table.document(recipe, results)) if json else None,
        partial(files.write_out, csv, table.lines(recipe, results).encode()) if csv else None,
        partial(_wide().print, table.table(recipe, results)),
    )


@app.command()
def show(
    folder: Folder,
    unit: Annotated[
        str | None, typer.Argument(metavar="UNIT", help="A unit, or how its name begins.")
    ] = None,
) -> None:
    """Show one unit of a study: its configuration, what came out, and with what it was made. Without UNIT, list them."""
    from onepass.report.units import listing, page

    _wide().print(listing(folder) if unit is None else page(folder, unit))


@app.command()
def merge(
    into: Annotated[
        Path, typer.Argument(metavar="DIR", help="The study that takes; made if there is none.")
    ],
    others: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="The studies to take from; they stay as they are."),
    ],
) -> None:
    """Bring the results of several studies of one recipe together in the first. Results that contradict each other are refused."""
    from onepass.studies.merge import merge as bring_together

    for other, count in bring_together(into, others):
        print(f"{count} units from {other}")


@app.command()
def rescue(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The study that is damaged; it stays as it is.")
    ],
    into: Annotated[Path, typer.Argument(metavar="INTO", help="The folder of the new study.")],
) -> None:
    """Copy what is sound of a damaged study into a new one. Exit code 1 if anything is lost."""
    from onepass.studies.rescue import rescue as save

    found = save(folder, into)
    for what in found.lost:
        screen.print(f"lost: {what}", soft_wrap=True)
    print(
        f"{found.results} results are in {into}, {found.to_do} units are still to do: go on with 'onepass run --out {into}'"
    )
    if found.lost:
        raise typer.Exit(1)


@app.command()
def verify(folder: Folder) -> None:
    """Compare a study with the published results. Exit code 0 only if every difference is explained."""
    from onepass.report.verify import verdicts, view

    found = verdicts(folder)
    _wide().print(view(found))
    if not found.accepted:
        raise typer.Exit(1)


@app.command()
def companions(
    folder: Folder,
    json: Annotated[Path | None, typer.Option(help="File for the tables as JSON.")] = None,
) -> None:
    """Print the paper's side tables for a study: worst-case forgetting, violations a task, time and memory."""
    from onepass import files
    from onepass.report.companions import collect, document, view
    from onepass.report.targets import check_targets, hand_out

    found = collect(folder)
    check_targets(json)
    hand_out(
        partial(files.write_json, json, document(found)) if json else None,
        partial(
            _wide(120).print, view(found)
        ),  # one column per task: a narrow terminal breaks lines, but no number is cut
    )


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or 'all'.")
    ] = "van,ewc,a-gem,gem",
    runs: Annotated[
        str, typer.Option(help="How many runs side by side, separated by commas.")
    ] = "1,5,40",
    rounds: Annotated[int, typer.Option(help="How often everything is measured.")] = 5,
    tasks: Annotated[int, typer.Option(help="Past tasks that the memory holds.")] = 8,
    both: Annotated[
        bool,
        typer.Option(
            "--both", help="Several runs stacked, and a run at a time: on a GPU a branch each."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the table as Markdown.")] = None,
) -> None:
    """Measure this machine: microseconds a run-step, a hand-written loop against ours, and the share of the floor."""
    from onepass import files
    from onepass.bench import measure as measurements
    from onepass.report.targets import check_targets, hand_out
    from onepass.studies.study import check_device

    plan = measurements.plan(check_device(device), methods, runs, rounds, tasks, both)
    check_targets(json, markdown)
    with interruptible():
        try:
            report = measurements.run(plan, lambda found: screen.print(found, soft_wrap=True))
        except KeyboardInterrupt as stop:
            screen.print("interrupted; nothing is kept")
            raise typer.Exit(143 if isinstance(stop, TerminatedError) else 130) from None
    hand_out(
        partial(files.write_json, json, measurements.document(report)) if json else None,
        partial(files.write_out, markdown, measurements.markdown(report).encode())
        if markdown
        else None,
        partial(_wide().print, measurements.table(report)),
    )


@app.command(name="list")
def list_everything() -> None:
    """List streams, methods and recipes."""
    from onepass.learners import METHODS
    from onepass.streams import STREAMS
    from onepass.studies import recipe

    sections: dict[str, dict[str, str]] = {
        "recipes": {name: recipe.read(name)["summary"] for name in recipe.names()},
        "streams": {name: entry.summary for name, entry in STREAMS.items()},
        "methods": {
            name: f"{entry.summary} ({', '.join(entry.hyperparameters)})"
            for name, entry in METHODS.items()
        },
    }
    for title, entries in sections.items():
        made = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, summary in entries.items():
            made.add_row(name, summary)
        _wide().print(made)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="mnist or cifar100")],
    data: Annotated[
        str | None, typer.Option(help="Folder to look in first (default: ONEPASS_DATA).")
    ] = None,
) -> None:
    """Find a data set, or fetch it into the cache, and check it."""
    from onepass.studies import fetch

    folder = fetch.locate(name, data)
    fetch.check(name, folder)
    print(folder)


def _wide(least: int = 0) -> Console:
    """Standard output, at least `least` columns wide; where it is no terminal, lines are not cut at 80 columns."""
    terminal = Console()
    width = max(terminal.width, least if terminal.is_terminal else 120)
    return Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def main(arguments: list[str] | None = None) -> None:
    """The command line: bad input is one sentence and exit code 2, what was not foreseen is one and exit code 1."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with output.guarded():
        try:
            _check_current_folder()
            given = sys.argv[1:] if arguments is None else arguments
            _refuse_empty(given)
            code = app(given or ["--help"], standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
        except output.OutputError as error:
            if error.closed:
                sys.exit(1)
            _complain(str(error), 2)
        except InputError as error:
            _complain(str(error), 2)
        except typer.Abort as stop:  # Ctrl-C while a command was still importing, say
            if isinstance(stop.__cause__, EOFError):  # which typer takes for the same
                _unforeseen(stop.__cause__)
            sys.exit(130)
        except Exception as error:
            usage = getattr(
                error, "format_message", None
            )  # what typer raises for unknown options and the like
            if usage is not None:
                _complain(f"{usage()} (see onepass --help)", 2)
            _unforeseen(error)
        sys.exit(code if isinstance(code, int) else 0)


def _unforeseen(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK):
        raise error
    what = f"{type(error).__name__}: {shortened(first_line(error), 200)}"
    _complain(
        f"this was not foreseen ({what}): give the command again with {TRACEBACK}=1 in the environment to see where it happened",
        1,
    )


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as reason:  # torch could not even be imported there
        raise InputError(
            f"the current folder cannot be used ({reason.strerror}): change to another one"
        ) from None


def _refuse_empty(arguments: list[str]) -> None:
    """An empty argument is mostly a variable that is not set; as a path it is the current folder."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, joined, value = (
            argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        )
        if (
            joined and not value.strip() and option not in ("--methods", "--runs")
        ):  # have their own sentences
            what = option if option.startswith("-") else "an argument"
            raise InputError(
                f"{what} is empty: give it a value (is a variable not set?); the current folder is '.'"
            )


def _complain(sentence: str, code: int) -> NoReturn:
    screen.print(f"onepass: {one_line(sentence)}", soft_wrap=True)
    sys.exit(code)
