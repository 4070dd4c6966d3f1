"""Names and places on the command line that cannot be: one sentence and exit code 2."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepass import cli, special_files
from onepass.errors import LONGEST
from onepass.studies import recipe as recipes
from tests.commands import TINY, exit_code, outcome, refusal
from tests.studies.stored import fill


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a study and odd things in it. Refused commands leave it as it is."""
    fill(tmp_path / "study")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    yield tmp_path
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or path.lstat().st_mtime_ns == before[path], "it was written"


IMPOSSIBLE = {
    "too long": "x" * 5000,
    "a path that is too long": "/".join(["y" * 200] * 30),
    "a NUL byte": "a\0b",
    "a lone surrogate": "\ud800",
    "a link to itself": "loop",
    "below a link to itself": "loop/inside",
    "below a file": "file/inside",
}
ODD = {
    "undecodable bytes": os.fsdecode(b"\xff\xfe"),
    "two lines": "a\nb",
    "a colour": "\x1b[31mred",
    "a dash": "-",
    "an emoji": ":dog:",
    "a glob": "[*]",
}
# Commands that lack their last word.
READING = (
    *(["status"], ["table"], ["show"], ["verify"], ["companions"]),
    *(["run", "--device", "gpu", "--out"], ["merge", "into"], ["run"]),
)
ANY_NAME = (
    *(["show", "study"], ["data", "get"], []),
    *(["run", "quickstart", option] for option in ("--device", "--methods", "--set", "--seeds")),
    *(["bench", option] for option in ("--methods", "--runs", "--device", "--rounds")),
)
WRITING = (
    *(["table", "study", "--json"], ["table", "study", "--csv"], ["companions", "study", "--json"]),
    *([*TINY, "--json"], [*TINY, "--tensorboard"]),
)


