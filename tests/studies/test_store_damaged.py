"""Studies and checkpoints that are damaged at random: refused, or exactly what was saved.

Each takes little memory and little time, and nothing is written.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from onepass.errors import InputError
from onepass.protocol import Snapshot
from onepass.studies.checkpoint import Checkpoints
from onepass.studies.folder import FILE
from onepass.studies.rescue import rescue
from tests.fuzzing import Watch, in_a_process, listing, mutations, outcome
from tests.studies.stored import (
    GRID,
    MADE,
    RUNS,
    as_older_versions,
    fill,
    journal_back_to,
    record,
    results_in,
    study,
)

IDS = {unit.id for unit in [*GRID, *RUNS]}
SNAPSHOT = Snapshot(1, 4, {"theta": torch.arange(40.0).view(2, 20)}, {"learner": {"grown": 3}})


@dataclass(frozen=True)
class Reader:
    """How a folder is filled, the file in it that is harmed, and how it is read.

    `most` of many damages may be harmless. `few` are tried in every run of the tests.
    """

    fill: Callable[[Path], object]
    harmed: str
    read: Callable[[Path], object]
    most: float
    few: int = 200


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
    assert results_in(folder) == IDS


def _interrupted(folder: Path) -> None:
    """A study whose writer was killed in the middle of a commit: its journal leads back."""
    with study(fill(folder)) as opened:
        opened.plan([RUNS])
        before = (folder / FILE).read_bytes()
        opened.add({unit.id: record(unit) for unit in RUNS}, MADE)
    (folder / f"{FILE}-journal").write_bytes(journal_back_to(before))


def _read_interrupted(folder: Path) -> None:
    """The state before the commit or after it, and the next writer goes on with the same."""
    found = results_in(folder)
    assert found in (IDS - {unit.id for unit in RUNS}, IDS)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(folder, copy)
        with study(copy) as opened:
            assert opened.contents.records.keys() == found
        assert results_in(copy) == found


def _rescue(folder: Path) -> None:
    """What is rescued is what was stored."""
    with tempfile.TemporaryDirectory() as place:
        rescued = rescue(folder, Path(place) / "new")
        found = results_in(Path(place) / "new")
        assert found <= IDS
        assert len(found) == rescued.results
    if found < IDS or rescued.lost:
        raise InputError("something is lost")


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
    # Pages of SQLite are partly empty.
    "study": Reader(_study, FILE, _read_study, 0.6),
    "arrays": Reader(_study, "arrays/*", _read_study, 0.05),
    # A damaged log ends where the damage is, and the results after that were never there.
    "log": Reader(_logged, f"{FILE}-wal", results_in, 1.0),
    "journal": Reader(_interrupted, f"{FILE}-journal", _read_interrupted, 0.85),
    # A rescue looks for rows one by one.
    "rescue": Reader(_study, FILE, _rescue, 0.6, few=40),
    "checkpoint": Reader(_checkpoints, "0001-00000008.json", _read_checkpoint, 0.05),
    "tensors": Reader(_checkpoints, "0001-00000008.safetensors", _read_checkpoint, 0.05),
}


def _outcomes(
    reader: Reader, folder: Path, seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    kept, temporary = folder / "kept", folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    reader.fill(kept)
    path = min(kept.glob(reader.harmed))
    content, name = path.read_bytes(), str(path.relative_to(folder))

    def harmed() -> Iterator[str]:
        logging.disable()
        yield outcome(lambda: reader.read(kept), InputError)
        watch = Watch(temporary)
        for made in mutations(content, seed, count):
            path.write_bytes(made)
            watch.written.clear()
            found = outcome(lambda: reader.read(kept), InputError)
            yield f"it wrote {watch.written}" if watch.written else found

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


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_refused_by_a_sentence_or_unharmed(
    name: str, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 5000 if many else READERS[name].few
    found = _outcomes(READERS[name], tmp_path, count, count, monkeypatch)
    assert found.keys() <= {"right", "refused"}, found
    assert found["right"] <= READERS[name].most * count, found


def test_what_is_written_elsewhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()

    def written() -> Iterator[str]:
        watch = Watch(tmp_path / "mine")
        (tmp_path / "file").read_bytes()
        sqlite3.connect(f"{(tmp_path / 'file').as_uri()}?mode=ro", uri=True).close()
        sqlite3.connect(":memory:").close()
        with tempfile.TemporaryDirectory(dir=tmp_path / "mine") as place:
            sqlite3.connect(Path(place) / "file").close()
        yield str(watch.written)
        (tmp_path / "file").write_bytes(b"x")
        (tmp_path / "folder").mkdir()
        sqlite3.connect(tmp_path / "other").close()
        (tmp_path / "mine" / "inner").mkdir()
        (tmp_path / "mine" / ".." / "file").unlink()
        yield " ".join(what.partition(" ")[0] for what in watch.written)

    assert in_a_process(written) == ["[]", "open os.mkdir sqlite3.connect os.remove"]
