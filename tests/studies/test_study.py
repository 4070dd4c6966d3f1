"""Running a study: only what is missing, in the same fleets, whatever goes wrong on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onepass.errors import InputError
from onepass.files import StorageError
from onepass.learners import METHODS
from onepass.protocol import Run, train
from onepass.studies import study, work
from onepass.studies.executors import executor
from onepass.studies.folder import FILE
from onepass.studies.recipe import Recipe, grown, load, united
from onepass.studies.results import Result, cross_validation
from onepass.studies.store import Store
from onepass.studies.study import Means
from tests.studies.small_study import Scripted, Silent, go, same, small


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
    # Grids and options of methods that are not asked for do not matter.
    others = ["grids.van.learning_rate=[0.3, 0.01]", "options.ewc.fisher_every=3"]
    assert go(tmp_path, small("a-gem", 2, others))[1].stored_units == []
    _, third = go(tmp_path, small("van", 3))
    assert len(third.stored_units) == 2  # a seed for each of two methods
    found, fourth = go(tmp_path, small("van", 1))
    assert fourth.stored_units == []
    assert len(found["van"].records) == 3


def test_a_larger_grid_is_tried_and_chosen_from(tmp_path: Path) -> None:
    def trying(rates: str) -> Recipe:
        return small(changes=["train_examples=100", f"grids.van.learning_rate={rates}"])

    found, _ = go(tmp_path, trying("0.0001"))
    assert found["van"].hyperparameters == {"learning_rate": 0.0001}
    found, more = go(tmp_path, trying("[0.0001, 0.1]"))
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
        units = [entry.unit for entry in store.contents.entries.values()]
    assert {unit.configuration["batch_size"] for unit in units} == {10}


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


def test_checkpoints_are_gone_when_their_fleet_is_stored(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        go(tmp_path, small(), lambda job: StorageError("stop") if job.part == "ev" else None)
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == []
    go(tmp_path, small())
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_of_another_fleet_is_never_used(tmp_path: Path) -> None:
    go(tmp_path, small())

    def job(change: str, folder: Path) -> work.Job:
        asked = small(changes=[change])
        units = tuple(cross_validation(asked, "van"))
        return work.Job(asked, "van", "cv", units, None, "cpu", str(folder))

    assert job("batch_size=10", tmp_path).name != job("batch_size=5", tmp_path).name
    assert job("batch_size=10", tmp_path / "nowhere").checkpoints() is None


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
    # Three grid points on three tasks, four runs on seventeen, of three batches each.
    assert observer.done[-1] == 3 * 9 + 4 * 51
    assert observer.shares[-1] == 1.0


def test_snapshots_do_not_change_what_is_learnt(tmp_path: Path) -> None:
    rows = [Run(0, {"learning_rate": 0.1})]
    job = work.Job(small(), "van", "cv", tuple(cross_validation(small(), "van"))[:1], None, "cpu")
    plain = train(work.open_stream(small(), None), "cv", METHODS["van"], rows, small().setup())
    assert np.array_equal(work.work(job)[0][0].accuracy, plain[0].accuracy)


def test_examples_that_only_the_first_seeds_have_are_refused_before_anything_is_trained() -> None:
    study.try_stream(load("split-digits", ["test_examples=62"], seeds=3), None)
    why = "a task of seed 3 has only 60 of them; 60 fit every seed"
    for seeds in (4, 5):
        with pytest.raises(InputError, match=f"test_examples=62 is not possible: {why}"):
            study.try_stream(load("split-digits", ["test_examples=62"], seeds=seeds), None)
    with pytest.raises(InputError, match="seed 3 has only 61 of them"):
        study.try_stream(load("split-digits", ["test_examples=62", "cv_seeds=10"], seeds=3), None)
