"""Prove that two revisions of the package get the same results, bit by bit.

    python benchmarks/same_results.py BEFORE AFTER [--recipe split-digits] [--only learners,stored]

BEFORE and AFTER are checkouts (`git worktree add /tmp/before REVISION`). One line per check says
`ok` or `DIFFERS`; the exit code is 0 only if all hold. Seconds are not compared, bytes are only
reported.

- `studies`: both train a recipe, all methods with five seeds. Units, chosen hyper-parameters and
  raw records are the same.
- `stored`: both print the same `table --json` of stored studies and of the one that BEFORE has just
  trained, and `verify` ends with the same exit code.
- `interrupted`: AFTER goes on with a study that BEFORE began and that was killed. Finished units
  are kept, and the records are those of a study that nothing interrupted.
- `learners`: learners that BEFORE saved in the middle of a task go on in AFTER as in BEFORE.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from revisions import check_tree, environment, run
from same_learners import CASES, name_of

ARRAYS = ("accuracy", "initial", "curve", "memory_accuracy")
# A study of several fleets, one after the other, which takes some seconds.
INTERRUPTED = ["quickstart", "--methods", "van,ewc,a-gem", "--seeds", "2"]
INTERRUPTED += ["--workers", "1", "--checkpoint-every", "7"]
SMALL = ["train_examples=150", "test_examples=30", "hidden=[32]", "ewc.strength=[1,100]"]
SMALL += [f"grids.{method}.learning_rate=[0.1,0.03]" for method in ("van", "ewc", "a-gem")]


class Check(NamedTuple):
    """What was compared, whether it is the same, and what was found."""

    what: str
    same: bool
    found: str

    def __str__(self) -> str:
        return f"{'ok' if self.same else 'DIFFERS':<8} {self.what}: {self.found}"


@dataclass(frozen=True)
class Study:
    """What the folder of a study holds, read without either revision."""

    tables: dict[str, str] = field(default_factory=dict)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)

    def chosen(self) -> dict[str, list[Any]]:
        """The hyper-parameters of each method on the evaluation stream."""
        return {
            one["method"]: one["hyperparameters"]
            for one in self.units.values()
            if one["part"] == "ev"
        }

    def bytes(self) -> dict[str, tuple[Any, ...]]:
        return {
            unit: (row["state_bytes"], self.arrays[unit].get("state_by_task", np.empty(0)).tolist())
            for unit, row in self.rows.items()
        }


def read(folder: Path) -> Study:
    study = Study()
    with closing(
        sqlite3.connect(f"{(folder / 'study.sqlite').as_uri()}?mode=ro", uri=True)
    ) as file:
        file.row_factory = sqlite3.Row
        study.tables.update(file.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL"))
        for row in file.execute("SELECT id, configuration FROM units"):
            study.units[row["id"]] = json.loads(row["configuration"])
        for row in file.execute("SELECT * FROM records"):
            study.rows[row["unit"]] = dict(row)
    for name in {row["arrays"] for row in study.rows.values()}:
        for key, value in safetensors.numpy.load_file(folder / "arrays" / name).items():
            unit, _, what = key.partition("/")
            study.arrays.setdefault(unit, {})[what] = value
    return study


def same_bits(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def compare_studies(before: Study, after: Study, what: str) -> Iterator[Check]:
    """Checks of two studies that should be one."""
    yield Check(
        f"{what}, tables", before.tables == after.tables, f"{len(before.tables)} in the database"
    )
    others = before.units.keys() ^ after.units.keys()
    yield Check(
        f"{what}, unit ids",
        not others,
        f"{len(before.units)} units" + (f", {len(others)} only in one study" if others else ""),
    )
    chosen = before.chosen(), after.chosen()
    moved = sorted(
        name for name in chosen[0] | chosen[1] if chosen[0].get(name) != chosen[1].get(name)
    )
    yield Check(
        f"{what}, chosen hyper-parameters",
        bool(chosen[0]) and not moved,
        ", ".join(moved) or f"{len(chosen[0])} methods",
    )
    both = sorted(before.rows.keys() & after.rows.keys())
    missing = len((before.units.keys() | after.units.keys()) - set(both))
    differences = [
        f"{before.units[unit]['method']} {unit} ({', '.join(parts)})"
        for unit in both
        if (parts := record_differences(before, after, unit))
    ]
    yield Check(
        f"{what}, records",
        bool(both) and not missing and not differences,
        f"{len(both) - len(differences)} bit-identical"
        + (f", {missing} without a counterpart" if missing else "")
        + (f", {len(differences)} not, first {differences[0]}" if differences else ""),
    )
    bytes_before, bytes_after = before.bytes(), after.bytes()
    moved = [unit for unit in both if bytes_before[unit] != bytes_after[unit]]
    first = f", first {before.units[moved[0]]['method']} {moved[0]}" if moved else ""
    yield Check(
        f"{what}, state bytes (may differ)", True, f"{len(moved)} of {len(both)} differ{first}"
    )


def record_differences(before: Study, after: Study, unit: str) -> list[str]:
    """The parts of a record that are not the same bit by bit."""
    rows, arrays = (before.rows[unit], after.rows[unit]), (before.arrays[unit], after.arrays[unit])
    found = [name for name in ("violations", "diverged") if rows[0][name] != rows[1][name]]
    return found + [
        name for name in ARRAYS if not same_bits(arrays[0].get(name), arrays[1].get(name))
    ]


def first_difference(one: Any, other: Any, place: str = "") -> str:
    """Where two JSON documents first differ; empty where they do not."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"the keys of {place or 'the document'}"
        pairs = [(one[key], other[key], f"{place}.{key}") for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(*both, f"{place}[{i}]") for i, both in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other and type(one) is type(other) else place
    return next((found for pair in pairs if (found := first_difference(*pair))), "")


class Proof:
    """The checks of two checkouts; `folder` is a place for what they write."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.trees: dict[str, Path] = {"before": given.before, "after": given.after}

    def studies(self) -> Iterator[Check]:
        options = ["--methods", self.given.methods, "--seeds", str(self.given.seeds)]
        options += [f"--set={change}" for change in self.given.set]
        if self.given.workers is not None:
            options += ["--workers", str(self.given.workers)]
        found = {}
        for name, tree in self.trees.items():
            out = self.folder / f"trained-{name}"
            run(tree, ["-m", "onepass", "run", self.given.recipe, *options, "--out", str(out)])
            found[name] = read(out)
        yield from compare_studies(found["before"], found["after"], self.given.recipe)

    def stored(self) -> Iterator[Check]:
        trained = self.folder / "trained-before"
        results = self.given.before / "results"
        own = sorted(path.parent for path in results.glob("*/study.sqlite"))
        for folder in [*(self.given.studies or own), *([trained] if trained.exists() else [])]:
            documents, codes = [], []
            for name, tree in self.trees.items():
                path = self.folder / f"{name}.json"
                run(tree, ["-m", "onepass", "table", str(folder), "--json", str(path)])
                documents.append(path.read_bytes())
                command = [sys.executable, "-m", "onepass", "verify", str(folder)]
                done = subprocess.run(command, env=environment(tree), capture_output=True)
                codes.append(done.returncode)
            one, other = documents
            first, second = json.loads(one), json.loads(other)
            same = one == other
            if folder == trained:  # the summary of the recipe is prose of the package
                del first["configuration"]["summary"], second["configuration"]["summary"]
                same = first == second
            place = first_difference(first, second) or "the layout"
            found = f"{len(one)} bytes" if same else f"first difference: {place}"
            yield Check(f"table --json of {folder.name}", same, found)
            found = f"exit codes {codes[0]} and {codes[1]}"
            yield Check(f"verify of {folder.name}", codes[0] == codes[1], found)

    def interrupted(self) -> Iterator[Check]:
        whole, killed = self.folder / "undisturbed", self.folder / "interrupted"
        changes = [f"--set={change}" for change in SMALL]
        command = ["-m", "onepass", "run", *INTERRUPTED, *changes, "--out"]
        run(self.given.before, [*command, str(whole)])
        kept = self._begin(command, killed)
        again = subprocess.run(
            [sys.executable, *command, str(killed)],
            env=environment(self.given.after),
            capture_output=True,
            text=True,
        )
        if again.returncode:
            reason = again.stderr.strip().splitlines()[-1:]
            yield Check("interrupted study", False, f"it does not go on: {' '.join(reason)}")
            return
        found = read(killed)
        changed = [unit for unit, row in kept.items() if found.rows.get(unit) != row]
        refused = again.stderr.count("is not used:")
        counts = f"{len(kept) - len(changed)} of {len(kept)} kept"
        counts += f", {len(found.units) - len(kept)} were to do, {refused} checkpoints refused"
        yield Check("interrupted study, finished units", not changed, counts)
        yield from compare_studies(read(whole), found, "interrupted study")

    def _begin(self, command: list[str], folder: Path) -> dict[str, dict[str, Any]]:
        """Let BEFORE begin a study and kill it; return the rows of the units that are done."""
        with subprocess.Popen(
            [sys.executable, *command, str(folder)],
            env=environment(self.given.before),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as driver:
            # The checkpoints of a finished fleet are still there when its units are stored.
            rows: dict[str, dict[str, Any]] = {}
            fleets, before = set[Path](), set[Path]()
            while driver.poll() is None and not fleets - before:
                time.sleep(0.01)
                fleets = {path.parent for path in folder.glob("checkpoints/*/*.json")}
                rows = rows_so_far(folder)
                before |= set() if rows else fleets
            if driver.poll() is not None:
                raise ChildProcessError("the study ended before it could be killed")
            os.killpg(driver.pid, signal.SIGKILL)
        return rows

    def learners(self) -> Iterator[Check]:
        program = str(Path(__file__).with_name("same_learners.py"))
        saved, own, loaded = (self.folder / name for name in ("saved", "own", "loaded"))
        for folder in (saved, own, loaded):
            folder.mkdir()
        run(self.given.before, [program, "save", str(saved)])
        run(self.given.after, [program, "load", str(saved), str(loaded)])
        run(self.given.after, [program, "save", str(own)])
        for label in CASES:
            name = name_of(label)
            one, other, mine = (
                safetensors.numpy.load_file(folder / f"{name}.end")
                for folder in (saved, loaded, own)
            )
            differ = [key for key in one | other if not same_bits(one.get(key), other.get(key))]
            anew = [key for key in one | mine if not same_bits(one.get(key), mine.get(key))]
            files = [(folder / f"{name}.saved").read_bytes() for folder in (saved, own)]
            found = f"{len(one)} tensors bit-identical" if not differ else f"{', '.join(differ)}"
            found += f"; trained anew: {', '.join(anew)}" if anew else ""
            found += "; files are " + ("the same" if files[0] == files[1] else "not the same bytes")
            yield Check(f"learner, {label}", not differ and not anew, found)


def rows_so_far(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of finished units of a study that another process writes."""
    try:
        return read(folder).rows
    except (sqlite3.Error, OSError):  # it is just being made
        return {}


def main() -> None:
    checks: dict[str, Callable[[Proof], Iterator[Check]]] = {
        "studies": Proof.studies,
        "stored": Proof.stored,
        "interrupted": Proof.interrupted,
        "learners": Proof.learners,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default=",".join(checks))
    parser.add_argument("--recipe", default="split-digits")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--workers", type=int)
    parser.add_argument(
        "--studies", type=Path, nargs="*", help="stored studies (default: BEFORE/results/*)"
    )
    given = parser.parse_args()
    began, differ = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="same-results-") as folder:
        for tree in (given.before, given.after):
            check_tree(tree)
        proof = Proof(given, Path(folder))
        for name in given.only.split(","):
            try:
                for check in checks[name](proof):
                    print(check, flush=True)
                    differ += not check.same
            except subprocess.CalledProcessError as reason:
                last = reason.stderr.strip().splitlines()[-1:]
                print(Check(name, False, f"{' '.join(reason.cmd[1:])}: {' '.join(last)}"))
                differ += 1
    print(f"{differ} checks differ ({time.monotonic() - began:.0f} s)")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
