"""Fleets that fail, die or do not fit: tried again, given to another worker, split or given up."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onepass.errors import InputError
from onepass.studies import progress, work
from onepass.studies.executors import WorkerDiedError
from onepass.studies.results import Result, cross_validation
from onepass.studies.store import Store
from tests.studies.small_study import go, same, small


def test_a_fleet_that_is_being_stored_when_the_user_interrupts_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, interrupts = Store.add, [KeyboardInterrupt]

    def interrupted(store: Store, *arguments: object) -> None:
        if interrupts:
            raise interrupts.pop()
        add(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, small(), workers=1)
    with Store.read(tmp_path) as store:
        assert len(store.contents.records) == 2


def test_an_interrupt_while_progress_is_written_leaves_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(written: str | Path, path: str | Path) -> None:
        if "progress" in Path(path).name:
            assert Path(written).exists()
            raise KeyboardInterrupt
        replace(written, path)

    monkeypatch.setattr(os, "replace", interrupted)
    # A second passes whenever the clock is read.
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=itertools.count().__next__))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, small(), workers=1)
    assert not [path.name for path in tmp_path.iterdir() if "progress" in path.name]


def test_a_model_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a single run of van does not fit"):
        go(tmp_path, small(changes=["hidden=[2000000000]"]))
    found, _ = go(tmp_path, small("van", 1))
    assert len(found["van"].records) == 1, "the folder can still be used"


def test_a_fleet_that_fails_three_times_is_recorded_with_its_traceback_and_the_others_go_on(
    expected: dict[str, Result], tmp_path: Path
) -> None:
    tries, best = 0, expected["van"].hyperparameters

    def fail(job: work.Job) -> Exception | None:
        nonlocal tries
        if job.method != "van" or job.units[0].hyperparameters == best:
            return None
        tries += 1
        try:
            raise ZeroDivisionError("a bug")
        except ZeroDivisionError as error:
            return error

    # With eight workers, each grid point is a fleet.
    found, observer = go(tmp_path, small("van,a-gem"), fail, workers=8)
    assert tries == 3
    left = ["2 attempts left", "1 attempts left", "given up"]
    assert observer.troubles == [f"a bug, {what}" for what in left]
    assert found["van"].hyperparameters == best, "chosen from the grid points that are left"
    assert len(found["van"].records) == len(found["a-gem"].records) == 2
    (text,) = found["van"].failed.values()
    assert text.startswith("Traceback")
    assert "ZeroDivisionError: a bug" in text
    again, observer = go(tmp_path, small("van,a-gem"))
    assert len(observer.stored_units) == 1, "giving the command again tries again"
    assert not again["van"].failed


def test_a_fleet_whose_worker_died_is_given_to_another(
    expected: dict[str, Result], tmp_path: Path
) -> None:
    died: set[str] = set()

    def die_once(job: work.Job) -> Exception | None:
        if job.name in died:
            return None
        died.add(job.name)
        return WorkerDiedError("killed")

    found, observer = go(tmp_path, small("van,a-gem"), die_once)
    assert same(found, expected)
    assert len(observer.troubles) == len(died) > 3


def test_a_fleet_that_does_not_fit_is_split_until_it_does(tmp_path: Path) -> None:
    def script(job: work.Job) -> Exception | None:
        return work.OutOfMemoryError("too large") if len(job.units) > 1 else None

    asked = small(seeds=1, changes=["cv_seeds=4"])
    found, observer = go(tmp_path, asked, script, workers=1)
    said = [trouble.split(",")[0] for trouble in observer.troubles]
    assert said == [f"out of memory with {n} runs side by side" for n in (8, 4, 2)]
    assert len(found["van"].records) == 1
    with Store.read(tmp_path) as store:
        fleets = [store.contents.entries[unit.id].fleet for unit in cross_validation(asked, "van")]
    assert len(set(fleets)) == 8


def test_a_single_run_that_does_not_fit_fails(tmp_path: Path) -> None:
    def script(job: work.Job) -> Exception | None:
        return work.OutOfMemoryError("too large") if job.method == "van" else None

    found, _ = go(tmp_path, small("van,a-gem", 1), script)
    assert len(found["van"].failed) == 2
    assert all("OutOfMemoryError" in text for text in found["van"].failed.values())
    assert len(found["a-gem"].records) == 1


def out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "fail",
    [
        lambda *_, **__: bytearray(1 << 60),
        lambda *_, **__: torch.empty(1 << 50),
        lambda *_, **__: out_of_gpu_memory(),
    ],
    ids=["python", "torch", "cuda"],
)
def test_running_out_of_memory_is_recognised(
    fail: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "train", fail)
    job = work.Job(small(), "van", "cv", tuple(cross_validation(small(), "van")), None, "cpu")
    with pytest.raises(work.OutOfMemoryError):
        work.work(job)
    monkeypatch.setattr(work, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.work(job)
