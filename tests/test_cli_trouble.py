"""Everyday trouble on the command line: one sentence and exit code 2, whatever names, values and places are given."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onepass import cli, special_files
from onepass.errors import LONGEST
from onepass.studies import recipe as recipes
from tests.studies.stored import GRID, RECIPE, RUNS, fill, study

TINY = ["run", "quickstart", "--methods", "van", "--seeds", "1", "--workers", "1"]
TINY += [
    word
    for change in (
        "train_examples=5",
        "test_examples=5",
        "hidden=[4]",
        "grids.van.learning_rate=0.1",
    )
    for word in ("--set", change)
]


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return stop.value.code, *capsys.readouterr()


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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a study and odd things in it, which is the current one. Refused commands leave it as it is."""
    fill(tmp_path / "study")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    yield tmp_path
    assert {
        path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
    }.items() <= before.items(), "nothing was written"


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
READING = (
    ["status"],
    ["table"],
    ["show"],
    ["verify"],
    ["companions"],
    ["run", "--device", "gpu", "--out"],
    ["merge", "into"],
    ["run"],
)
ANY_NAME = (
    *(
        ["show", "study"],
        ["data", "get"],
        ["run", "quickstart", "--device"],
        ["run", "quickstart", "--methods"],
        ["run", "quickstart", "--set"],
    ),
    *(
        ["bench", "--methods"],
        ["bench", "--runs"],
        ["bench", "--device"],
        ["bench", "--rounds"],
        ["run", "quickstart", "--seeds"],
        [],
    ),
)
WRITING = (
    ["table", "study", "--json"],
    ["table", "study", "--csv"],
    ["companions", "study", "--json"],
    [*TINY, "--json"],
    [*TINY, "--tensorboard"],
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
    fill(tmp_path / "study")
    for command in (
        ["table", str(tmp_path / "study"), "--json"],
        ["table", str(tmp_path / "study"), "--csv"],
        [*TINY, "--json"],
    ):
        refusal(capsys, *command, str(tmp_path / name))


def test_a_place_with_undecodable_bytes_in_its_name_is_as_good_as_any(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff\xfe")
    fill(odd)
    with pytest.raises(SystemExit) as stop:
        cli.main(["merge", str(tmp_path / "into"), str(odd)])
    assert not stop.value.code
    assert capfdbinary.readouterr().out == b"2 units from " + os.fsencode(odd) + b"\n"


def test_two_tables_do_not_go_to_one_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot take two tables" in refusal(
        capsys, "table", "study", "--json", "table.json", "--csv", f"{place}/table.json"
    )


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
    if there:
        assert outcome(capsys, *TINY, "--out", str(out))[0] == 0
    before = sorted(tmp_path.rglob("*"))
    assert "belongs to a study" in refusal(
        capsys, *TINY, "--out", str(out), "--tensorboard", str(out / name)
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert outcome(capsys, *TINY, "--out", str(out), "--tensorboard", str(out / "events"))[0] == 0


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
    refusal(
        capsys, *command, *wrong, "--json", "new/t.json", "--tensorboard", "events", "--out", "out"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_table_makes_the_folder_that_it_goes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "study")
    assert (
        outcome(
            capsys, "table", str(tmp_path / "study"), "--json", str(tmp_path / "a" / "b" / "t.json")
        )[0]
        == 0
    )
    assert (tmp_path / "a" / "b" / "t.json").exists()


VALUES = {
    "5 000 digits": "9" * 5000,
    "5 000 hexadecimal digits": "0x" + "f" * 5000,
    "too large for a float": "1e400",
    "infinite": "-inf",
    "not a number": "nan",
    "a condition": "true",
    "nested": "[" * 2000 + "]" * 2000,
    "nested and open": "{a=" * 3000,
    "a long list": f"[{','.join(['-1'] * 5000)}]",
    "a date": "1979-05-27",
    "several lines": "1\nseeds = 2",
    "a surrogate": "\ud800",
    "nothing": "",
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_that_is_none_is_refused_by_the_name_of_its_key(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (
        "seeds",
        "cv_seeds",
        "hidden",
        "batch_size",
        "grids.van.learning_rate",
        "memory",
        "network",
    ):
        assert key in refusal(
            capsys, "run", "quickstart", "--device", "gpu", "--set", f"{key}={value}"
        )


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "grids",
        "grids.",
        "grids.van",
        "seeds.x",
        "[x]",
        "'",
        "\n",
        "\0",
        "__class__",
        "model_config",
        "é" * 3000,
    ],
)
def test_a_key_that_is_none_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("=1", "==", "=[1]", ""):
        refusal(capsys, "run", "quickstart", "--set", key + value)


@pytest.mark.parametrize("flag", ["--runs", "--rounds", "--tasks"])
@pytest.mark.parametrize("value", ["0", "-1", "1000000000", "9" * 5000, "", ",", "1;2", "1.5"])
def test_a_benchmark_of_impossible_size_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in refusal(capsys, "bench", "--device", "cpu", flag, value)


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
            for command in (
                *READING[:-1],
                ["merge", str(open_)],
                ["table", str(open_), "--json"],
                [*TINY, "--tensorboard"],
                [*TINY, "--out"],
            ):
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


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        RecursionError("too deep"),
        MemoryError(),
        UnicodeError("bad\nbytes"),
        KeyError("x" * 9000),
        RuntimeError(),
    ],
)
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


