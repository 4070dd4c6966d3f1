"""Bringing the results of several machines together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.studies.folder import FILE
from onepass.studies.merge import merge
from onepass.studies.recipe import load
from onepass.studies.store import Store
from tests.studies.crafted import Study, taken_from, written_to
from tests.studies.stored import GRID, RUNS, fill, record, study


def test_merging_brings_the_results_of_two_machines_together(tmp_path: Path) -> None:
    fill(tmp_path / "a", GRID[:1])
    fill(tmp_path / "b", GRID[1:])
    both = [tmp_path / "a", tmp_path / "b"]
    assert merge(tmp_path / "all", both) == [(folder, 1) for folder in both]
    assert merge(tmp_path / "all", [tmp_path / "a"]) == [(tmp_path / "a", 0)]
    with Store.read(tmp_path / "all") as opened:
        assert opened.contents.records.keys() == {unit.id for unit in GRID}
        assert opened.open_fleets() == {}
        for unit in GRID:
            assert opened.record(unit.id).same_as(record(unit))


def test_merging_studies_that_contradict_each_other_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "a")
    fill(tmp_path / "b", value=0.50001)
    with pytest.raises(InputError, match="different results for the unit"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    assert not (tmp_path / "all").exists()
    before = (tmp_path / "a" / FILE).read_bytes()
    with pytest.raises(InputError, match="different results for the unit"):
        merge(tmp_path / "a", [tmp_path / "b"])
    assert (tmp_path / "a" / FILE).read_bytes() == before


def test_merging_finishes_what_the_first_had_only_planned_or_failed(tmp_path: Path) -> None:
    with study(tmp_path / "a") as opened:
        opened.plan([GRID])
        opened.fail([GRID[0].id], "Traceback")
    merge(tmp_path / "a", [fill(tmp_path / "b")])
    with Store.read(tmp_path / "a") as opened:
        assert len(opened.contents.records) == 2
        assert all(entry.traceback is None for entry in opened.contents.entries.values())


def crafted(folder: Path, change: Callable[[Study], None]) -> Path:
    """The study in a folder after a change, with right checksums."""
    study = taken_from(folder)
    change(study)
    written_to(folder, study)
    return folder


@pytest.mark.parametrize("key", ["fleet", "place"])
def test_merging_keeps_a_study_readable_whatever_numbers_the_other_gives_its_fleets(
    key: str, tmp_path: Path
) -> None:
    def largest(study: Study) -> None:
        for unit in study.units:
            unit[key] = 2**31 - 1

    mine = fill(tmp_path / "mine", GRID[:1])
    theirs = crafted(fill(tmp_path / "theirs", GRID), largest)
    merge(mine, [theirs])
    merge(theirs, [fill(tmp_path / "more", RUNS)])
    for folder in (mine, theirs):
        with study(folder) as opened:
            opened.plan([RUNS[:1], RUNS[1:]])
        with Store.read(folder) as opened:
            assert {unit.id for unit in GRID} <= opened.contents.records.keys()
    with Store.read(mine) as opened:
        assert [opened.contents.entries[unit.id].fleet for unit in [*GRID, *RUNS]] == [0, 1, 2, 3]


@pytest.mark.parametrize("existing", [True, False])
def test_merging_refuses_results_of_another_number_of_tasks(existing: bool, tmp_path: Path) -> None:
    def fewer(study: Study) -> None:
        for arrays in study.arrays.values():
            for name, array in arrays.items():
                arrays[name] = array[:2, :2] if array.ndim == 2 else array[:2]

    mine = fill(tmp_path / "mine", GRID[:1])
    theirs = crafted(fill(tmp_path / "theirs", GRID[1:]), fewer)
    into, others = (mine, [theirs]) if existing else (tmp_path / "new", [mine, theirs])
    with pytest.raises(InputError, match="other records of the study have another number of tasks"):
        merge(into, others)
    with Store.read(mine) as opened:
        assert opened.contents.records.keys() == {GRID[0].id}
    assert not (tmp_path / "new").exists()


def test_merging_a_damaged_study_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a", GRID[:1])
    fill(tmp_path / "b", GRID[1:])
    next((tmp_path / "b" / "arrays").iterdir()).write_bytes(b"")
    with pytest.raises(InputError, match="truncated or altered"):
        merge(tmp_path / "new", [tmp_path / "a", tmp_path / "b"])
    assert not (tmp_path / "new").exists()
    with study(tmp_path / "all"):
        pass
    with pytest.raises(InputError, match="truncated or altered"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    with Store.read(tmp_path / "all") as opened:
        assert not opened.contents.records


def test_merging_finished_studies_gives_a_finished_one(tmp_path: Path) -> None:
    """Each study brings the grid of its own method; what the other says of it does not count."""
    for folder, method, other in (("a", "van", "a-gem"), ("b", "a-gem", "van")):
        grids = [f"grids.{method}.learning_rate=0.1", f"grids.{other}.learning_rate=0.3"]
        recipe = load("quickstart", grids, method)
        with Store.write_to(tmp_path / folder, create={"recipe": recipe.stored()}):
            pass
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    with Store.read(tmp_path / "all") as opened:
        grids = opened.contents.study["recipe"]["grids"]
    assert [grids[name]["learning_rate"] for name in ("van", "a-gem")] == [[0.1], [0.1]]


def test_merging_unites_methods_seeds_and_grids_and_refuses_other_recipes(tmp_path: Path) -> None:
    for folder, changes, methods, seeds in (
        ("a", ["grids.van.learning_rate=[0.3, 0.1]"], "van", 2),
        ("b", ["grids.van.learning_rate=[0.1, 0.01]"], "van,ewc", 4),
        ("c", ["batch_size=5"], "van", 2),
    ):
        begun = load("quickstart", changes, methods, seeds)
        with Store.write_to(tmp_path / folder, create={"recipe": begun.stored()}):
            pass
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    with Store.read(tmp_path / "all") as opened:
        recipe = opened.contents.study["recipe"]
    assert recipe["methods"] == ["van", "ewc"]
    assert recipe["seeds"] == 4
    assert recipe["grids"]["van"]["learning_rate"] == [0.3, 0.1, 0.01]
    with pytest.raises(InputError, match="batch_size = 10, not 5"):
        merge(tmp_path / "all", [tmp_path / "c"])
    with pytest.raises(InputError, match="into itself"):
        merge(tmp_path / "all", [tmp_path / "all"])
