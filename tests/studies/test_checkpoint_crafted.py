"""Checkpoints that were written to deceive: their hashes and checksums are right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.files import digest
from onepass.learners import METHODS
from onepass.protocol import Snapshot, _restored, assemble
from onepass.recording import Recorder
from onepass.studies.checkpoint import Checkpoints
from tests.fuzzing import in_a_process
from tests.studies.crafted import many_tensors
from tests.studies.interrupted import (
    SETUP,
    Interrupting,
    StopHereError,
    assert_same,
    learn,
    rewrite,
    two,
)
from tests.toys import ToyStream
from tests.training import runs

BAD: tuple[object, ...] = (
    *(None, True, -1, 10**9, 10**400, 0.5, "x", [], [[]], {}),
    *({"grown": 10**6}, [None, None, None], [[-1], [-1], [-1]]),
)


def crafted(sound: Snapshot) -> Iterator[Snapshot]:
    """A snapshot with any number, and any tensor, replaced or taken away."""
    tensors: dict[str, Tensor] = sound.tensors
    numbers: dict[str, Any] = dict(sound.numbers)
    places = [(key, bad) for key in ("phase", "batches", "numbers") for bad in BAD]
    for key, value in (*places, ("phase", 3), ("batches", 400)):
        yield replace(sound, **{key: value})  # type: ignore[arg-type]
    for part, values in numbers.items():
        for bad in BAD:
            yield replace(sound, numbers=numbers | {part: bad})
            for key in values if isinstance(values, dict) else ():
                yield replace(sound, numbers=numbers | {part: values | {key: bad}})
    for name, tensor in tensors.items():
        yield replace(sound, tensors={key: tensors[key] for key in tensors if key != name})
        for other in (
            torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor[None],
            tensor[:1] if tensor.ndim else tensor[None, None],
            tensor.reshape(-1)[:5],
            torch.zeros(0),
            tensor.to(torch.int16),
        ):
            yield replace(sound, tensors=tensors | {name: other})
    for name in ("memory.rows", "record.phase", "x"):
        yield replace(sound, tensors=tensors | {name: torch.zeros(1)})


@pytest.mark.parametrize("name", ["a-gem", "ewc", "prog-nn", "icarl"])
def test_a_crafted_checkpoint_is_refused_or_fits(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StopHereError):
        learn(name, Interrupting(tmp_path, every=3, after=4))
    sound = Checkpoints(tmp_path, "fleet").last()
    assert sound is not None
    refused = fits = 0
    stream, method = ToyStream(ragged=True), METHODS[name]
    for snapshot in (sound, *crafted(sound)):
        feed, fleet, learner = assemble(stream, "ev", method, runs(method, rate=0.2), SETUP)
        recorder = Recorder(fleet, learner, feed, True)
        went_on = _restored(copy.deepcopy(snapshot), feed, fleet, learner, recorder)
        refused, fits = refused + (not went_on), fits + went_on
    assert refused > 100
    assert 1 <= fits < 50


def test_runs_whose_checkpoint_does_not_fit_begin_anew_and_end_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = learn("a-gem", None)
    with pytest.raises(StopHereError):
        learn("a-gem", Interrupting(tmp_path, every=3, after=4))
    keeper = Checkpoints(tmp_path, "fleet", every=1000)
    sound = keeper.last()
    assert sound is not None
    tensors = sound.tensors | {"record.accuracy": torch.zeros(2, 2)}
    keeper.keep(replace(sound, phase=sound.phase + 1, tensors=tensors))
    assert_same(learn("a-gem", Checkpoints(tmp_path, "fleet", every=1000)), expected)
    assert "begin anew" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("phase", None), ("phase", -1), ("phase", 10**400), ("batches", "x")),
        *(("numbers", []), ("tensors", 3), ("format", None), ("fleet", [])),
    ],
)
def test_a_checkpoint_whose_description_is_crafted_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    keeper = two(tmp_path)
    rewrite(tmp_path, **{key: value})
    found = keeper.last()
    assert found is not None
    assert found.batches == 4
    path = tmp_path / "0001-00000008.json"
    right = b'{"checksum":"' + digest("{}").encode() + b'"}'
    for content in (b"[]", b"3", b'{"checksum": 3}', b"\xff", right):
        path.write_bytes(content)
        found = keeper.last()
        assert found is not None
        assert found.batches == 4


@pytest.mark.parametrize("value", ["[]", '{"a":1}', "{}", "1.5", '""'])
def test_a_checkpoint_of_many_values_takes_little_memory(value: str, tmp_path: Path) -> None:
    path = tmp_path / "0001-00000008.json"
    path.write_text(f'{{"x":[{f"{value}," * ((2**26 - 100) // (len(value) + 1))}0]}}')
    keeper = Checkpoints(tmp_path, "fleet")
    assert in_a_process(lambda: [str(keeper.last())], 2**29) == ["None"]
    path.write_text(f'{{"x":[{f"{value}," * ((2**24 - 100) // (len(value) + 1))}0]}}')
    assert in_a_process(lambda: [str(keeper.last())]) == ["None"]


def test_a_checkpoint_of_many_tensors_takes_little_memory(tmp_path: Path) -> None:
    keeper, content = two(tmp_path), many_tensors()
    (tmp_path / "0001-00000008.safetensors").write_bytes(content)
    rewrite(tmp_path, tensors=digest(content))
    del content

    def last() -> list[str]:
        found = keeper.last()
        return ["none" if found is None else str(found.batches)]

    assert in_a_process(last, 2**29) == ["4"]
