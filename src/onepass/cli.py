"""The command line.

Commands import what they need, since torch takes longer to import than most of them take to run.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from onepass import output
from onepass.commands import machine, studies
from onepass.commands.console import screen
from onepass.errors import InputError, first_line, one_line, shortened

# In the environment: show the traceback of an error that was not foreseen.
TRACEBACK = "ONEPASS_TRACEBACK"

app = typer.Typer(add_completion=False)
app.command()(studies.run)
app.command()(studies.status)
app.command(name="table")(studies.print_table)
app.command()(studies.show)
app.command()(studies.merge)
app.command()(studies.rescue)
app.command()(studies.verify)
app.command()(studies.companions)
app.command()(machine.bench)
app.command(name="list")(machine.list_everything)
data_app = typer.Typer(help="Data sets.")
data_app.command("get")(machine.data_get)
app.add_typer(data_app, name="data")


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


def main(arguments: list[str] | None = None) -> None:
    """Run a command; an error is one sentence.

    The exit code is 2 for bad input, and 1 for an error that was not foreseen.
    """
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
            # What typer raises for unknown options and the like can format itself.
            usage = getattr(error, "format_message", None)
            if usage is not None:
                _complain(f"{usage()} (see onepass --help)", 2)
            _unforeseen(error)
        sys.exit(code if isinstance(code, int) else 0)


def _unforeseen(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK):
        raise error
    what = f"{type(error).__name__}: {shortened(first_line(error), 200)}"
    _complain(
        f"this was not foreseen ({what}): give the command again with {TRACEBACK}=1 in the"
        " environment to see where it happened",
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
    """Raise for an empty argument: often a variable is not set; as a path it is this folder."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, joined, value = before, "=", argument
        if argument.startswith("--"):
            option, joined, value = argument.partition("=")
        own_sentence = option in ("--methods", "--runs")
        if joined and not value.strip() and not own_sentence:
            what = option if option.startswith("-") else "an argument"
            raise InputError(
                f"{what} is empty: give it a value (is a variable not set?); the current folder is"
                " '.'"
            )


def _complain(sentence: str, code: int) -> NoReturn:
    screen.print(f"onepass: {one_line(sentence)}", soft_wrap=True)
    sys.exit(code)
