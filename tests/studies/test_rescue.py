"""What is sound of a damaged study comes out of it, and the study itself is not changed."""

from __future__ import annotations

import resource
import shlex
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onepass.errors import InputError
from onepass.studies.folder import FILE
from onepass.studies.recovery import private
from onepass.studies.rescue import rescue
from onepass.studies.results import evaluation
from onepass.studies.store import Store
from tests.commands import exit_code, outcome, refusal
from tests.fuzzing import limited
from tests.studies.stored import (
    GRID,
    MADE,
    RECIPE,
    RUNS,
    as_older_versions,
    fill,
    record,
    results_in,
    study,
)


def execute(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / FILE) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


GRID_IDS = {unit.id for unit in GRID}
ALL = GRID_IDS | {unit.id for unit in RUNS}
MANY = evaluation(RECIPE.model_copy(update={"seeds": 60}), "van", {"learning_rate": 0.1})
ALTER_A_RECORD = f"UPDATE records SET seconds = 7 WHERE unit = '{GRID[0].id}'"


def truncate_arrays(folder: Path) -> None:
    for path in (folder / "arrays").iterdir():
        if RUNS[0].id.encode() in path.read_bytes():
            path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "left", "lost"),
    [
        ((), ALL, 0),
        (("DELETE FROM study WHERE key = 'counts'",), ALL, 0),
        (("UPDATE study SET value = '{}' WHERE key = 'counts'",), ALL, 1),
        ((ALTER_A_RECORD,), ALL - {GRID[0].id}, 1),
        (("DELETE FROM units",), ALL, 0),
        (("DROP TABLE units",), ALL, 1),
        (("DROP TABLE records",), set(), 1),
        (("CREATE VIEW v AS SELECT 1",), ALL, 0),
        (None, GRID_IDS, 2),  # arrays are truncated
    ],
)
def test_everything_that_is_sound_is_rescued_and_the_rest_is_named(
    harm: tuple[str, ...] | None, left: set[str], lost: int, tmp_path: Path
) -> None:
    fill(tmp_path / "old")
    fill(tmp_path / "old", RUNS)
    if harm is None:
        truncate_arrays(tmp_path / "old")
    else:
        execute(tmp_path / "old", *harm)
    before = everything(tmp_path / "old")
    rescued = rescue(tmp_path / "old", tmp_path / "new")
    assert everything(tmp_path / "old") == before
    assert results_in(tmp_path / "new") == left
    assert (rescued.results, len(rescued.lost)) == (len(left), lost)
    with study(tmp_path / "new") as opened:
        to_do = {entry.unit.id for fleet in opened.open_fleets().values() for entry in fleet}
        assert to_do <= ALL - opened.contents.records.keys()


def test_what_two_drivers_of_older_versions_have_left_is_rescued(tmp_path: Path) -> None:
    """They counted rows in their memories, each its own."""
    fill(tmp_path / "old")
    with study(tmp_path / "old") as opened:
        opened.plan([RUNS])
        opened.add({unit.id: record(unit) for unit in RUNS}, MADE)
        opened._connection.execute(
            "UPDATE study SET value = replace(value, '\"records\":4', '\"records\":2')"
        )
    with pytest.raises(InputError, match="cannot be used"), Store.read(tmp_path / "old"):
        pass
    assert rescue(tmp_path / "old", tmp_path / "new").results == 4
    assert results_in(tmp_path / "new") == ALL


def test_a_damaged_page_costs_the_rows_on_it(tmp_path: Path) -> None:

    fill(tmp_path / "old", MANY)
    path = tmp_path / "old" / FILE
    content = bytearray(path.read_bytes())
    pages = range(0, len(content), 4096)
    of_records = [at for at in pages if b"a processor" in content[at : at + 4096]]
    page = next(at for at in of_records if MANY[30].id.encode() in content[at : at + 4096])
    content[page : page + 200] = bytes(200)
    path.write_bytes(content)
    rescued = rescue(tmp_path / "old", tmp_path / "new")
    assert rescued.lost
    assert len(results_in(tmp_path / "new")) == rescued.results > 20


