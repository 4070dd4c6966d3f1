"""Studies and checkpoints that are damaged at random: refused by a sentence, or exactly what was saved.

Each takes little memory and little time, and nothing is written.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fuzzing import in_a_process, listing, mutations, outcome
from onepass.errors import InputError
from onepass.protocol import Snapshot
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.database import FILE
from stored import GRID, MADE, RUNS, as_older_versions, fill, record, results_in, study

SNAPSHOT = Snapshot(1, 4, {"theta": torch.arange(40.0).view(2, 20)}, {"learner": {"grown": 3}})


@dataclass(frozen=True)
class Reader:
    """How a folder is filled, the file in it that is harmed, and how it is read.

    `most` of many damages may be harmless.
    """

    fill: Callable[[Path], object]
    harmed: Callable[[Path], Path]
    read: Callable[[Path], object]
    most: float


def _study(folder: Path) -> None:
    fill(folder)
    fill(folder, RUNS)


def _logged(folder: Path) -> None:
    """A study of an older version whose writer was killed: its results are in the log alone."""
    with tempfile.TemporaryDirectory() as living, study(Path(living)) as opened:
        as_older_versions(opened)
        opened.plan([GRID])
        for unit in GRID:
            opened.add({unit.id: record(unit)}, MADE)
        for path in Path(living).rglob("*"):
            if path.is_file() and not path.name.endswith("-shm"):
                target = folder / path.relative_to(living)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())


def _read_study(folder: Path) -> None:
    assert results_in(folder) == {unit.id for unit in [*GRID, *RUNS]}


def _checkpoints(folder: Path) -> None:
    keeper = Checkpoints(folder, "fleet")
    for batches in (4, 8):
        keeper.keep(replace(SNAPSHOT, batches=batches))


def _read_checkpoint(folder: Path) -> None:
    found = Checkpoints(folder, "fleet").last()
    assert found is not None
    assert torch.equal(found.tensors["theta"], SNAPSHOT.tensors["theta"])
    assert (found.phase, found.numbers) == (SNAPSHOT.phase, SNAPSHOT.numbers)
    if found.batches == 4:
        raise InputError("it was refused, and the one before is used")
    assert found.batches == 8


READERS = {
    "study": Reader(_study, lambda folder: folder / FILE, _read_study, 0.6),  # pages of SQLite are partly empty
    "arrays": Reader(_study, lambda folder: min((folder / "arrays").iterdir()), _read_study, 0.05),
    # A damaged log ends where the damage is, and the results after that were never there.
    "log": Reader(_logged, lambda folder: folder / f"{FILE}-wal", results_in, 1.0),
    "checkpoint": Reader(_checkpoints, lambda folder: folder / "0001-00000008.json", _read_checkpoint, 0.05),
    "tensors": Reader(_checkpoints, lambda folder: folder / "0001-00000008.safetensors", _read_checkpoint, 0.05),
}


def _outcomes(reader: Reader, folder: Path, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    kept, temporary = folder / "kept", folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    reader.fill(kept)
    path = reader.harmed(kept)
    content, name = path.read_bytes(), str(path.relative_to(folder))

    def harmed() -> Iterator[str]:
        logging.disable()
        yield outcome(lambda: reader.read(kept), InputError)
        for made in mutations(content, seed, count):
            path.write_bytes(made)
            yield outcome(lambda: reader.read(kept), InputError)

    before = listing(folder)
    told = in_a_process(harmed)
    after = listing(folder)
    assert told[0] == "right"
    assert before.pop(name)
    assert after.pop(name)
    assert before.pop("temporary") and after.pop("temporary")  # where copies lay  # noqa: PT018
    assert after == before
    assert len(told) == count + 1, told[-1]
    return Counter(told[1:])


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_refused_by_a_sentence_or_unharmed(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _outcomes(READERS[name], tmp_path, count, count, monkeypatch)
    assert found.keys() <= {"right", "refused"}, found
    assert found["right"] <= READERS[name].most * count, found
