"""Commands about studies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onepass.commands.console import screen, wide
from onepass.errors import InputError
from onepass.stopping import exit_code, interruptible

if TYPE_CHECKING:
    from onepass.studies.recipe import Recipe
    from onepass.studies.results import Result

MOST = 1024  # processes, and threads of each: more than any machine has, and few enough to start

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")]


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
        int | None, typer.Option(help="Processes (default: one per core on a CPU, one on a GPU).")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler, tcp://…: train on its cluster.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps after which to write a checkpoint, not only at task ends."),
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard.")] = None,
) -> None:
    """Run a recipe and print its table.

    Hyper-parameters are chosen on the cross-validation stream;
    the evaluation stream is learnt once.
    """
    wanted = _wanted(name, change, methods, seeds, out)
    for flag, value, most in (
        ("--workers", workers, MOST),
        ("--threads", threads, MOST),
        ("--checkpoint-every", checkpoint_every, None),
    ):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value} is not possible: use at least 1")
        if value is not None and most is not None and value > most:
            raise InputError(f"{flag} {value} is not possible: use at most {most}")

    from onepass.commands.targets import check_targets
    from onepass.report.tracking import check_folder
    from onepass.report.watch import Watch
    from onepass.streams import stream
    from onepass.studies import cluster, executors, fetch, study

    device = study.check_device(device)
    check_targets(json, study=out)
    if tensorboard is not None:
        check_folder(tensorboard, study=out)
    needed = stream(wanted.stream).data
    folder = None if needed is None else fetch.locate(needed, data)
    study.try_stream(wanted, folder)  # before anything is written
    if scheduler is not None:
        cluster.check_address(scheduler)
    processes = workers or executors.default_workers(device)
    with (
        interruptible(),
        _folder(out) as place,
        study.opened(place, wanted) as (store, recipe),
        Watch(screen, tensorboard, store) as watch,
    ):
        if seeds is not None and seeds < recipe.seeds:
            screen.print(f"the study has {recipe.seeds} seeds already")
        try:
            with executors.executor(processes, threads, scheduler) as executor:
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
            raise typer.Exit(exit_code(stop)) from None
    _print_table(recipe, results, json, None)
    if any(result.failed for result in results.values()):
        see = f"see 'onepass status {out}'" if out else "give --out DIR to see why"
        screen.print(f"some units failed: {see}", soft_wrap=True)
        raise typer.Exit(1)


def _wanted(
    name: str | None,
    change: list[str] | None,
    methods: str | None,
    seeds: int | None,
    out: Path | None,
) -> Recipe:
    """The recipe of that name, or of the study in `out`, with what the options change."""
    from onepass.studies import recipe
    from onepass.studies.folder import FILE
    from onepass.studies.store import Store

    if name is not None:
        if os.path.exists(Path(name) / FILE):  # a name that no file can have is simply no study
            raise InputError(
                f"{name} is the folder of a study, not a recipe: go on with it by"
                f" 'onepass run --out {name}'"
            )
        return recipe.load(name, change, methods, seeds)
    if out is None:
        raise InputError(
            "name a recipe to run ('onepass list' shows them), or the folder of a study to go on"
            " with by --out"
        )
    with Store.read(out) as store:
        stored = store.contents.study["recipe"]
    return recipe.load(recipe.from_stored(stored).name, change, methods, seeds, stored)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The study's folder; without one, a temporary folder for as long as the command runs."""
    if out is not None:
        yield out
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="onepass-")
    except OSError as reason:
        raise InputError(
            f"there is no place for temporary files ({reason.strerror or reason}): set TMPDIR to a"
            " folder, or use --out"
        ) from None
    with temporary as place:
        yield Path(place)


def status(folder: Folder) -> None:
    """Show what of a study is done, running, failed and still to do."""
    from onepass.report.status import show

    show(folder, wide())


def print_table(
    folder: Folder,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="File for the table as CSV, one line per run.")
    ] = None,
) -> None:
    """Print the table of a study from its raw records."""
    from onepass.commands.targets import check_targets
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
    from onepass.commands.targets import hand_out
    from onepass.report import table

    hand_out(
        partial(files.write_json, json, table.document(recipe, results)) if json else None,
        partial(files.write_out, csv, table.lines(recipe, results).encode()) if csv else None,
        partial(wide().print, table.table(recipe, results)),
    )


def show(
    folder: Folder,
    unit: Annotated[
        str | None, typer.Argument(metavar="UNIT", help="A unit, or the beginning of its name.")
    ] = None,
) -> None:
    """Show the configuration, results and provenance of one unit; without UNIT, list all units."""
    from onepass.report.units import listing, page

    wide().print(listing(folder) if unit is None else page(folder, unit))


def merge(
    into: Annotated[
        Path, typer.Argument(metavar="DIR", help="The study that takes; made if there is none.")
    ],
    others: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="The studies to take from; they stay as they are."),
    ],
) -> None:
    """Bring the results of several studies of one recipe together in the first.

    Results that contradict each other are refused.
    """
    from onepass.studies.merge import merge as bring_together

    for other, count in bring_together(into, others):
        print(f"{count} units from {other}")


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
        f"{found.results} results are in {into}, {found.to_do} units are still to do: go on with"
        f" 'onepass run --out {into}'"
    )
    if found.lost:
        raise typer.Exit(1)


def verify(folder: Folder) -> None:
    """Compare a study with the published results.

    The exit code is 0 only if every difference is explained.
    """
    from onepass.report.verify import verify as compare
    from onepass.report.verify import view

    found = compare(folder)
    wide().print(view(found))
    if not found.accepted:
        raise typer.Exit(1)


def companions(
    folder: Folder,
    json: Annotated[Path | None, typer.Option(help="File for the tables as JSON.")] = None,
) -> None:
    """Print the paper's side tables: worst forgetting, violations per task, time and memory."""
    from onepass import files
    from onepass.commands.targets import check_targets, hand_out
    from onepass.report.companions import collect, document
    from onepass.report.companions_view import view

    found = collect(folder)
    check_targets(json)
    # One column per task: a narrow terminal breaks lines, but no number is cut.
    console = wide(120)
    hand_out(
        partial(files.write_json, json, document(found)) if json else None,
        partial(console.print, view(found)),
    )
