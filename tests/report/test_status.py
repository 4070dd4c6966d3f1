"""What is said of a study that is not finished."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from onepass.files import StorageError
from onepass.report import status
from onepass.studies.folder import PROGRESS
from onepass.studies.store import Store
from onepass.studies.work import Job
from tests.studies.small_study import go, small


def shown(folder: Path) -> str:
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    status.show(folder, console)
    return console.export_text()


def test_status_says_what_is_done_running_failed_and_how_long_it_will_take(tmp_path: Path) -> None:
    def full(job: Job) -> Exception | None:
        return StorageError("full") if job.method == "van" else None

    with pytest.raises(StorageError):
        go(tmp_path, small("van,a-gem"), full)
    text = shown(tmp_path)
    assert "no process is working on it: go on with 'onepass run --out" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("van", "a-gem"))]
    assert rows == [["van", "0/2", "0/2"], ["a-gem", "1/1", "2/2"]]
    with Store.write_to(tmp_path) as store:
        planned = next(iter(store.open_fleets().values()))[0].unit
        store.fail([planned.id], "Traceback\nValueError: a bug")
        now = {"left": 120.0, "running": {"some": "a-gem"}}
        (tmp_path / PROGRESS).write_text(json.dumps(now))
        text = shown(tmp_path)
        assert "3 of 7 units done, 1 running, 1 failed; about 2 min left" in text
        assert f"{planned.id} (van): ValueError: a bug" in text
        for odd in (
            *("{", "[]", '{"running": []}', '{"running": {}, "steps": 1}', "[" * 20_000),
            *(json.dumps(now | {"left": None}), '{"left": 1e999}'),
        ):
            (tmp_path / PROGRESS).write_text(odd)
            assert "not known yet" in shown(tmp_path)
        (tmp_path / PROGRESS).write_text(json.dumps(now | {"left": 0}))
        assert "about 0 s left" in shown(tmp_path)


def test_status_counts_what_the_recipe_wants_now(tmp_path: Path) -> None:
    go(tmp_path, small(changes=["train_examples=100", "grids.van.learning_rate=0.0001"]))
    more = small(changes=["train_examples=100", "grids.van.learning_rate=[0.0001, 0.1]"])
    with pytest.raises(StorageError):
        go(tmp_path, more, lambda job: StorageError("stop") if job.part == "ev" else None)
    # The two runs of what was chosen before do not count.
    assert "2 of 4 units done" in shown(tmp_path)
    go(tmp_path, more)
    assert "4 of 4 units done, 0 running, 0 failed\n" in shown(tmp_path)


def test_status_of_a_study_whose_whole_grid_diverged_is_finished(tmp_path: Path) -> None:
    found, _ = go(tmp_path, small(changes=["grids.van.learning_rate=[1e9, 1e10]"]))
    assert found["van"].diverged
    assert "2 of 2 units done, 0 running, 0 failed\n" in shown(tmp_path)
