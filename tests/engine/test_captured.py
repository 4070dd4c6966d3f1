"""Steps as CUDA graphs on a GPU."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.engine import step_graphs
from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import captured
from onepass.engine.precision import products
from onepass.engine.step_graphs import StepGraphs
from onepass.learners import METHODS, Method
from onepass.learners.van import Van
from onepass.metrics import Record
from onepass.models.norm import Constants
from onepass.protocol import assemble, train
from onepass.streams.base import Stream
from onepass.studies.checkpoint import Checkpoints
from tests.training import (
    RESIDUAL,
    SETUP,
    STREAM,
    Asking,
    Counting,
    Ends,
    Replacing,
    Told,
    digits,
    runs,
    same,
    same_bits,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)


class Watched(StepGraphs):
    """Counts what is launched."""

    launched = 0

    def _launch(self, *arguments: Any) -> None:
        Watched.launched += 1
        super()._launch(*arguments)


def on_gpu(
    method: Method, stream: Stream, monkeypatch: pytest.MonkeyPatch, *, capture: bool
) -> tuple[list[Record], int]:
    Watched.launched = 0
    monkeypatch.setattr("onepass.protocol.StepGraphs", Watched)
    if not capture:
        monkeypatch.setattr(Watched, "_key", lambda *_: None)
    records = train(stream, "cv", method, runs(method), SETUP, device="cuda")
    monkeypatch.undo()
    return records, Watched.launched


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_end_where_eager_ones_do(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = digits(STREAM.get(method, "permuted-digits"))
    with caplog.at_level(logging.WARNING):
        captured, launched = on_gpu(METHODS[method], stream, monkeypatch, capture=True)
    assert not caplog.records
    assert launched > 10
    eager, launched = on_gpu(METHODS[method], stream, monkeypatch, capture=False)
    assert launched == 0
    same(captured, eager)


@pytest.mark.parametrize("norm", ["torch", "authors"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "multi-task"])
def test_captured_steps_of_a_residual_network_end_where_eager_ones_do(
    method: str, norm: Constants, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found, setup, ends = METHODS[method], replace(RESIDUAL, batch_norm=norm), (Ends(), Ends())
    for keeper, capture in zip(ends, (True, False), strict=True):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            # The fastest way now may not be the fastest again.
            patch.setattr("onepass.protocol.TRIED", 0)
            patch.setattr("onepass.protocol.StepGraphs", Watched)
            patch.setattr(Watched, "launched", 0)
            if not capture:
                patch.setattr(Watched, "_key", lambda *_: None)
            stream = digits("split-digits", 40)
            train(stream, "cv", found, runs(found, 2), setup, device="cuda", keeper=keeper)
            assert (Watched.launched > 4) == capture
    assert not caplog.records
    same_bits(*ends)


@pytest.mark.parametrize("method", ["van", "a-gem", "gem"])
def test_a_residual_network_that_is_trained_twice_ends_in_the_same_bits(method: str) -> None:
    found, ends = METHODS[method], (Ends(), Ends())
    stream, setup = digits("split-digits", 40), replace(RESIDUAL, tf32=True)
    for keeper in ends:
        train(stream, "cv", found, runs(found, 2), setup, device="cuda", keeper=keeper)
    same_bits(*ends)


def test_a_graph_that_is_garbage_does_not_break_a_capture() -> None:
    device, ones = torch.device("cuda"), torch.ones(3, device="cuda")
    forgotten: list[object] = [captured(device, None, [lambda: ones.add_(1)])]
    forgotten.append(forgotten)
    del forgotten
    was = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graph = captured(device, None, [lambda: ones.mul_(len([[] for _ in range(9)]))])
    finally:
        gc.set_threshold(*was)
    graph.replay()
    assert ones.tolist() == [9.0] * 3


@pytest.mark.parametrize("method", ["mas", "ewc"])
def test_the_second_pass_is_captured_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    call = StepGraphs.__call__

    def watched(self: StepGraphs, batches: Batch, steps: int) -> None:
        seen.append(steps if not self._learns else 0)
        call(self, batches, steps)

    monkeypatch.setattr(StepGraphs, "__call__", watched)
    found = METHODS[method]
    train(digits("permuted-digits"), "cv", found, runs(found), SETUP, device="cuda")
    assert max(seen) == step_graphs.STRETCH


@pytest.mark.parametrize(
    ("kind", "word"), [(Counting, "turn"), (Replacing, "last"), (Asking, "captur")]
)
def test_a_method_that_cannot_be_captured_is_taken_step_by_step(
    kind: type[Van], word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = replace(METHODS["van"], learner=kind)
    with caplog.at_level(logging.WARNING):
        captured, launched = on_gpu(method, digits("permuted-digits"), monkeypatch, capture=True)
    assert launched == 0
    assert "one by one" in caplog.text
    assert word in caplog.text.lower()
    same(captured, on_gpu(method, digits("permuted-digits"), monkeypatch, capture=False)[0])


def test_a_method_that_reads_the_task_is_captured_for_each_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = replace(METHODS["van"], learner=Told)
    captured, launched = on_gpu(method, digits("permuted-digits"), monkeypatch, capture=True)
    assert launched > 20
    same(captured, on_gpu(method, digits("permuted-digits"), monkeypatch, capture=False)[0])


@pytest.mark.parametrize("method", ["rwalk", "gem", "a-gem", "prog-nn", "s-gem"])
def test_a_fleet_that_is_resumed_on_a_gpu_ends_where_it_would_have(
    method: str, tmp_path: Path
) -> None:
    class Stops(Checkpoints):
        def due(self, batches: int, since: int) -> bool:
            if batches >= 60 and self.stops:
                raise KeyboardInterrupt
            return super().due(batches, since)

        stops = True

    def go(keeper: Checkpoints | None) -> list[Record]:
        found, stream = METHODS[method], digits("permuted-digits")
        return train(stream, "cv", found, runs(found), SETUP, device="cuda", keeper=keeper)

    keeper = Stops(tmp_path, "fleet", every=25)
    with pytest.raises(KeyboardInterrupt):
        go(keeper)
    keeper.stops = False
    assert keeper.last() is not None
    same(go(keeper), go(None))


def test_exact_products_are_closer_to_a_cpus_than_tf32() -> None:
    def ended(device: str, tf32: bool) -> Tensor:
        van, stream = METHODS["van"], digits("permuted-digits")
        feed, fleet, learner = assemble(stream, "cv", van, runs(van), SETUP, device=device)
        take = StepGraphs(fleet, learner)
        with products(fleet.device, tf32=tf32):
            for batches, steps in feed.stretches(0, 0, lambda _, left: take.stretch(left)):
                take(batches, steps)
        return fleet.architecture.numbers(fleet.theta).cpu()

    truth = ended("cpu", False)
    exact, rough = ((ended("cuda", tf32) - truth).norm() / truth.norm() for tf32 in (False, True))
    assert exact < 1e-5
    assert 10 * exact < rough < 1e-2