@pytest.mark.parametrize("harm", ["truncated", "truncated in a page", "lengthened", "header"])
def test_a_file_of_another_length_costs_the_rows_that_are_gone(harm: str, tmp_path: Path) -> None:

    path = fill(tmp_path / "old", MANY) / FILE
    content = path.read_bytes()
    size = (len(content) // 4096).to_bytes(4, "big")
    assert content[28:32] == size
    damages = {
        "truncated": content[: -2 * 4096],
        "truncated in a page": content[:-5000],
        "lengthened": content + bytes(4096),
        "header": content[:28] + b"\xff" * 4 + content[32:],
    }
    path.write_bytes(damages[harm])
    rescued = rescue(tmp_path / "old", tmp_path / "new")
    assert len(results_in(tmp_path / "new")) == rescued.results
    assert rescued.results >= (60 if harm in ("lengthened", "header") else 35)
    assert rescued.results + rescued.to_do == 60
    assert len(rescued.lost) <= 2, "the end of the table, not each row of it"
    assert bool(rescued.lost) == (rescued.results < 60)


def test_the_last_page_of_a_table_costs_the_rows_on_it_alone(tmp_path: Path) -> None:

    path = fill(tmp_path / "old", MANY) / FILE
    content = bytearray(path.read_bytes())
    for start in range(0, len(content), 4096):
        page = content[start : start + 4096]
        if MANY[-1].id.encode() in page and b"a processor" in page:
            content[start] = 0  # no kind of page
    path.write_bytes(content)
    rescued = rescue(tmp_path / "old", tmp_path / "new")
    assert len(results_in(tmp_path / "new")) == rescued.results > 40
    assert [what.partition(":")[0] for what in rescued.lost] == ["the end of the table 'records'"]


def test_a_copy_of_ones_own_is_used_without_locks(tmp_path: Path) -> None:
    fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")  # stands for a file system that refuses every lock
        with (
            closing(sqlite3.connect(tmp_path / FILE, timeout=0)) as locking,
            pytest.raises(sqlite3.OperationalError),
        ):
            locking.execute("SELECT count(*) FROM records")
        with closing(private(tmp_path / FILE)) as connection:
            assert connection.execute("SELECT count(*) FROM records").fetchone() == (len(GRID),)


@pytest.mark.parametrize("end", ["", "-wal"])
def test_rescue_and_recovery_use_such_copies_alone(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with study(tmp_path / "old") as opened:
        if end:
            as_older_versions(opened)
        opened.plan([GRID])
        opened.add({unit.id: record(unit) for unit in GRID}, MADE)
        shutil.copytree(tmp_path / "old", tmp_path / "killed")
    opened_files, connect = [], sqlite3.connect

    def noted(database: str, **settings: Any) -> sqlite3.Connection:
        opened_files.append(str(database))
        return connect(database, **settings)

    monkeypatch.setattr(sqlite3, "connect", noted)
    assert rescue(tmp_path / "killed", tmp_path / "new").results == len(GRID)
    assert results_in(tmp_path / "killed") == GRID_IDS
    others = (str(tmp_path), ":memory:", "immutable=1")
    copies = [name for name in opened_files if not any(other in name for other in others)]
    assert copies
    assert all("vfs=unix-none" in name for name in copies)


def test_no_room_for_a_copy_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fill(tmp_path / "old") / FILE
    path.with_name(f"{FILE}-journal").write_bytes(b"what a killed process left")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    for place, most, why in (("nowhere", usual[0], "No such file"), ("", 1000, "File too large")):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / place))
        for command, more in (("rescue", [str(tmp_path / "new")]), ("status", [])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
            try:
                code = exit_code(command, str(tmp_path / "old"), *more)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, usual)
            said = capsys.readouterr().err
            assert code == 2
            assert f"cannot be copied to the folder for temporary files ({why}" in said
            assert "set TMPDIR" in said
    assert not (tmp_path / "new").exists()


