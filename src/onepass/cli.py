"""The command line: thin."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.report import files
from onepass.report.table import document, table
from onepass.streams import STREAMS, stream
from onepass.studies import fetch, recipe, study
from onepass.studies.study import Job, Result

app = typer.Typer(add_completion=False)
data_app = typer.Typer(help="Data sets.")
app.add_typer(data_app, name="data")

screen = Console(stderr=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onepass {metadata.version('onepass')}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    """Learn from a stream of tasks in a single pass, without forgetting."""


class Watch:
    """Shows a study while it runs, and writes each method's raw record when it is finished."""

    def __init__(self, progress: Progress, out: Path | None) -> None:
        self._progress, self._out = progress, out
        self._task = progress.add_task("starting", total=None, rate="")
        self.done: list[str] = []

    def running(self, jobs: list[Job]) -> None:
        what = {"cv": "choosing", "ev": "learning"}
        names = list(dict.fromkeys(f"{what[job.part]} {job.method}" for job in jobs))
        self._progress.update(self._task, description=", ".join(names) or "starting")

    def steps(self, done: int, total: int) -> None:
        speed = self._progress.tasks[0].speed
        self._progress.update(self._task, completed=min(done, total), total=total, rate=f"{speed:,.0f} steps/s" if speed else "")

    def chose(self, method: str, hyperparameters: dict[str, float]) -> None:
        chosen = ", ".join(f"{name} = {value:g}" for name, value in hyperparameters.items())
        self._progress.console.print(f"{method}: chose {chosen}", highlight=False)

    def finished(self, result: Result) -> None:
        self.done.append(result.method)
        if self._out is not None:
            files.write_json(self._out / f"{result.method}.json", asdict(result))
        self._progress.console.print(f"{result.method}: finished", highlight=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe; 'onepass list' shows them.")],
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas, or 'all'.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each method on the evaluation stream.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    data: Annotated[str | None, typer.Option(help="Folder with data sets (default: ONEPASS_DATA).")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the raw records and the table.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="key=value: change something in the recipe.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one a core on a CPU, one on a GPU).")] = None,
) -> None:
    """Run a recipe: choose hyper-parameters on the cross-validation stream, learn the evaluation stream once, print the table."""
    chosen = recipe.load(name, change, methods, seeds)
    device = study.check_device(device)
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers} is not possible: use at least 1")
    for target in (json, None if out is None else out / "table.json"):
        if target is not None:
            files.check_writable(target)
    needed = stream(chosen.stream).data
    folder = None if needed is None else fetch.locate(needed, data)
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()]
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as progress:
        watch = Watch(progress, out)
        try:
            results = study.run(chosen, data=folder, device=device, workers=workers or study.default_workers(device), observer=watch)
        except KeyboardInterrupt:
            progress.stop()
            finished = f"finished: {', '.join(watch.done)}" if watch.done else "no method was finished"
            kept = f", kept in {out}" if out is not None and watch.done else ""
            screen.print(f"interrupted; {finished}{kept}", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(130) from None
    content = document(chosen, results)
    for target in (json, None if out is None else out / "table.json"):
        if target is not None:
            files.write_json(target, content)
    terminal = Console()
    Console(width=max(terminal.width, 120) if not terminal.is_terminal else None).print(table(chosen, results, change or []))


@app.command(name="list")
def list_everything() -> None:
    """List streams, methods and recipes."""
    sections: dict[str, dict[str, str]] = {
        "recipes": {name: recipe.read(name)["summary"] for name in recipe.names()},
        "streams": {name: entry.summary for name, entry in STREAMS.items()},
        "methods": {name: f"{entry.summary} ({', '.join(entry.hyperparameters)})" for name, entry in METHODS.items()},
    }
    for title, entries in sections.items():
        made = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, summary in entries.items():
            made.add_row(name, summary)
        Console().print(made)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="mnist")],
    data: Annotated[str | None, typer.Option(help="Folder to look in first (default: ONEPASS_DATA).")] = None,
) -> None:
    """Find a data set, or fetch it into the cache, and check it."""
    from onepass.streams import mnist

    folder = fetch.locate(name, data)
    found = mnist.find(Path(folder))
    for path in (found or {}).values():
        mnist.read_idx(path)
    print(folder)


def main(arguments: list[str] | None = None) -> None:
    """The command line: bad input is one sentence and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        code = app((sys.argv[1:] if arguments is None else arguments) or ["--help"], standalone_mode=False)
    except InputError as error:
        _complain(str(error))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # what typer raises for unknown options and the like
        if usage is None:
            raise
        _complain(f"{usage()} (see onepass --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(sentence: str) -> NoReturn:
    screen.print(f"onepass: {sentence}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
