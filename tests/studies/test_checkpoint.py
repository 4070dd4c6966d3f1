"""Checkpoints: an interrupted run ends as if it had not been, and a damaged one is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onepass.learners import METHODS, ewc
from onepass.learners.rehearsal import Reference
from onepass.memory import Policy
from onepass.metrics import Record
from onepass.protocol import Run, train
from onepass.studies import checkpoint
from onepass.studies.checkpoint import Checkpoints
from tests.studies.interrupted import (
    SETUP,
    SNAPSHOT,
    Interrupting,
    StopHereError,
    assert_same,
    learn,
    rewrite,
    two,
)
from tests.toys import ToyStream


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_run_that_is_interrupted_anywhere_ends_bit_identical(
    name: str, count: int, tmp_path: Path
) -> None:
    expected = learn(name, None, count)
    for stop in (2, 5):  # between tasks and in the middle of one
        folder = tmp_path / str(stop)
        with pytest.raises(StopHereError):
            learn(name, Interrupting(folder, every=3, after=stop), count)
        assert_same(learn(name, Checkpoints(folder, "fleet", every=3), count), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_on_a_gpu(name: str, tmp_path: Path) -> None:
    expected = learn(name, None, device="cuda")
    with pytest.raises(StopHereError):
        learn(name, Interrupting(tmp_path, every=3, after=5), device="cuda")
    resumed = learn(name, Checkpoints(tmp_path, "fleet", every=3), device="cuda")
    for found, whole in zip(resumed, expected, strict=True):
        # Sums on a GPU need not repeat bit by bit.
        assert found.accuracy == pytest.approx(whole.accuracy, abs=0.05, nan_ok=True)


@pytest.mark.parametrize("name", METHODS)
def test_resumed_parameters_are_bit_identical(name: str, tmp_path: Path) -> None:
    """Records could agree by chance: compare the last checkpoints themselves."""
    learn(name, Checkpoints(tmp_path / "whole", "fleet", every=3))
    for stop in range(1, 12, 3):
        try:
            learn(name, Interrupting(tmp_path / "cut", every=3, after=stop))
        except StopHereError:
            continue
    learn(name, Checkpoints(tmp_path / "cut", "fleet", every=3))
    assert_same_parameters(tmp_path / "whole", tmp_path / "cut")


def assert_same_parameters(one: Path, other: Path) -> None:
    whole, cut = (Checkpoints(folder, "fleet").last() for folder in (one, other))
    assert whole is not None
    assert cut is not None
    assert (whole.phase, whole.batches) == (cut.phase, cut.batches)
    assert whole.tensors.keys() == cut.tensors.keys()
    for key, tensor in whole.tensors.items():
        if key != "memory.x":  # its last place takes what is thrown away
            assert torch.equal(tensor.nan_to_num(), cut.tensors[key].nan_to_num()), key
        else:
            assert torch.equal(tensor[:, :-1], cut.tensors[key][:, :-1])


def test_reference_batches_that_are_drawn_from_a_larger_memory_go_on_where_they_were(
    tmp_path: Path,
) -> None:
    """Where the reference batch is the whole memory, a wrong step number would go unnoticed."""

    def go(keeper: Checkpoints | None) -> list[Record]:
        return learn("a-gem", keeper, 2, ragged=False, options=Reference(reference_batch=3))

    expected = go(None)
    go(Checkpoints(tmp_path / "whole", "fleet", every=2))
    for stop in (5, 8):
        with pytest.raises(StopHereError):
            go(Interrupting(tmp_path / str(stop), every=2, after=stop))
        assert_same(go(Checkpoints(tmp_path / str(stop), "fleet", every=2)), expected)
        assert_same_parameters(tmp_path / "whole", tmp_path / str(stop))


def test_a_fisher_estimate_that_is_half_done_goes_on(tmp_path: Path) -> None:
    def go(keeper: Checkpoints | None) -> list[Record]:
        options = ewc.Options(fisher="moving-average", fisher_every=4)
        return learn("ewc", keeper, 2, ragged=False, options=options)

    go(Checkpoints(tmp_path / "whole", "fleet", every=3))
    with pytest.raises(StopHereError):
        go(Interrupting(tmp_path / "cut", every=3, after=3))
    go(Checkpoints(tmp_path / "cut", "fleet", every=3))
    assert_same_parameters(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("policy", ["ring", "reservoir", "class-reservoir"])
@pytest.mark.parametrize("current", [False, True])
def test_every_kind_of_memory_resumes(policy: Policy, current: bool, tmp_path: Path) -> None:
    setup = replace(SETUP, memory=policy, memory_includes_current_task=current)
    setup = replace(setup, memory_with_replacement=current)
    expected = learn("a-gem", None, setup=setup)
    with pytest.raises(StopHereError):
        learn("a-gem", Interrupting(tmp_path, every=4, after=3), setup=setup)
    assert_same(learn("a-gem", Checkpoints(tmp_path, "fleet", every=4), setup=setup), expected)


def test_a_diverged_row_stays_diverged_after_resuming(tmp_path: Path) -> None:
    rows = [Run(0, {"learning_rate": 0.2}), Run(1, {"learning_rate": 1e9})]

    def go(keeper: Checkpoints | None) -> list[Record]:
        return train(ToyStream(), "ev", METHODS["van"], rows, SETUP, keeper=keeper)

    expected = go(None)
    assert [record.diverged for record in expected] == [False, True]
    with pytest.raises(StopHereError):
        go(Interrupting(tmp_path, every=4, after=3))
    assert_same(go(Checkpoints(tmp_path, "fleet", every=4)), expected)


def test_checkpoints_nobody_asked_for_cost_half_a_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    keeper = Checkpoints(tmp_path, "fleet")
    now += checkpoint.PATIENCE - 1
    assert not keeper.due(0, 0)
    now += 1
    assert keeper.due(0, 0)
    assert not keeper.due(7, 6)
    now += checkpoint.LONG
    assert keeper.due(7, 6), "a task may be the whole stream"
    write = checkpoint.write_here

    def slow(path: Path, content: bytes) -> None:
        nonlocal now
        now += 1
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_here", slow)
    keeper.keep(SNAPSHOT)  # two files: two seconds
    now += 2 / checkpoint.SHARE - 1
    assert not keeper.due(0, 0)
    now += 1
    assert keeper.due(0, 0)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files_of(*batches: int) -> list[str]:
    return [f"0001-{batch:08}.{suffix}" for batch in batches for suffix in ("json", "safetensors")]


def test_the_last_two_are_kept_and_nothing_temporary_is_left(tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, "fleet")
    for batches in (4, 8, 12):
        keeper.keep(replace(SNAPSHOT, batches=batches))
    assert kept(tmp_path) == files_of(8, 12)


def harm_tensors(folder: Path) -> None:
    path = folder / "0001-00000008.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def harm_json(folder: Path) -> None:
    path = folder / "0001-00000008.json"
    path.write_bytes(path.read_bytes().replace(b'"batches":8', b'"batches":9'))


def other_configuration(folder: Path) -> None:
    rewrite(folder, fleet="another")


def other_format(folder: Path) -> None:
    rewrite(folder, format=99)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (harm_tensors, "0001-00000008.safetensors is missing, truncated or altered"),
        (harm_json, "it was altered"),
        (lambda folder: (folder / "0001-00000008.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "0001-00000008.json").write_bytes(b""), "damaged"),
        (lambda folder: (folder / "0001-00000008.json").write_bytes(b"[" * 100_000), "damaged"),
        (other_configuration, "another configuration"),
        (other_format, "its format is 99"),
        (lambda folder: rewrite(folder, software="another version"), "with another version"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_its_reason_and_the_one_before_is_used(
    harm: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = two(tmp_path)
    harm(tmp_path)
    found = keeper.last()
    assert found is not None
    assert found.batches == 4
    assert reason in caplog.text


def test_new_checkpoints_replace_refused_ones(tmp_path: Path) -> None:
    two(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    keeper = Checkpoints(tmp_path, "fleet")
    assert keeper.last() is None
    keeper.keep(replace(SNAPSHOT, batches=1))
    keeper.keep(replace(SNAPSHOT, batches=2))
    assert kept(tmp_path) == files_of(1, 2)


def test_without_a_sound_checkpoint_there_is_none(tmp_path: Path) -> None:
    keeper = two(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    assert keeper.last() is None


# ---- checkpoints that were written to deceive: their hashes and checksums are right
