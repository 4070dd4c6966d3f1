"""Commands about this machine, its data sets, and what the package has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from onepass.commands.console import screen, wide
from onepass.stopping import exit_code, interruptible


def bench(
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or 'all'.")
    ] = "van,ewc,a-gem,gem",
    runs: Annotated[
        str, typer.Option(help="Numbers of runs side by side, separated by commas.")
    ] = "1,5,40",
    rounds: Annotated[int, typer.Option(help="How often everything is measured.")] = 5,
    tasks: Annotated[int, typer.Option(help="Past tasks that the memory holds.")] = 8,
    both: Annotated[
        bool,
        typer.Option(
            "--both", help="Several runs stacked, and one by one: on a GPU in parallel streams."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File for the table as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the table as Markdown.")] = None,
) -> None:
    """Measure this machine: microseconds per run-step, beside a hand-written loop and the floor."""
    from onepass import files
    from onepass.bench import measure as measurements
    from onepass.commands.targets import check_targets, hand_out
    from onepass.studies.study import check_device

    plan = measurements.plan(check_device(device), methods, runs, rounds, tasks, both)
    check_targets(json, markdown)
    with interruptible():
        try:
            report = measurements.run(plan, lambda found: screen.print(found, soft_wrap=True))
        except KeyboardInterrupt as stop:
            screen.print("interrupted; nothing is kept")
            raise typer.Exit(exit_code(stop)) from None
    text = measurements.markdown(report).encode()
    hand_out(
        partial(files.write_json, json, measurements.document(report)) if json else None,
        partial(files.write_out, markdown, text) if markdown else None,
        partial(wide().print, measurements.table(report)),
    )


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
        wide().print(made)


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
