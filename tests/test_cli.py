"""The command line: a run is a table, JSON and a folder that can be looked into."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.learners import METHODS
from onepass.streams import STREAMS
from onepass.studies import recipe
from tests.commands import ONEPASS, exit_code, printed, refusal, setting
from tests.commands import outcome as run

TWO_SEEDS = [
    *("run", "quickstart", "--methods", "van", "--seeds", "2"),
    *setting("train_examples=60", "test_examples=40", "grids.van.learning_rate=0.1"),
]


def test_list_names_every_stream_method_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("list") == 0
    first_words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    for name in [*STREAMS, *METHODS, *recipe.names()]:
        assert name in first_words


def tiny_run(folder: Path, workers: int = 1) -> tuple[dict[str, Any], str]:
    """The JSON and the printed table of a run that takes a second."""
    table, places = folder / "table.json", ["--out", str(folder / "out"), "--json"]
    text = printed(*TWO_SEEDS, "--workers", str(workers), *places, str(table))
    return json.loads(table.read_text()), text


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
    document, text = outcome
    (row,) = [line for line in text.splitlines() if " van " in line]
    assert "lr=0.1" in row
    assert f"{100 * document['methods']['van']['A_T']['mean']:.1f}±" in row


def test_the_folder_keeps_the_study_so_that_its_table_can_be_printed_again(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    again, lines = folder / "again.json", folder / "again.csv"
    text = printed("table", str(folder / "out"), "--json", str(again), "--csv", str(lines))
    assert json.loads(again.read_text()) == outcome[0]
    assert text == outcome[1]
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
        if workers > 1:
            expected = pytest.approx(expected, abs=1e-6)
        assert again["methods"]["van"][name]["values"] == expected


def test_a_method_whose_whole_grid_diverges_does_not_take_the_others_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    wild = setting("grids.ewc.learning_rate=0.3", "grids.ewc.strength=10000")
    one_seed = ["--methods", "van,ewc", "--seeds", "1", "--workers", "1"]
    code, out, _ = run(capsys, *TWO_SEEDS, *one_seed, *wild, "--json", str(table))
    assert code == 0
    methods = json.loads(table.read_text())["methods"]
    assert methods["van"]["A_T"]["mean"] is not None
    assert methods["ewc"]["A_T"]["mean"] is None
    assert methods["ewc"]["diverged_in_cross_validation"]
    assert "diverged" in out


def test_status_and_show_look_into_a_study(
    outcome: tuple[dict[str, Any], str], folder: Path
) -> None:
    study = str(folder / "out")
    assert "3 of 3 units done, 0 running, 0 failed" in printed("status", study)
    lines = printed("show", study).splitlines()[1:]
    found = [" ".join(line.split()[1:4]) for line in lines]
    assert found == ["van cv 0", "van ev 0", "van ev 1"]
    page = printed("show", study, lines[1].split()[0][:8])
    assert f"A_T = {outcome[0]['methods']['van']['A_T']['values'][0]:.6g}" in page
    assert "hyperparameters = {'learning_rate': 0.1}" in page
    assert f"torch {torch.__version__}" in page
    rows = page.partition("(rows)\n")[2].splitlines()
    assert len(rows) == len(rows[-1].split()) == 17


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
    command = ["companions", str(study), "--json"]
    assert "belongs to a study" in refusal(capsys, *command, str(study / "study.sqlite"))
    assert "it is a folder" in refusal(capsys, *command, str(study))


def test_a_study_of_which_nothing_can_be_compared_is_not_verified(
    outcome: tuple[dict[str, Any], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("verify", str(folder / "out")) == 1
    text = capsys.readouterr().out
    assert "not published" in text
    why = "the paper's numbers are not for this study, which has train_examples=60"
    assert f"nothing was compared: {why}, test_examples=40" in text


def test_merging_a_study_into_a_new_folder_copies_it(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    said = printed("merge", str(tmp_path / "all"), str(folder / "out"))
    assert said == f"3 units from {folder / 'out'}\n"
    assert printed("table", str(tmp_path / "all")) == outcome[1]


def test_tensorboard_gets_every_unit_once(
    outcome: tuple[dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra 'track' is not installed",
    )
    command = ["run", "--out", str(folder / "out"), "--workers", "1"]
    for _ in range(2):
        printed(*command, "--tensorboard", str(tmp_path))
    units = [path.parent for path in tmp_path.rglob("events*")]
    assert len(units) == len(set(units)) == 3
    (unit,) = [path for path in units if "ev" in path.parts and "seed=0" in path.name]
    events = accumulator.EventAccumulator(str(unit)).Reload()
    assert len(events.Scalars("average accuracy")) == 17
    expected = outcome[0]["methods"]["van"]["A_T"]["values"][0]
    assert events.Scalars("average accuracy")[-1].value == pytest.approx(expected)


def limit_file_size() -> None:
    """A write beyond that fails like one on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_full_disk_is_one_sentence_and_the_study_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    command = [ONEPASS, *TWO_SEEDS, "--workers", "2", "--checkpoint-every", "2"]
    command += ["--out", str(tmp_path / "out")]
    failed = subprocess.run(
        command, preexec_fn=limit_file_size, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    what = "make room or choose another place, and give the same command again"
    assert f"(File too large): {what}" in failed.stderr.splitlines()[-1]
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
