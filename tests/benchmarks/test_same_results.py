"""The program that proves that two revisions get the same results notices where they do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onepass.studies.store import Unit
from same_results import compare_studies, first_difference, read
from tests.studies.stored import GRID, MADE, RUNS, fill, record, study

ROOT = Path(__file__).parents[2]
SMALL = ["train_examples=30", "test_examples=20", "hidden=[16]", "cv_seeds=1"]
SMALL += ["grids.van.learning_rate=0.1", "grids.a-gem.learning_rate=0.1"]
TINY = ["--recipe=split-digits", "--methods=van,a-gem", "--seeds=1", "--workers=1"]
TINY += [f"--set={change}" for change in SMALL]


def copy(folder: Path, file: str, old: str, new: str) -> Path:
    """A checkout that differs in one place of one file."""
    shutil.copytree(ROOT / "src" / "onepass", folder / "src" / "onepass")
    path = folder / "src" / "onepass" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


def prove(after: Path, *options: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the verdict and details of every check."""
    command = [sys.executable, "benchmarks/same_results.py", str(ROOT), str(after), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()[:-1]]
    return done.returncode, dict(line for line in lines)


def test_a_changed_constant_moves_the_records_and_learners_of_its_method_only(
    tmp_path: Path,
) -> None:
    after = copy(tmp_path, "learners/agem.py", "        return g\n", "        return 2 * g\n")
    code, found = prove(after, "--only", "studies,learners", *TINY)
    assert code == 1
    assert "ok       split-digits, unit ids" in found
    records = found["DIFFERS  split-digits, records"]
    assert records.startswith("2 bit-identical, 2 not, first a-gem")
    assert "accuracy" in records
    assert found["ok       learner, van"].endswith("; files are the same")
    assert "module.0.weight" in found["DIFFERS  learner, a-gem"]


@pytest.mark.long
def test_what_computes_the_same_is_the_same_and_goes_on_with_a_study_that_was_killed(
    tmp_path: Path,
) -> None:
    after = copy(tmp_path / "after", "learners/agem.py", "TINY = 1e-30", "TINY = 1e-30  # of one")
    stored = fill(tmp_path / "stored", RUNS)
    code, found = prove(after, "--only", "stored,interrupted", "--studies", str(stored))
    assert code == 0
    assert [line[:2] for line in found] == ["ok"] * 8
    kept = found["ok       interrupted study, finished units"]
    done, of, to_do, refused = (
        int(word) for word in kept.replace(",", "").split() if word.isdigit()
    )
    assert done == of > 0
    assert to_do > 0
    assert refused > 0


def verdicts(folder: Path, **changes: object) -> dict[str, tuple[bool, str]]:
    """The checks of a study, and of another one in which a record has these values."""
    before = fill(folder / "before", [*GRID, *RUNS])
    with study(folder / "after") as opened:
        opened.plan([[*GRID, *RUNS]])
        made = {unit.id: record(unit) for unit in [*GRID, *RUNS]}
        made[RUNS[0].id] = replace(made[RUNS[0].id], **changes)
        opened.add(made, MADE)
    checks = compare_studies(read(before), read(folder / "after"), "study")
    return {check.what.removeprefix("study, "): (check.same, check.found) for check in checks}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", record(GRID[0], 0.25).accuracy),
        ("initial", -record(GRID[0]).initial),
        ("curve", record(GRID[0]).curve.astype("float32")),
        ("memory_accuracy", None),
        ("violations", [0, 3, 2]),
        ("diverged", True),
    ],
)
def test_whatever_part_of_a_record_moves_is_named(name: str, value: object, tmp_path: Path) -> None:
    found = verdicts(tmp_path, **{name: value})
    expected = f"{len(GRID) + len(RUNS) - 1} bit-identical, 1 not, first van {RUNS[0].id} ({name})"
    assert found.pop("records") == (False, expected)
    assert all(same for same, _ in found.values())


def test_seconds_do_not_count_and_bytes_are_reported(tmp_path: Path) -> None:
    found = verdicts(tmp_path, seconds=9.0, state_bytes=7, state_by_task=[5, 6, 7])
    assert all(same for same, _ in found.values())
    said = f"1 of {len(GRID) + len(RUNS)} differ, first van {RUNS[0].id}"
    assert found["state bytes (may differ)"] == (True, said)


def test_units_and_what_was_chosen_are_compared(tmp_path: Path) -> None:
    others = [
        Unit({**unit.configuration, "hyperparameters": {"learning_rate": 0.03}}) for unit in RUNS
    ]
    before, after = fill(tmp_path / "before", RUNS), fill(tmp_path / "after", others)
    checks = {check.what: check for check in compare_studies(read(before), read(after), "study")}
    assert checks["study, unit ids"].found == "2 units, 4 only in one study"
    assert checks["study, chosen hyper-parameters"].found == "van"
    assert checks["study, records"].found == "0 bit-identical, 4 without a counterpart"
    assert [check.same for check in checks.values()] == [True, False, False, False, True]


def test_the_first_difference_of_two_documents_is_named() -> None:
    one = {"a": 1, "b": [{"c": 0.5, "d": None}]}
    assert first_difference(one, {"a": 1, "b": [{"c": 0.5, "d": None}]}) == ""
    assert first_difference(one, {"a": 1, "b": [{"c": 0.25, "d": None}]}) == ".b[0].c"
    assert first_difference(one, {"a": True, "b": one["b"]}) == ".a"
    assert first_difference(one, {"a": 1, "b": []}) == ".b"
    assert first_difference(one, {"b": one["b"], "a": 1}) == "the keys of the document"
