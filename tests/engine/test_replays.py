"""Steps that are captured and replayed; what needs a GPU is skipped where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepass.engine import replays
from onepass.engine.branches import Region, region
from onepass.engine.precision import products
from onepass.engine.replays import Replays
from onepass.errors import is_out_of_memory
from onepass.learners import METHODS, Method
from onepass.learners.van import Van
from onepass.metrics import Record
from onepass.protocol import Run, Setup, assemble, train
from onepass.streams import STREAMS
from onepass.streams.base import Stream
from onepass.streams.batch import Batch
from onepass.studies.checkpoint import Checkpoints
from simulated import Simulated
from toys import ToyStream

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
SETUP = Setup(hidden=(12, 12), memory_per_task=8, batch_size=2, tf32=False)
STREAM = {"icarl": "split-digits"}  # which needs classes of its own


def runs(method: Method, seeds: int = 3) -> list[Run]:
    return [Run(seed, dict.fromkeys(method.hyperparameters, 0.5) | {"learning_rate": 0.1}) for seed in range(seeds)]


def digits(name: str, examples: int = 200) -> Stream:
    return STREAMS[name].make(STREAMS[name].options(train_examples=examples, test_examples=60), None)


def same(one: list[Record], other: list[Record], tolerance: float = 0.0) -> None:
    for a, b in zip(one, other, strict=True):
        for name in ("accuracy", "initial", "curve"):
            assert torch.allclose(*(torch.as_tensor(getattr(r, name)) for r in (a, b)), atol=tolerance, equal_nan=True)
        assert a.violations == b.violations


@pytest.mark.parametrize("method", ["van", "ewc", "mas", "a-gem", "multi-task"])
@pytest.mark.parametrize("ragged", [False, True])
def test_stretches_of_any_length_end_where_single_steps_do(method: str, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    for length in (1, 3, 100):
        monkeypatch.setattr(Replays, "stretch", lambda _, at_most, length=length: min(length, at_most))
        ended.append(train(ToyStream(ragged), "ev", METHODS[method], runs(METHODS[method]), SETUP))
    same(ended[0], ended[1])
    same(ended[0], ended[2])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "gem"])
def test_replayed_in_any_order_that_their_waits_allow_steps_end_where_eager_ones_do(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replays, "STRETCH", 6)
    found, stream = METHODS[method], digits(STREAM.get(method, "permuted-digits"), 60)
    options = replace(found.learner.options(), fisher_every=3) if method == "rwalk" else None
    eager = train(stream, "cv", found, runs(found), SETUP, options)
    monkeypatch.setattr("onepass.protocol.Replays", Simulated)
    monkeypatch.setattr(Simulated, "replayed", 0)
    with caplog.at_level(logging.WARNING):
        captured = train(stream, "cv", found, runs(found), SETUP, options)
    assert not caplog.records
    assert Simulated.replayed > 5
    same(eager, captured)


def test_a_checkpoint_that_falls_into_a_stretch_is_written_after_it(tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, "fleet", every=50)
    assert [keeper.due(*at) for at in ((20, 0), (40, 20), (60, 40), (80, 60), (100, 80), (0, 0))] == [False, False, True, False, True, True]


@given(st.data())
def test_regions_that_share_a_byte_meet(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    matrix = torch.arange(rows * columns).view(rows, columns)

    def part() -> Tensor:
        begin, end = sorted((data.draw(st.integers(0, columns)), data.draw(st.integers(0, columns))))
        top = data.draw(st.integers(0, rows - 1))
        piece = matrix[top : data.draw(st.integers(top + 1, rows)), begin:end]
        return piece.mT if data.draw(st.booleans()) else piece[:, :: data.draw(st.integers(1, 3))]

    one, other = part(), part()
    first, second = region(one), region(other)
    if set(one.flatten().tolist()) & set(other.flatten().tolist()):
        assert first is not None
        assert second is not None
        assert first.meets(second)
        assert second.meets(first)


def test_whatever_meets_a_region_meets_those_that_cover_it() -> None:
    some = [Region(0, stride, begin, length) for stride in (0, 8) for begin in range(3) for length in range(1, 4)]
    assert sum(one.covers(other) for one, other in product(some, some)) > len(some)
    for one, other, third in product(some, some, some):
        assert not one.covers(other) or not third.meets(other) or third.meets(one)


def test_a_capture_counts_nothing() -> None:
    method = METHODS["s-gem"]
    feed, fleet, learner = assemble(ToyStream(), "ev", method, runs(method), SETUP)
    take = Simulated(fleet, learner)
    for task in range(3):
        learner.begin_task(task)
        for batches, steps in feed.stretches(task, 0, lambda _, left: min(left, 3)):
            take(batches, steps)
        assert learner.number == -(-47 // SETUP.batch_size)  # type: ignore[attr-defined]
        assert int(fleet.step[0]) == (task + 1) * learner.number  # type: ignore[attr-defined]
        learner.end_task()


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda values: values["list"].append(1),
    lambda values: values.update(number=2),
    lambda values: values.update(tensor=torch.zeros(2)),
    lambda values: values["map"].update(a=2),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_host_changes_is_noticed(change: Callable[[dict[str, Any]], Any]) -> None:
    values: dict[str, Any] = {"list": [], "number": 1, "tensor": torch.zeros(2), "map": {"a": 1}}
    before = replays._print(values, 2)
    values["tensor"] += 1
    assert replays._print(values, 2) == before, "what is written in place is no change"
    change(values)
    assert replays._print(values, 2) != before


class Full(Simulated):
    """A device whose memory is used up while steps are captured, of which the graph tells in words of its own."""

    def _record(self, work: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_out_of_memory_while_steps_are_captured_asks_for_a_smaller_fleet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    van = METHODS["van"]
    eager = train(digits("permuted-digits"), "cv", van, runs(van, 1), SETUP)
    monkeypatch.setattr("onepass.protocol.Replays", Full)
    with pytest.raises(RuntimeError) as caught:
        train(digits("permuted-digits"), "cv", van, runs(van), SETUP)
    assert is_out_of_memory(caught.value)
    with caplog.at_level(logging.WARNING):  # none is smaller than a single run
        same(train(digits("permuted-digits"), "cv", van, runs(van, 1), SETUP), eager)
    assert "one by one" in caplog.text


def test_out_of_memory_while_gradients_are_traced_is_no_reason_for_plain_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("onepass.engine.gradients.trace", full)
    with pytest.raises(torch.OutOfMemoryError):
        train(digits("permuted-digits"), "cv", METHODS["van"], runs(METHODS["van"]), SETUP)


# ---- on a GPU


class Watched(Replays):
    """Counts what is replayed."""

    replayed = 0

    def _replay(self, *arguments: Any) -> None:
        Watched.replayed += 1
        super()._replay(*arguments)


def on_gpu(method: Method, stream: Stream, monkeypatch: pytest.MonkeyPatch, *, capture: bool) -> tuple[list[Record], int]:
    Watched.replayed = 0
    monkeypatch.setattr("onepass.protocol.Replays", Watched)
    if not capture:
        monkeypatch.setattr(Watched, "_key", lambda *_: None)
    records = train(stream, "cv", method, runs(method), SETUP, device="cuda")
    monkeypatch.undo()
    return records, Watched.replayed


@on_cuda
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_end_where_eager_ones_do(method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stream = digits(STREAM.get(method, "permuted-digits"))
    with caplog.at_level(logging.WARNING):
        captured, replayed = on_gpu(METHODS[method], stream, monkeypatch, capture=True)
    assert not caplog.records
    assert replayed > 10
    eager, replayed = on_gpu(METHODS[method], stream, monkeypatch, capture=False)
    assert replayed == 0
    same(captured, eager)


@on_cuda
@pytest.mark.parametrize("method", ["mas", "ewc"])
def test_the_second_look_is_captured_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    call = Replays.__call__

    def watched(self: Replays, batches: Batch, steps: int) -> None:
        seen.append(steps if not self._learns else 0)
        call(self, batches, steps)

    monkeypatch.setattr(Replays, "__call__", watched)
    train(digits("permuted-digits"), "cv", METHODS[method], runs(METHODS[method]), SETUP, device="cuda")
    assert max(seen) == replays.STRETCH


class Counting(Van):
    """A method of somebody who has not read about captured steps."""

    turn = 0

    def direction(self, batch: Batch) -> Tensor:
        self.turn += 1
        return super().direction(batch) * (self.turn % 7)


class Replacing(Van):
    def direction(self, batch: Batch) -> Tensor:
        self.last = super().direction(batch).clone()
        return self.last


class Asking(Van):
    def direction(self, batch: Batch) -> Tensor:
        g = super().direction(batch)
        return g if g.abs().max() > 1e-3 else 0 * g


class Told(Van):
    reads_task = True

    def direction(self, batch: Batch) -> Tensor:
        return super().direction(batch) * (1 + (batch.task or 0))


class Listing(Van):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[int] = []

    def direction(self, batch: Batch) -> Tensor:
        self.seen.append(len(self.seen))
        return super().direction(batch)


@pytest.mark.parametrize(("kind", "word"), [(Counting, "turn"), (Replacing, "last"), (Listing, "seen")])
def test_a_method_that_does_things_on_the_host_is_taken_step_by_step(
    kind: type[Van], word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = replace(METHODS["van"], learner=kind)
    eager = train(ToyStream(), "ev", method, runs(method), SETUP)
    monkeypatch.setattr("onepass.protocol.Replays", Simulated)
    monkeypatch.setattr(Simulated, "replayed", 0)
    with caplog.at_level(logging.WARNING):
        same(eager, train(ToyStream(), "ev", method, runs(method), SETUP))
    assert Simulated.replayed == 0
    assert f"one by one, not replayed: a step changes {word} on the host" in caplog.text


@on_cuda
@pytest.mark.parametrize(("kind", "word"), [(Counting, "turn"), (Replacing, "last"), (Asking, "captur")])
def test_a_method_that_cannot_be_captured_is_taken_step_by_step(
    kind: type[Van], word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = replace(METHODS["van"], learner=kind)
    with caplog.at_level(logging.WARNING):
        captured, replayed = on_gpu(method, digits("permuted-digits"), monkeypatch, capture=True)
    assert replayed == 0
    assert "one by one" in caplog.text
    assert word in caplog.text.lower()
    same(captured, on_gpu(method, digits("permuted-digits"), monkeypatch, capture=False)[0])


@on_cuda
def test_a_method_that_looks_at_the_task_is_captured_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(METHODS["van"], learner=Told)
    captured, replayed = on_gpu(method, digits("permuted-digits"), monkeypatch, capture=True)
    assert replayed > 20
    same(captured, on_gpu(method, digits("permuted-digits"), monkeypatch, capture=False)[0])


@on_cuda
@pytest.mark.parametrize("method", ["rwalk", "gem", "a-gem", "prog-nn", "s-gem"])
def test_a_fleet_that_is_resumed_on_a_gpu_ends_where_it_would_have(method: str, tmp_path: Path) -> None:
    class Stops(Checkpoints):
        def due(self, batches: int, since: int) -> bool:
            if batches >= 60 and self.stops:
                raise KeyboardInterrupt
            return super().due(batches, since)

        stops = True

    def go(keeper: Checkpoints | None) -> list[Record]:
        return train(digits("permuted-digits"), "cv", METHODS[method], runs(METHODS[method]), SETUP, device="cuda", keeper=keeper)

    keeper = Stops(tmp_path, "fleet", every=25)
    with pytest.raises(KeyboardInterrupt):
        go(keeper)
    keeper.stops = False
    assert keeper.last() is not None
    same(go(keeper), go(None))


@on_cuda
def test_exact_products_are_closer_to_a_cpus_than_tf32() -> None:
    def ended(device: str, tf32: bool) -> Tensor:
        feed, fleet, learner = assemble(digits("permuted-digits"), "cv", METHODS["van"], runs(METHODS["van"]), SETUP, device=device)
        take = Replays(fleet, learner)
        with products(fleet.device, tf32=tf32):
            for batches, steps in feed.stretches(0, 0, lambda _, left: take.stretch(left)):
                take(batches, steps)
        return fleet.theta[:, : fleet.architecture.size].cpu()

    truth = ended("cpu", False)
    exact, rough = ((ended("cuda", tf32) - truth).norm() / truth.norm() for tf32 in (False, True))
    assert exact < 1e-5
    assert 10 * exact < rough < 1e-2


def test_every_learner_says_what_its_steps_depend_on() -> None:
    stream = ToyStream(shared=True)
    for name in set(METHODS) - {"icarl"}:
        *_, learner = assemble(stream, "ev", METHODS[name], runs(METHODS[name]), SETUP)
        learner.begin_task(0)
        assert (learner.form() is not None) == (name != "gem")  # which needs a GPU to solve its dual without the host