def test_a_grid_value_that_is_given_twice_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = [
        *TINY,
        "--set",
        "grids.van.learning_rate=[0.1, 1e-1, 0.1]",
        "--methods",
        "van,van",
        "--out",
        str(tmp_path),
    ]
    assert outcome(capsys, *twice)[0] == 0
    assert "2 of 2 units done" in outcome(capsys, "status", str(tmp_path))[1]
    assert (
        outcome(capsys, *twice, "--set", "grids.van.learning_rate=[0.1, 0.03, 0.1, 0.03]")[0] == 0
    )
    assert "of 3 units done" in outcome(capsys, "status", str(tmp_path))[1]


def test_a_study_that_was_stored_with_a_grid_value_twice_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = RECIPE.stored() | {
        "methods": ["van", "van"],
        "grids": {**RECIPE.grids, "van": {"learning_rate": [0.1, 0.03, 0.1, 0.03]}},
    }
    fill(tmp_path / "study", [*GRID, *RUNS])
    with study(tmp_path / "study") as store:
        store.note(recipe=finished)
    assert "4 of 4 units done" in outcome(capsys, "status", str(tmp_path / "study"))[1]
    code, out, _ = outcome(capsys, "table", str(tmp_path / "study"))
    assert code == 0
    assert out.count(" van ") == 1
    assert "to do" not in out
    assert outcome(capsys, "merge", str(tmp_path / "into"), str(tmp_path / "study"))[0] == 0
    assert "4 of 4 units done" in outcome(capsys, "status", str(tmp_path / "into"))[1]


def test_what_a_study_says_about_the_paper_does_not_count(tmp_path: Path) -> None:
    claims = RECIPE.stored() | {
        "paper": {"published": {"van": {"A_T": [0.5, 0.1]}}},
        "summary": "mine",
    }
    for made in (recipes.from_stored(claims), recipes.load("quickstart", stored=claims)):
        assert made.paper == recipes.load("quickstart").paper
        assert made.summary == recipes.load("quickstart").summary


@pytest.mark.parametrize(
    "part",
    [
        {"hidden": "x" * 100_000},
        {"hidden": [10**5000]},
        {"x" * 9000: 1},
        {"grids": {"van": {"learning_rate": [0] * 9999}}},
    ],
)
def test_what_is_wrong_with_a_stored_recipe_is_said_in_a_short_sentence(
    part: dict[str, Any],
) -> None:
    with pytest.raises(recipes.InputError) as refused:
        recipes.from_stored(RECIPE.stored() | part)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("stored", [{}, [], None, "quickstart", {"name": ["quickstart"]}])
def test_a_stored_recipe_that_is_none_is_refused(stored: Any) -> None:
    with pytest.raises(recipes.InputError):
        recipes.from_stored(stored)
