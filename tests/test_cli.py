"""The command line: bad input is one sentence, a run is a table and JSON."""

from __future__ import annotations

import csv
import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from hashlib import md5
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.cli import main
from onepass.learners import METHODS
from onepass.streams import STREAMS, mnist
from onepass.studies import recipe

TINY = (
    "run quickstart --methods van --seeds 2 --set train_examples=60 --set test_examples=40"
    " --set grids.van.learning_rate=0.1"
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def exit_code(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert exit_code(*arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("onepass: ")
    assert "Traceback" not in line
    assert printed.out == ""
    return line


@pytest.mark.parametrize(
    ("command", "mentions"),
    [
        ("run quikstart", "did you mean 'quickstart'?"),
        ("run quickstart --methods agem", "did you mean 'a-gem'?"),
        ("run quickstart --methods=,", "at least one method"),
        ("run quickstart --set memory_per_tsk=5", "did you mean 'memory_per_task'?"),
        (
            "run quickstart --set grids.vna.learning_rate=0.1",
            "did you mean 'grids.van.learning_rate'?",
        ),
        ("run quickstart --set batch_size", "--set key=value"),
        ("run quickstart --set batch_size=ten", "batch_size='ten'"),
        ("run quickstart --set batch_size=0", "batch_size=0"),
        ("run quickstart --set memory=rnig", "'ring'"),
        ("run quickstart --set memory_per_task=0", "memory_per_task=0"),
        ("run quickstart --set memory_per_task=-5", "memory_per_task=-5"),
        ("run quickstart --set grids.van.learning_rate=0", "grids.van.learning_rate"),
        ("run quickstart --set train_examples=1000000", "train_examples=1000000"),
        ("run quickstart --seeds 0", "seeds=0"),
        ("run quickstart --seeds -1", "seeds=-1"),
        ("run quickstart --workers 0", "--workers 0"),
        ("run quickstart --threads 0", "--threads 0"),
        ("run quickstart --checkpoint-every 0", "--checkpoint-every 0"),
        ("run", "name a recipe to run"),
        ("run --out {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("run {tmp}/harmed", "go on with it by 'onepass run --out {tmp}/harmed'"),
        ("run quickstart --scheduler nonsense", "write tcp://HOST:PORT"),
        ("run quickstart --json {tmp}/harmed/study.sqlite", "belongs to a study"),
        ("run quickstart --out {tmp}/file/study", "{tmp}/file is not a folder"),
        ("run quickstart --tensorboard {tmp}/file", "{tmp}/file is not a folder"),
        ("status {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("status {tmp}/file", "there is no study in {tmp}/file"),
        ("status {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("table {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("show {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("verify {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("run quickstart --out {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("merge {tmp}/new {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("table {tmp}/folder", "there is no study in {tmp}/folder"),
        ("show {tmp}/folder some", "there is no study in {tmp}/folder"),
        ("merge {tmp}/folder {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("merge {tmp}/folder {tmp}/folder", "cannot be merged into itself"),
        ("verify {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("companions {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("companions {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("run quickstart --device gpu", "cpu, cuda or auto"),
        pytest.param("run quickstart --device cuda", "--device cpu", marks=no_gpu),
        ("run quickstart --json {tmp}/file/table.json", "{tmp}/file is not a folder"),
        ("run quickstart --json {tmp}/folder", "{tmp}/folder (it is a folder)"),
        ("run quickstart --out {tmp}/file", "{tmp}/file is not a folder"),
        ("run permuted-mnist --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get mnst", "did you mean 'mnist'?"),
        ("data get mnist --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get cifar10", "did you mean 'cifar100'?"),
        ("data get cifar100 --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get cifar100 --data {tmp}/short", "{tmp}/short/train.bin has 2 bytes"),
    ],
)
def test_bad_input_is_one_sentence(
    command: str, mentions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "harmed").mkdir()
    (tmp_path / "harmed" / "study.sqlite").write_bytes(b"SQLite format 3\0" + bytes(1000))
    (tmp_path / "short").mkdir()
    for name in ("train.bin", "test.bin"):
        (tmp_path / "short" / name).write_bytes(b"no")
    line = refusal(capsys, *(word.format(tmp=tmp_path) for word in command.split()))
    assert mentions.format(tmp=tmp_path) in line


def test_a_refused_command_leaves_no_study_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal(
        capsys,
        "run",
        "quickstart",
        "--set",
        "train_examples=1000000",
        "--out",
        str(tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "merge some",
        "run quickstart --sedes 3",
        "run quickstart --seeds some",
        "data get",
        "walk",
    ],
)
def test_wrong_usage_exits_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def mnist_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four tiny files in the format of MNIST that count as the canonical ones."""
    for name in mnist.FILES:
        shape = (2, 28, 28) if "images" in name else (2,)
        content = (
            bytes([0, 0, 8, len(shape)])
            + struct.pack(f">{len(shape)}I", *shape)
            + bytes(2 * 28 * 28 if "images" in name else 2)
        )
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(mnist.FILES, name, ("", md5(content).hexdigest()))
    return tmp_path


def test_a_folder_with_sound_files_is_found(
    mnist_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("data", "get", "mnist", "--data", str(mnist_folder)) == 0
    assert capsys.readouterr().out.strip() == str(mnist_folder)


@pytest.mark.parametrize("command", ["run permuted-mnist", "data get mnist"])
@pytest.mark.parametrize(
    "harm",
    [lambda content: content[:-1], lambda content: content[:-1] + b"\x01", lambda _: b""],
    ids=["truncated", "altered", "empty"],
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_harmed_file_is_refused_by_its_name(
    command: str,
    harm: Callable[[bytes], bytes],
    name: str,
    mnist_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = mnist_folder / name
    path.write_bytes(harm(path.read_bytes()))
    line = refusal(capsys, *command.split(), "--data", str(mnist_folder))
    assert f"{path} is truncated or altered" in line


def test_the_data_folder_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEPASS_DATA", str(tmp_path / "nowhere"))
    assert "ONEPASS_DATA" in refusal(capsys, "run", "permuted-mnist")


def test_list_names_every_stream_method_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("list") == 0
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    for name in [*STREAMS, *METHODS, *recipe.names()]:
        assert name in first_words


def tiny_run(folder: Path, workers: int = 1) -> tuple[dict[str, Any], str]:
    """The JSON and the printed table of a run that takes a second."""
    table, printed = folder / "table.json", StringIO()
    with redirect_stdout(printed):
        assert (
            exit_code(
                *TINY.split(),
                "--workers",
                str(workers),
                "--json",
                str(table),
                "--out",
                str(folder / "out"),
            )
            == 0
        )
    return json.loads(table.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> tuple[dict[str, Any], str]:
    return tiny_run(folder)


def test_json_has_every_number_of_the_table_for_every_seed(
    outcome: tuple[dict[str, Any], str],
) -> None:
    document, _ = outcome
    assert document["recipe"] == "quickstart"
    assert set(document["methods"]) == {"van"}
    van = document["methods"]["van"]
    assert van["hyperparameters"] == {"learning_rate": 0.1}
    for name in ("A_T", "F_T", "LCA_10", "worst_forgetting", "seconds"):
        assert set(van[name]) == {"mean", "std", "interval", "values"}
        assert len(van[name]["values"]) == 2
        assert van[name]["mean"] == pytest.approx(sum(van[name]["values"]) / 2)
        low, high = van[name]["interval"]
        assert low <= van[name]["mean"] <= high
    assert all(0 <= value <= 1 for name in ("A_T", "LCA_10") for value in van[name]["values"])
    assert all(value > 0 for value in van["seconds"]["values"])
    assert van["violations"]["mean"] is None  # plain SGD has no constraint


def test_the_table_is_printed(outcome: tuple[dict[str, Any], str]) -> None:
    document, printed = outcome
    (row,) = [line for line in printed.splitlines() if " van " in line]
    assert "lr=0.1" in row
    assert f"{100 * document['methods']['van']['A_T']['mean']:.1f}±" in row


def test_the_folder_keeps_the_study_so_that_its_table_can_be_printed_again(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    printed, again, lines = StringIO(), folder / "again.json", folder / "again.csv"
    with redirect_stdout(printed):
        assert (
            exit_code("table", str(folder / "out"), "--json", str(again), "--csv", str(lines)) == 0
        )
    assert json.loads(again.read_text()) == outcome[0]
    assert printed.getvalue() == outcome[1]
    rows = list(csv.DictReader(lines.open()))
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert [float(row["A_T"]) for row in rows] == outcome[0]["methods"]["van"]["A_T"]["values"]


def test_a_finished_study_is_not_done_again(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    before = {path: path.read_bytes() for path in (folder / "out" / "arrays").iterdir()}
    document, _ = tiny_run(folder)
    assert document == outcome[0], "even the seconds are those of the first time"
    assert {path: path.read_bytes() for path in (folder / "out" / "arrays").iterdir()} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_command_gives_the_same_values_with_any_number_of_workers(
    workers: int, outcome: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    again, _ = tiny_run(tmp_path, workers)
    for name in ("A_T", "F_T", "LCA_10"):
        expected = outcome[0]["methods"]["van"][name]["values"]
        assert again["methods"]["van"][name]["values"] == (
            expected if workers == 1 else pytest.approx(expected, abs=1e-6)
        )


def test_a_method_whose_whole_grid_diverges_does_not_take_the_others_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    small = [
        "--set",
        "train_examples=60",
        "--set",
        "test_examples=40",
        "--set",
        "grids.van.learning_rate=0.1",
        "--seeds",
        "1",
        "--workers",
        "1",
    ]
    wild = ["--set", "grids.ewc.learning_rate=0.3", "--set", "grids.ewc.strength=10000"]
    with pytest.raises(SystemExit) as stop:
        main(["run", "quickstart", "--methods", "van,ewc", *small, *wild, "--json", str(table)])
    assert not stop.value.code
    methods = json.loads(table.read_text())["methods"]
    assert methods["van"]["A_T"]["mean"] is not None
    assert methods["ewc"]["A_T"]["mean"] is None
    assert methods["ewc"]["diverged_in_cross_validation"]
    assert "diverged" in capsys.readouterr().out


def printed(*arguments: str) -> str:
    text = StringIO()
    with redirect_stdout(text):
        assert exit_code(*arguments) == 0
    return text.getvalue()


def test_status_and_show_look_into_a_study(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    study = str(folder / "out")
    assert "3 of 3 units done, 0 running, 0 failed" in printed("status", study)
    lines = printed("show", study).splitlines()[1:]
    assert [line.split()[1:4] for line in lines] == [
        ["van", "cv", "0"],
        ["van", "ev", "0"],
        ["van", "ev", "1"],
    ]
    page = printed("show", study, lines[1].split()[0][:8])
    assert f"A_T = {outcome[0]['methods']['van']['A_T']['values'][0]:.6g}" in page
    assert "hyperparameters = {'learning_rate': 0.1}" in page
    assert f"torch {torch.__version__}" in page
    assert (
        len(page.splitlines()[-1].split()) == len(page.partition("(rows)\n")[2].splitlines()) == 17
    )


def test_show_refuses_a_unit_that_is_not_there(
    outcome: tuple[dict[str, Any], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'zzz' is no unit of this study" in refusal(capsys, "show", str(folder / "out"), "zzz")
    assert "an argument is empty" in refusal(capsys, "show", str(folder / "out"), "")


def test_a_study_goes_on_without_its_recipe_being_named(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    assert printed("run", "--out", str(folder / "out"), "--workers", "1") == outcome[1]


def test_companions_go_to_no_file_of_a_study(
    outcome: tuple[dict[str, Any], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = folder / "out"
    assert "belongs to a study" in refusal(
        capsys, "companions", str(study), "--json", str(study / "study.sqlite")
    )
    assert "it is a folder" in refusal(capsys, "companions", str(study), "--json", str(study))


def test_a_study_of_which_nothing_can_be_compared_is_not_verified(
    outcome: tuple[dict[str, Any], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("verify", str(folder / "out")) == 1
    text = capsys.readouterr().out
    assert "not published" in text
    changes = "train_examples=60, test_examples=40"
    why = f"the paper's numbers are not for this study, which has {changes}"
    assert f"nothing was compared: {why}" in text


def test_merging_a_study_into_a_new_folder_copies_it(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    assert (
        printed("merge", str(tmp_path / "all"), str(folder / "out"))
        == f"3 units from {folder / 'out'}\n"
    )
    assert printed("table", str(tmp_path / "all")) == outcome[1]


def test_tensorboard_gets_every_unit_once(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra 'track' is not installed",
    )
    for _ in range(2):
        printed(
            "run", "--out", str(folder / "out"), "--workers", "1", "--tensorboard", str(tmp_path)
        )
    units = [path.parent for path in tmp_path.rglob("events*")]
    assert len(units) == len(set(units)) == 3
    (unit,) = [path for path in units if "ev" in path.parts and "seed=0" in path.name]
    events = accumulator.EventAccumulator(str(unit)).Reload()
    assert len(events.Scalars("average accuracy")) == 17
    assert events.Scalars("average accuracy")[-1].value == pytest.approx(
        outcome[0]["methods"]["van"]["A_T"]["values"][0]
    )


def limit_file_size() -> None:
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (300_000, 300_000)
    )  # a write beyond that fails like one on a full disk


def test_a_full_disk_is_one_sentence_and_the_study_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    command = [
        str(Path(sys.executable).with_name("onepass")),
        *TINY.split(),
        "--workers",
        "2",
        "--out",
        str(tmp_path / "out"),
        "--checkpoint-every",
        "2",
    ]
    failed = subprocess.run(
        command, preexec_fn=limit_file_size, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert (
        "(File too large): make room or choose another place, and give the same command again"
        in failed.stderr.splitlines()[-1]
    )
    assert not list(tmp_path.rglob(".onepass-partial-*"))
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "3 of 3 units done" in printed("status", str(tmp_path / "out"))


def test_a_study_in_a_folder_with_an_odd_name_is_shown(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "x[bold]y [red]"
    odd.symlink_to(folder / "out")
    assert str(odd) in printed("status", str(odd))


def test_a_table_follows_links_and_is_written_into_pipes(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    printed("table", str(folder / "out"), "--json", str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text()) == outcome[0]
    assert printed("table", str(folder / "out"), "--csv", "/dev/stdout").count("\n") >= 3
    assert not Path("/dev/stdout").is_file() or Path("/dev/stdout").is_symlink()
