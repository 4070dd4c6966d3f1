"""Running a study: only what is missing, in the same fleets, whatever goes wrong on the way."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from onepass.errors import InputError
from onepass.files import StorageError
from onepass.learners import METHODS
from onepass.protocol import Run, train
from onepass.report import status
from onepass.studies import study, work
from onepass.studies.database import FILE
from onepass.studies.executors import Trained, WorkerDiedError, executor
from onepass.studies.recipe import Recipe, grown, load, united
from onepass.studies.results import Result, cross_validation
from onepass.studies.store import Store
from onepass.studies.study import Means
from tests.studies.small_study import small
from tests.toys import Silent


class Scripted:
    """Trains at once, in this thread, after asking a script whether to."""

    workers = slots = 1

    def __init__(self, script: Callable[[work.Job], Exception | None] = lambda _: None) -> None:
        self.jobs: list[work.Job] = []
        self._script = script

    def submit(self, job: work.Job) -> Future[Trained]:
        self.jobs.append(job)
        done: Future[Trained] = Future()
        error = self._script(job)
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(work.work(job))
        return done

    def steps(self) -> dict[str, int]:
        return {}

    def held_up(self) -> None:
        return None


def go(
    folder: Path,
    asked: Recipe,
    script: Callable[[work.Job], Exception | None] = lambda _: None,
    workers: int = 2,
) -> tuple[dict[str, Result], Silent]:
    observer = Silent()
    with study.opened(folder, asked) as (store, recipe):
        found = study.run(
            recipe, store, Means(workers=workers, checkpoint_every=2), Scripted(script), observer
        )  # type: ignore[arg-type]
    return found, observer


def same(one: dict[str, Result], other: dict[str, Result]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].hyperparameters == other[name].hyperparameters
        and len(one[name].records) == len(other[name].records) > 0
        and all(a.same_as(b) for a, b in zip(one[name].records, other[name].records, strict=True))
        for name in one
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return go(tmp_path_factory.mktemp("expected"), small("van,a-gem"))[0]


def test_a_study_that_is_stopped_after_any_fleet_does_the_rest_and_ends_bit_identical(
    expected: dict[str, Result], tmp_path: Path
) -> None:
    stored: list[str] = []
    for allowed in (1, 2, 1):
        left = allowed

        def stop_later(_: work.Job) -> Exception | None:
            nonlocal left
            left -= 1
            return None if left >= 0 else StorageError("the disk is full")

        with pytest.raises(StorageError):
            go(tmp_path, small("van,a-gem"), stop_later)
        with Store.read(tmp_path) as store:
            assert set(stored) < set(store.contents.records)
            stored = list(store.contents.records)
    found, observer = go(tmp_path, small("van,a-gem"), workers=1)
    assert same(found, expected)
    assert set(stored).isdisjoint(observer.stored_units)
    assert len(observer.stored_units) + len(stored) == 2 + 2 + 1 + 2


def test_one_more_method_or_seed_adds_just_that(
    expected: dict[str, Result], tmp_path: Path
) -> None:
    _, first = go(tmp_path, small("van", 2))
    assert len(first.stored_units) == 2 + 2
    found, second = go(tmp_path, small("a-gem", 2))
    assert len(second.stored_units) == 1 + 2
    assert same(found, expected)
    other_grids = small(
        "a-gem", 2, ["grids.van.learning_rate=[0.3, 0.01]", "options.ewc.fisher_every=3"]
    )
    assert go(tmp_path, other_grids)[1].stored_units == [], (
        "grids and options of methods that are not asked for do not matter"
    )
    _, third = go(tmp_path, small("van", 3))
    assert len(third.stored_units) == 2  # a seed for each of two methods
    found, fourth = go(tmp_path, small("van", 1))
    assert fourth.stored_units == []
    assert len(found["van"].records) == 3


def test_a_larger_grid_is_tried_and_chosen_from(tmp_path: Path) -> None:
    found, _ = go(tmp_path, small(changes=["train_examples=100", "grids.van.learning_rate=0.0001"]))
    assert found["van"].hyperparameters == {"learning_rate": 0.0001}
    found, more = go(
        tmp_path, small(changes=["train_examples=100", "grids.van.learning_rate=[0.0001, 0.1]"])
    )
    assert found["van"].hyperparameters == {"learning_rate": 0.1}
    assert len(more.stored_units) == 1 + 2


def test_a_study_never_becomes_another_one(tmp_path: Path) -> None:
    go(tmp_path, small(seeds=1))
    before = (tmp_path / FILE).read_bytes()
    for changes, reason in (
        (["batch_size=5"], "batch_size = 10, not 5"),
        (["train_examples=31"], "stream_options"),
        (["grids.van.learning_rate=0.1"], "learning_rate = 0.001 of van was tried already"),
    ):
        with pytest.raises(InputError, match=reason):
            go(tmp_path, small(changes=changes))
    with pytest.raises(InputError, match="name = 'quickstart'"):
        go(tmp_path, load("split-digits"))
    assert (tmp_path / FILE).read_bytes() == before


def test_a_study_without_results_may_become_another_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        go(tmp_path, small(changes=["batch_size=5"]), lambda _: StorageError("stop"))
    found, _ = go(tmp_path, small("van", 1))
    assert len(found["van"].records) == 1
    with Store.read(tmp_path) as store:
        assert {
            entry.unit.configuration["batch_size"] for entry in store.contents.entries.values()
        } == {10}


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
    monkeypatch.setattr(
        study, "time", SimpleNamespace(time=itertools.count().__next__, monotonic=time.monotonic)
    )  # a second passes whenever the clock is read
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, small(), workers=1)
    assert not [path.name for path in tmp_path.iterdir() if "progress" in path.name]


def test_a_model_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a single run of van does not fit"):
        go(tmp_path, small(changes=["hidden=[2000000000]"]))
    found, _ = go(tmp_path, small("van", 1))
    assert len(found["van"].records) == 1, "the folder can still be used"


def test_options_of_a_method_may_change_only_before_it_has_begun() -> None:
    stored = small("van")
    asked = small("van,a-gem", changes=["options.a-gem.reference_batch=9"])
    assert grown(stored, asked).method_options("a-gem").reference_batch == 9
    with pytest.raises(InputError, match="options of a-gem"):
        united(small("a-gem"), asked)


def test_the_stored_plan_decides_the_fleets_and_not_the_workers_of_today(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        go(tmp_path, small(changes=["cv_seeds=3"]), lambda _: StorageError("stop"), workers=3)
    executor_ = Scripted()
    with study.opened(tmp_path, small(changes=["cv_seeds=3"])) as (store, recipe):
        study.run(recipe, store, Means(workers=1), executor_, Silent())  # type: ignore[arg-type]
    assert [len(job.units) for job in executor_.jobs if job.part == "cv"] == [2, 2, 2]


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

    found, observer = go(
        tmp_path, small("van,a-gem"), fail, workers=8
    )  # so many that each grid point is a fleet
    assert tries == 3
    assert observer.troubles == [
        "a bug, 2 attempts left",
        "a bug, 1 attempts left",
        "a bug, given up",
    ]
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
    script = lambda job: work.OutOfMemoryError("too large") if len(job.units) > 1 else None  # noqa: E731
    asked = small(seeds=1, changes=["cv_seeds=4"])
    found, observer = go(tmp_path, asked, script, workers=1)
    assert [trouble.split(",")[0] for trouble in observer.troubles] == [
        f"out of memory with {n} runs side by side" for n in (8, 4, 2)
    ]
    assert len(found["van"].records) == 1
    with Store.read(tmp_path) as store:
        fleets = [store.contents.entries[unit.id].fleet for unit in cross_validation(asked, "van")]
    assert len(set(fleets)) == 8


def test_a_single_run_that_does_not_fit_fails(tmp_path: Path) -> None:
    found, _ = go(
        tmp_path,
        small("van,a-gem", 1),
        lambda job: work.OutOfMemoryError("too large") if job.method == "van" else None,
    )
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


def test_checkpoints_are_gone_when_their_fleet_is_stored(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        go(tmp_path, small(), lambda job: StorageError("stop") if job.part == "ev" else None)
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == []
    go(tmp_path, small())
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_of_another_fleet_is_never_used(tmp_path: Path) -> None:
    go(tmp_path, small())
    jobs = [
        work.Job(
            small(changes=[change]),
            "van",
            "cv",
            tuple(cross_validation(small(changes=[change]), "van")),
            None,
            "cpu",
            str(tmp_path),
        )
        for change in ("batch_size=10", "batch_size=5")
    ]
    assert jobs[0].name != jobs[1].name
    assert (
        work.Job(
            small(), "van", "cv", jobs[0].units, None, "cpu", str(tmp_path / "nowhere")
        ).checkpoints()
        is None
    )


class Counting(Silent):
    """Remembers what is told about the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []
        self.shares: list[float] = []

    def steps(self, done: int, share: float, left: float | None) -> None:
        self.done.append(done)
        self.shares.append(share)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_thread_and_local_processes_give_the_same_records(
    workers: int, expected: dict[str, Result], tmp_path: Path
) -> None:
    with (
        study.opened(tmp_path, small("van,a-gem")) as (store, recipe),
        executor(workers, 1) as where,
    ):
        observer = Counting()
        found = study.run(recipe, store, Means(workers=2), where, observer)
    assert same(found, expected)
    assert observer.done == sorted(observer.done)
    assert (
        observer.done[-1] == 3 * 9 + 4 * 51
    )  # three grid points on three tasks, four runs on seventeen, of three batches each
    assert observer.shares[-1] == 1.0


