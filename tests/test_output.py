"""Standard output and standard error that are narrow, closed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from onepass import output
from tests.commands import TINY, exit_code
from tests.studies.stored import fill

ONEPASS = [sys.executable, "-m", "onepass"]


@pytest.fixture
def study(tmp_path: Path) -> str:
    return str(fill(tmp_path / "study"))


def full() -> TextIOWrapper:
    return open("/dev/full", "w")  # closing it would fail, as every other flush


def test_an_encoding_without_the_signs_of_a_table_shows_question_marks(
    study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["table", study], ["companions", study], ["list"], ["merge", "--help"]):
        narrow = TextIOWrapper(BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", narrow)
        assert exit_code(*command) == 0
        assert b"?" in narrow.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_full_standard_output_is_one_sentence_and_files_are_written(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = ["table", study, "--json", str(tmp_path / "a.json")]
    merge = ["merge", str(tmp_path / "b"), study]
    for command in (table, ["list"], ["--help"], ["--version"], merge):
        before = full()
        monkeypatch.setattr(sys, "stdout", before)
        assert exit_code(*command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("onepass: cannot write to standard output (No space left on device)")
        assert sys.stdout is before
    assert (tmp_path / "a.json").stat().st_size > 0


def test_a_pipe_that_is_closed_ends_a_command_quietly(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["table", study, "--json", str(tmp_path / "a.json")], ["list"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
        assert exit_code(*command) == 1
        assert capsys.readouterr().err == ""
    assert (tmp_path / "a.json").stat().st_size > 0


def test_a_full_standard_error_costs_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", full())
    assert exit_code(*TINY, "--out", str(tmp_path)) == 0
    assert "lr=0.1" in capsys.readouterr().out
    assert exit_code("status", str(tmp_path / "nowhere")) == 2


@pytest.mark.parametrize("columns", ["80", "", "0", "1", "-5", "²", "9" * 5000])
def test_an_impossible_width_is_forgotten(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    output.forget_odd_sizes()
    assert ("COLUMNS" in os.environ) == (columns in ("80", ""))


def test_a_process_ends_as_quietly_as_its_command(study: str) -> None:
    command = [*ONEPASS, "status", study]
    with open("/dev/full", "w") as nowhere:
        ended = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    shell = f'{" ".join(ONEPASS)} "$@" <&- >&- 2>&-'
    odd = {**os.environ, "COLUMNS": "²"}
    closed = subprocess.run(["sh", "-c", shell, "sh", "status", study], env=odd)
    assert closed.returncode == 0


def test_the_number_of_a_closed_stream_goes_to_no_other_file() -> None:
    program = """
import os
from onepass.output import open_closed_streams
os.close(1)
open_closed_streams()
assert os.open("/dev/zero", 0) > 2
"""
    subprocess.run([sys.executable, "-c", program], check=True)
