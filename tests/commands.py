"""Commands of onepass, run in this process."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from onepass.cli import main

ONEPASS = str(Path(sys.executable).with_name("onepass"))  # for a process of its own


def setting(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


# A study of two units, which is done in a second.
_VAN = "run quickstart --methods van --seeds 1 --workers 1"
_SMALL = setting("train_examples=5", "test_examples=5", "hidden=[4]")
TINY = [*_VAN.split(), *_SMALL, *setting("grids.van.learning_rate=0.1")]


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    return exit_code(*arguments), *capsys.readouterr()


def printed(*arguments: str) -> str:
    """What a command prints that succeeds."""
    text = StringIO()
    with redirect_stdout(text):
        assert exit_code(*arguments) == 0
    return text.getvalue()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    code, out, err = outcome(capsys, *arguments)
    shown = [argument[:80] for argument in arguments]
    assert code == 2, shown
    assert out == "", shown
    (line,) = err.splitlines()
    assert line.startswith("onepass: "), shown
    assert "Traceback" not in line
    assert len(line) < 3000, shown
    assert line.isprintable(), shown
    return line