def test_units_of_a_recipe_that_could_have_billions_are_not_all_looked_for(tmp_path: Path) -> None:
    rates = [number / 1000 for number in range(1, 40_001)]
    more = {"methods": ["van"], "seeds": 40_000, "grids": {"van": {"learning_rate": rates}}}
    with study(fill(tmp_path / "old")) as opened:
        opened.note(recipe=RECIPE.stored() | more)
    execute(tmp_path / "old", f"DELETE FROM units WHERE id = '{GRID[0].id}'")
    with limited(60):
        assert rescue(tmp_path / "old", tmp_path / "new").results == 2


def test_results_in_the_file_and_in_an_older_log_are_both_rescued(tmp_path: Path) -> None:
    with study(tmp_path / "old") as opened:
        as_older_versions(opened)
        opened.plan([GRID])
        opened.add({GRID[0].id: record(GRID[0])}, MADE)
        log = (tmp_path / "old" / f"{FILE}-wal").read_bytes()
        opened.add({GRID[1].id: record(GRID[1])}, MADE)
    (tmp_path / "old" / f"{FILE}-wal").write_bytes(log)
    rescue(tmp_path / "old", tmp_path / "new")
    assert results_in(tmp_path / "new") == GRID_IDS


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("step", ["_set", "_plan", "_insert_record"])
def test_a_rescue_that_was_killed_has_stored_nothing_and_is_begun_again(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with study(fill(tmp_path / "old")) as opened:
        opened.plan([RUNS])

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(Store, step, kill)
        with pytest.raises(Killed):
            rescue(tmp_path / "old", tmp_path / "new")
    with Store.read(tmp_path / "new") as left:
        assert not left.contents.entries
    rescued = rescue(tmp_path / "old", tmp_path / "new")
    assert (rescued.results, rescued.to_do, results_in(tmp_path / "new")) == (2, 2, GRID_IDS)


def test_a_rescue_does_not_go_into_a_study_of_another_recipe_that_is_just_begun(
    tmp_path: Path,
) -> None:
    other = RECIPE.model_copy(update={"seeds": 3}).stored()
    with Store.write_to(tmp_path / "new", create={"recipe": other}):
        pass
    before = everything(tmp_path / "new")
    with pytest.raises(InputError, match=r"there is a study in .* already"):
        rescue(fill(tmp_path / "old"), tmp_path / "new")
    assert everything(tmp_path / "new") == before


def test_without_a_recipe_there_is_nothing_to_rescue(tmp_path: Path) -> None:
    fill(tmp_path / "old")
    execute(tmp_path / "old", "DELETE FROM study WHERE key = 'recipe'")
    with pytest.raises(InputError, match=r"nothing of the study in .* can be rescued"):
        rescue(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = str(fill(tmp_path / "old")), str(tmp_path / "new")
    code, said, _ = outcome(capsys, "rescue", old, new)
    assert code == 0
    assert said.startswith("2 results are")
    assert "there is a study in" in refusal(capsys, "rescue", old, new)
    execute(tmp_path / "old", ALTER_A_RECORD)
    code, said, complaint = outcome(capsys, "rescue", old, str(tmp_path / "third"))
    assert code == 1
    assert said.startswith("1 results are")
    assert complaint.startswith("lost: row ")


@pytest.mark.parametrize(
    "command",
    [
        *("run quickstart --out ''", "run quickstart --out=", "run --out ' '"),
        *("run quickstart --json ''", "run quickstart --tensorboard ''"),
        *("run quickstart --data ''", "table ''", "status ''", "merge '' x", "merge x ''"),
        *("table . --csv ''", "companions . --json=", "rescue '' x", "bench --markdown ''"),
    ],
)
def test_an_empty_argument_is_not_the_current_folder(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is empty: give it a value" in refusal(capsys, *shlex.split(command))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["status", "rescue"])
def test_a_file_of_holes_is_not_copied(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few bytes on the disk may be a terabyte in the folder for temporary files."""
    path, temporary = fill(tmp_path / "old") / FILE, tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with path.open("r+b") as file:
        file.truncate(2**40)
    path.with_name(f"{FILE}-journal").write_bytes(b"x")
    words = [command, str(tmp_path / "old"), str(tmp_path / "new")]
    with limited():
        line = refusal(capsys, *words[: 3 if command == "rescue" else 2])
    assert "study.sqlite is larger than that of any study" in line
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "new").exists()