def shown(folder: Path) -> str:
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    status.show(folder, console)
    return console.export_text()


def test_status_says_what_is_done_running_failed_and_how_long_it_will_take(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        go(
            tmp_path,
            small("van,a-gem"),
            lambda job: StorageError("full") if job.method == "van" else None,
        )
    text = shown(tmp_path)
    assert "nobody is working on it: go on with 'onepass run --out" in text
    rows = {
        line.split()[0]: line.split()[1:]
        for line in text.splitlines()
        if line.startswith(("van", "a-gem"))
    }
    assert rows == {"van": ["0/2", "0/2"], "a-gem": ["1/1", "2/2"]}
    with Store.write_to(tmp_path) as store:
        planned = next(iter(store.open_fleets().values()))[0].unit
        store.fail([planned.id], "Traceback\nValueError: a bug")
        now = {"left": 120.0, "running": {"some": "a-gem"}}
        (tmp_path / study.PROGRESS).write_text(json.dumps(now))
        text = shown(tmp_path)
        assert "3 of 7 units done, 1 running, 1 failed; about 2 min left" in text
        assert f"{planned.id} (van): ValueError: a bug" in text
        for odd in (
            "{",
            "[]",
            '{"running": []}',
            '{"running": {}, "steps": 1}',
            json.dumps(now | {"left": None}),
            '{"left": 1e999}',
            "[" * 20_000,
        ):
            (tmp_path / study.PROGRESS).write_text(odd)
            assert "not known yet" in shown(tmp_path)
        (tmp_path / study.PROGRESS).write_text(json.dumps(now | {"left": 0}))
        assert "about 0 s left" in shown(tmp_path)
    assert study.PROGRESS == status.PROGRESS


def test_status_counts_what_the_recipe_wants_now(tmp_path: Path) -> None:
    go(tmp_path, small(changes=["train_examples=100", "grids.van.learning_rate=0.0001"]))
    more = small(changes=["train_examples=100", "grids.van.learning_rate=[0.0001, 0.1]"])
    with pytest.raises(StorageError):
        go(tmp_path, more, lambda job: StorageError("stop") if job.part == "ev" else None)
    assert "2 of 4 units done" in shown(tmp_path), (
        "the two runs of what was chosen before do not count"
    )
    go(tmp_path, more)
    assert "4 of 4 units done, 0 running, 0 failed\n" in shown(tmp_path)


def test_status_of_a_study_whose_whole_grid_diverged_is_finished(tmp_path: Path) -> None:
    found, _ = go(tmp_path, small(changes=["grids.van.learning_rate=[1e9, 1e10]"]))
    assert found["van"].diverged
    assert "2 of 2 units done, 0 running, 0 failed\n" in shown(tmp_path)


def test_snapshots_do_not_change_what_is_learnt(tmp_path: Path) -> None:
    rows = [Run(0, {"learning_rate": 0.1})]
    job = work.Job(small(), "van", "cv", tuple(cross_validation(small(), "van"))[:1], None, "cpu")
    plain = train(work.open_stream(small(), None), "cv", METHODS["van"], rows, small().setup())
    assert np.array_equal(work.work(job)[0][0].accuracy, plain[0].accuracy)


def test_a_number_of_examples_that_fits_the_first_seeds_only_is_refused_before_anything_is_trained() -> (
    None
):
    study.try_stream(load("split-digits", ["test_examples=62"], seeds=3), None)
    for seeds in (4, 5):
        with pytest.raises(
            InputError,
            match="test_examples=62 is not possible: a task of seed 3 has only 60 of them; 60 fit every seed",
        ):
            study.try_stream(load("split-digits", ["test_examples=62"], seeds=seeds), None)
    with pytest.raises(InputError, match="seed 3 has only 61 of them"):
        study.try_stream(load("split-digits", ["test_examples=62", "cv_seeds=10"], seeds=3), None)
