"""What durability costs, how large a study may be, and what a second worker brings.

    python benchmarks/studies.py              # about five minutes on two cores
    python benchmarks/studies.py --only size  # one of: cost, size, workers

`cost` runs the quickstart in one process, where everything happens one after the other, and adds up
the time spent in the store and in checkpoints. `size` plans a study of 10 000 units, finishes it,
and prints its status. `workers` runs the quickstart with one worker and with two, in turns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import parser
from onepass.metrics import Record
from onepass.studies import executors, study
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.packing import deal
from onepass.studies.recipe import load
from onepass.studies.results import cross_validation
from onepass.studies.store import Provenance, Store, Unit

UNITS = 10_000
ONEPASS = [sys.executable, "-m", "onepass"]


class Silent:
    """An observer of a study that reports nothing."""

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
    """Print the share of the quickstart's time that goes into the store and checkpoints."""
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
            study.run(recipe, store, study.Means(workers=2), executor, Silent())
        total = spent.pop("everything")
        shares = [f"{name} {100 * seconds / total:.2f} %" for name, seconds in spent.items()]
        everything = f"cost of durability in the quickstart ({total:.1f} s in one process)"
        print(f"{everything}: {', '.join(shares)}")


def made_up(unit: Unit) -> Record:
    """A record of no meaning."""
    a = np.zeros((3, 3))
    return Record(unit.seed, unit.hyperparameters, a, a[0], a, None, None, 1.0, 1, False)


def size(rounds: int) -> None:
    """Print what a large study takes to open, to plan and to show."""
    grids = {"van": {"learning_rate": [1 / (1 + k) for k in range(UNITS)]}}
    recipe = load("quickstart", None, "van").model_copy(update={"grids": grids})
    for _ in range(rounds):
        spent: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "study"
            status = [*ONEPASS, "status", str(folder)]
            with timed(spent, "open and plan"), study.opened(folder, recipe) as (store, _):
                store.plan(deal(cross_validation(recipe, "van"), UNITS // 50))
            with timed(spent, "status command"):
                subprocess.run(status, check=True, stdout=subprocess.DEVNULL)
            with study.opened(folder, recipe) as (store, _):
                for fleet in store.open_fleets().values():
                    records = {planned.unit.id: made_up(planned.unit) for planned in fleet}
                    store.add(records, Provenance("", {}, ""))
            again = "open and plan when all is done"
            with timed(spent, again), study.opened(folder, recipe) as (store, _):
                units = cross_validation(recipe, "van")
                assert all(unit.id in store.contents.records for unit in units)
            with timed(spent, "status command when all is done"):
                subprocess.run(status, check=True, stdout=subprocess.DEVNULL)
        parts = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in spent.items())
        print(f"a study of {UNITS} units: {parts}")


def workers(rounds: int) -> None:
    """Print what a second worker brings."""
    for _ in range(rounds):
        seconds: dict[str, float] = {}
        for count in ("1", "2"):
            with tempfile.TemporaryDirectory() as folder, timed(seconds, count):
                options = ["--workers", count, "--out", f"{folder}/study"]
                command = [*ONEPASS, "run", "quickstart", *options]
                subprocess.run(command, check=True, capture_output=True)
        one, two = seconds["1"], seconds["2"]
        faster = f"{one / two:.2f} times faster"
        print(f"quickstart: {one:.1f} s with one worker, {two:.1f} s with two: {faster}")


def main() -> None:
    parts: dict[str, Callable[[int], None]] = {"cost": cost, "size": size, "workers": workers}
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=list(parts))
    arguments.add_argument("--rounds", type=int, default=2)
    given = arguments.parse_args()
    for name, part in parts.items():
        if given.only in (None, name):
            part(given.rounds)


if __name__ == "__main__":
    main()
