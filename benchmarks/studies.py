"""What durability costs, how large a study may be, and what a second worker brings.

    python benchmarks/studies.py              # about five minutes on two cores
    python benchmarks/studies.py --only size  # one of: cost, size, workers

`cost` runs the quickstart in one process, where everything happens one after the other, and adds up the time spent in the store and in
checkpoints. `size` plans a study of 10 000 units, finishes it, and asks for its status. `workers` runs the quickstart with one worker and
with two, in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onepass.metrics import Record
from onepass.studies import executors, study
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.packing import deal
from onepass.studies.recipe import load
from onepass.studies.results import cross_validation
from onepass.studies.store import Provenance, Store

UNITS = 10_000
ONEPASS = [sys.executable, "-m", "onepass"]


class Nobody:
    """Watches nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def timed(spent: dict[str, float], what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    spent[what] = spent.get(what, 0.0) + time.perf_counter() - began


def count_time(kind: type, names: list[str], spent: dict[str, float]) -> None:
    """Add up the time spent in some methods of a class."""
    for name in names:
        method = getattr(kind, name)

        def wrapped(*arguments: Any, _method: Any = method, **more: Any) -> Any:
            with timed(spent, kind.__name__):
                return _method(*arguments, **more)

        setattr(kind, name, wrapped)


def cost(rounds: int) -> None:
    spent: dict[str, float] = {}
    count_time(Store, ["_load", "plan", "add", "note", "record", "forgive", "open_fleets"], spent)
    count_time(Checkpoints, ["last", "due", "keep", "discard"], spent)
    for _ in range(rounds):
        spent.clear()
        with (
            tempfile.TemporaryDirectory() as folder,
            timed(spent, "everything"),
            study.opened(Path(folder) / "study", load("quickstart")) as (store, recipe),
            executors.executor(1, 1) as executor,
        ):
            study.run(recipe, store, study.Means(workers=2), executor, Nobody())  # type: ignore[arg-type]
        total = spent.pop("everything")
        shares = ", ".join(
            f"{name} {100 * seconds / total:.2f} %" for name, seconds in spent.items()
        )
        print(f"cost of durability in the quickstart ({total:.1f} s in one process): {shares}")


def size(rounds: int) -> None:
    recipe = load("quickstart", None, "van").model_copy(
        update={"grids": {"van": {"learning_rate": [1 / (1 + k) for k in range(UNITS)]}}}
    )
    a = np.zeros((3, 3))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as place:
            folder, spent = Path(place) / "study", dict[str, float]()
            with timed(spent, "open and plan"), study.opened(folder, recipe) as (store, _):
                store.plan(deal(cross_validation(recipe, "van"), UNITS // 50))
            with timed(spent, "status command"):
                subprocess.run(
                    [*ONEPASS, "status", str(folder)], check=True, stdout=subprocess.DEVNULL
                )
            with study.opened(folder, recipe) as (store, _):
                for fleet in store.open_fleets().values():
                    made = {
                        e.unit.id: Record(
                            e.unit.seed,
                            e.unit.hyperparameters,
                            a,
                            a[0],
                            a,
                            None,
                            None,
                            1.0,
                            1,
                            False,
                        )
                        for e in fleet
                    }
                    store.add(made, Provenance("", {}, ""))
            with (
                timed(spent, "open and plan when all is done"),
                study.opened(folder, recipe) as (store, _),
            ):
                missing = [
                    unit
                    for unit in cross_validation(recipe, "van")
                    if unit.id not in store.contents.records
                ]
            assert not missing
            with timed(spent, "status command when all is done"):
                subprocess.run(
                    [*ONEPASS, "status", str(folder)], check=True, stdout=subprocess.DEVNULL
                )
        print(
            f"a study of {UNITS} units: {', '.join(f'{what} {seconds:.2f} s' for what, seconds in spent.items())}"
        )


def workers(rounds: int) -> None:
    for _ in range(rounds):
        spent: dict[str, float] = {}
        for count in ("1", "2"):
            with tempfile.TemporaryDirectory() as folder, timed(spent, count):
                command = [
                    *ONEPASS,
                    "run",
                    "quickstart",
                    "--workers",
                    count,
                    "--out",
                    f"{folder}/study",
                ]
                subprocess.run(
                    command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
        print(
            f"quickstart: {spent['1']:.1f} s with one worker, {spent['2']:.1f} s with two: {spent['1'] / spent['2']:.2f} times faster"
        )


def main() -> None:
    parts: dict[str, Callable[[int], None]] = {"cost": cost, "size": size, "workers": workers}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(parts))
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    for name, part in parts.items():
        if arguments.only in (None, name):
            part(arguments.rounds)


if __name__ == "__main__":
    main()