@pytest.mark.parametrize("name", [*IMPOSSIBLE.values(), *ODD.values()], ids=[*IMPOSSIBLE, *ODD])
def test_a_name_that_nothing_has_is_refused_in_one_sentence(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (*READING, *ANY_NAME):
        refusal(capsys, *command, name)
    refusal(capsys, "rescue", name, "new")


@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (*WRITING, [*TINY, "--out"]):
        refusal(capsys, *command, name)
    refusal(capsys, "merge", name, "study")
    refusal(capsys, "rescue", "study", name)


@pytest.mark.parametrize("name", ["folder", "study/study.sqlite", "/dev/fd/99", "/proc/nothing"])
def test_a_table_goes_to_no_folder_no_study_and_no_stream_that_is_closed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    table = ["table", str(fill(tmp_path / "study"))]
    for command in ([*table, "--json"], [*table, "--csv"], [*TINY, "--json"]):
        refusal(capsys, *command, str(tmp_path / name))


def test_a_place_with_undecodable_bytes_in_its_name_is_as_good_as_any(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    odd = fill(tmp_path / os.fsdecode(b"\xff\xfe"))
    assert exit_code("merge", str(tmp_path / "into"), str(odd)) == 0
    assert capfdbinary.readouterr().out == b"2 units from " + os.fsencode(odd) + b"\n"


def test_two_tables_do_not_go_to_one_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["table", "study", "--json", "table.json", "--csv", f"{place}/table.json"]
    assert "cannot take two tables" in refusal(capsys, *command)


def test_a_table_does_not_replace_the_study_that_the_same_command_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder" / "out"
    for name, why in {
        "": "is the folder of the study",
        "..": "or above it",
        "study.sqlite": "belongs",
        "checkpoints": "belongs",
    }.items():
        assert why in refusal(capsys, *TINY, "--out", str(out), "--json", str(out / name))
    assert not out.parent.exists()


@pytest.mark.parametrize("name", ["study.sqlite", "lock", "arrays", "checkpoints/mine"])
@pytest.mark.parametrize("there", [True, False])
def test_events_go_to_no_place_of_a_study_which_can_still_be_run(
    there: bool, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [*TINY, "--out", str(out)]
    if there:
        assert exit_code(*command) == 0
    before = sorted(tmp_path.rglob("*"))
    assert "belongs to a study" in refusal(capsys, *command, "--tensorboard", str(out / name))
    assert sorted(tmp_path.rglob("*")) == before
    assert exit_code(*command, "--tensorboard", str(out / "events")) == 0


@pytest.mark.parametrize(
    "wrong",
    [["--data", "nowhere"], ["--set", "train_examples=10000"], ["--scheduler", "tcp://"]],
    ids=["data", "option", "address"],
)
def test_a_command_that_is_refused_makes_no_folder(
    wrong: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--scheduler" in wrong:
        pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    command = ["run", "permuted-mnist", "--methods", "van"] if "--data" in wrong else TINY
    places = ["--json", "new/t.json", "--tensorboard", "events", "--out", "out"]
    refusal(capsys, *command, *wrong, *places)
    assert list(tmp_path.iterdir()) == []


def test_a_table_makes_the_folder_that_it_goes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a" / "b" / "t.json"
    assert exit_code("table", str(fill(tmp_path / "study")), "--json", str(table)) == 0
    assert table.exists()


@pytest.mark.parametrize("unit", ["", "^", ".*", "[", "(", "\\", "%", "' or 1=1"])
def test_the_name_of_a_unit_is_no_pattern(
    unit: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ("is empty" if unit == "" else "is no unit") in refusal(capsys, "show", "study", unit)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_folder_that_may_not_be_entered_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(capsys, *TINY)  # what has to be imported is, before the user changes
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        locked, open_ = fill(Path(shared) / "locked" / "study"), fill(Path(shared) / "open")
        os.chmod(locked.parent, 0o700)
        os.seteuid(65534)
        try:
            writing = ([*TINY, "--tensorboard"], [*TINY, "--out"])
            others = (["merge", str(open_)], ["table", str(open_), "--json"])
            for command in (*READING[:-1], *others, *writing):
                assert "Permission denied" in refusal(capsys, *command, str(locked))
            assert "Permission denied" in refusal(capsys, "merge", str(locked), str(open_))
            assert "unknown recipe" in refusal(capsys, "run", str(locked))
        finally:
            os.seteuid(0)


def test_no_place_for_temporary_files_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert "set TMPDIR" in refusal(capsys, *TINY)


def test_a_current_folder_that_is_gone_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder cannot be used" in refusal(capsys, "status", str(tmp_path))


def test_a_pipe_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "study")
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Timer(0.2, lambda: found.append(pipe.read_text()))
    reader.start()
    assert outcome(capsys, "table", str(tmp_path / "study"), "--csv", str(pipe))[0] == 0
    reader.join()
    assert found[0].startswith("recipe,method")
    monkeypatch.setattr(special_files, "PATIENCE", 0.1)
    code, out, err = outcome(capsys, "table", str(tmp_path / "study"), "--csv", str(pipe))
    assert code == 2
    assert "nothing reads from it" in err
    assert "van" in out, "the printed table is not lost with the other"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_table_may_go_to_standard_output_before_the_printed_one(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "study")
    code, out, _ = outcome(capfd, "table", str(tmp_path / "study"), "--csv", name)
    assert code == 0
    first, *_, last = out.splitlines()
    assert first.startswith("recipe,method")
    assert last.split()[0] == "a-gem"


UNFORESEEN = [
    *(OSError(5, "Input/output error"), RecursionError("too deep"), MemoryError()),
    *(UnicodeError("bad\nbytes"), KeyError("x" * 9000), RuntimeError()),
]


@pytest.mark.parametrize("error", UNFORESEEN)
def test_what_was_not_foreseen_is_one_sentence_that_says_how_to_see_more(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(type(error)):
        cli.main(["list"])
    monkeypatch.delenv("ONEPASS_TRACEBACK")
    code, out, err = outcome(capsys, "list")
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert f"not foreseen ({type(error).__name__}: " in line
    assert "ONEPASS_TRACEBACK=1" in line
    assert len(line) < LONGEST + 200


def test_a_file_that_ends_too_early_is_not_taken_for_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[str]:
        raise EOFError("marshal data too short")

    monkeypatch.setattr(recipes, "names", fails)
    monkeypatch.delenv("ONEPASS_TRACEBACK", raising=False)
    code, _, err = outcome(capsys, "list")
    assert code == 1
    assert "not foreseen (EOFError: marshal data too short)" in err
