"""Steps as CUDA graphs, simulated on a CPU; `test_captured.py` has them on a GPU."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepass.engine import gradients, step_graphs
from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import _touched, region
from onepass.engine.step_graphs import StepGraphs
from onepass.engine.tracing import trace
from onepass.errors import is_out_of_memory
from onepass.learners import METHODS
from onepass.learners.declarations import Capture
from onepass.learners.er import Er
from onepass.learners.van import Van
from onepass.models.norm import Constants
from onepass.protocol import Run, assemble, train
from onepass.studies.checkpoint import Checkpoints
from tests.engine.simulated_cuda import Simulated
from tests.toys import ToyStream
from tests.training import (
    RESIDUAL,
    SETUP,
    STREAM,
    Counting,
    Ends,
    Listing,
    Replacing,
    Told,
    digits,
    runs,
    same,
    same_bits,
)


@pytest.mark.parametrize(
    ("method", "ragged"),
    [("van", False), ("multi-task", False), ("ewc", True), ("mas", True), ("a-gem", True)],
)
def test_stretches_of_any_length_end_where_single_steps_do(
    method: str, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    for length in (1, 3, 100):
        monkeypatch.setattr(
            StepGraphs, "stretch", lambda _, at_most, length=length: min(length, at_most)
        )
        ended.append(train(ToyStream(ragged), "ev", METHODS[method], runs(METHODS[method]), SETUP))
    same(ended[0], ended[1])
    same(ended[0], ended[2])


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.long) if name == "prog-nn" else name
        for name in METHODS
        if name not in ("gem", "multi-task")
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_captured_steps_end_where_eager_ones_do_in_any_order_that_their_waits_allow(
    method: str, ragged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "STRETCH", 5)  # no divisor of anything here
    found = METHODS[method]
    stream, part = (
        (ToyStream(True), "ev")
        if ragged
        else (digits(STREAM.get(method, "permuted-digits"), 61), "cv")
    )
    small = {"fisher_every": 3, "reference_batch": 5}
    options = replace(
        found.learner.options(),
        **{key: value for key, value in small.items() if hasattr(found.learner.options(), key)},
    )
    eager, captured = Ends(), Ends()
    records = train(stream, part, found, runs(found), SETUP, options, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    with caplog.at_level(logging.WARNING):
        same(records, train(stream, part, found, runs(found), SETUP, options, keeper=captured))
    assert not caplog.records
    assert ragged or Simulated.launched > 5
    same_bits(eager, captured)


@pytest.mark.parametrize("learning_rate", [0.1, 1e30])
def test_steps_are_captured_even_if_a_run_diverges(
    learning_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    three = [Run(seed, {"learning_rate": learning_rate if seed == 1 else 0.1}) for seed in range(3)]
    records = train(digits("permuted-digits"), "cv", METHODS["s-gem"], three, SETUP)
    assert records[1].diverged == (learning_rate > 1)
    assert Simulated.launched > 40


class EverySecond(Er):
    """Draws from its memory in every second step, and `otherwise` examples in the others."""

    otherwise = 0

    def capture(self) -> Capture | None:
        form = self.episodic.form(3)
        return None if form is None else Capture(form, period=2, reads_task=False)

    def direction(self, batch: Batch) -> Tensor:
        g, _ = self.fleet.grad(batch)
        count = 3 if self.fleet.steps_in_task % 2 else self.otherwise
        past = self.episodic.draw(count) if count else None
        with self.fleet.workspace():
            if past is not None:
                g = g + self.fleet.grad(past)[0]
        self.episodic.observe(batch)
        return g


@pytest.mark.parametrize("otherwise", [0, 3, 2])
def test_a_captured_step_that_draws_now_and_then_gets_its_own_examples(
    otherwise: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "STRETCH", 4)
    monkeypatch.setattr(EverySecond, "otherwise", otherwise)
    method, eager, captured = replace(METHODS["er"], learner=EverySecond), Ends(), Ends()
    train(digits("permuted-digits", 60), "cv", method, runs(method), SETUP, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    with caplog.at_level(logging.WARNING):
        train(digits("permuted-digits", 60), "cv", method, runs(method), SETUP, keeper=captured)
    same_bits(eager, captured)
    assert ("asks the episodic memory for something else" in caplog.text) == (otherwise == 2)
    assert Simulated.launched > (0 if otherwise == 2 else 10)


def test_a_method_that_reads_the_task_is_captured_for_each_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, eager, captured = replace(METHODS["van"], learner=Told), Ends(), Ends()
    train(digits("permuted-digits"), "cv", method, runs(method), SETUP, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    train(digits("permuted-digits"), "cv", method, runs(method), SETUP, keeper=captured)
    same_bits(eager, captured)


@pytest.mark.parametrize("every", [7, pytest.param(201, marks=pytest.mark.long)])
def test_a_long_period_has_one_graph_for_its_last_step_and_one_for_the_others(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "LONGEST", 6)
    method, eager, captured = METHODS["rwalk"], Ends(), Ends()
    stream, options = digits("permuted-digits"), method.learner.options(fisher_every=every)
    train(stream, "cv", method, runs(method), SETUP, options, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    train(stream, "cv", method, runs(method), SETUP, options, keeper=captured)
    assert Simulated.launched > 200
    same_bits(eager, captured)


@pytest.mark.parametrize("method", ["mas", "ewc"])
def test_the_second_pass_is_captured_though_tasks_differ_in_length(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    reviews: list[bool] = []
    launch = Simulated._launch

    def watched(self: Simulated, *arguments: Any) -> None:
        reviews.append(not self._learns)
        launch(self, *arguments)

    monkeypatch.setattr(Simulated, "_launch", watched)
    train(ToyStream(True), "ev", METHODS[method], runs(METHODS[method]), SETUP)
    assert any(reviews)


def test_a_checkpoint_that_falls_into_a_stretch_is_written_after_it(tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, "fleet", every=50)
    stretches = (20, 0), (40, 20), (60, 40), (80, 60), (100, 80), (0, 0)
    due = [keeper.due(*at) for at in stretches]
    assert due == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("method", "norm"),
    [
        pytest.param("van", "torch", marks=pytest.mark.long),
        ("a-gem", "torch"),
        pytest.param("a-gem", "authors", marks=pytest.mark.long),
        pytest.param("rwalk", "authors", marks=pytest.mark.long),
    ],
)
def test_steps_of_residual_networks_are_captured_too(
    method: str, norm: Constants, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, setup = METHODS[method], replace(RESIDUAL, batch_norm=norm)
    stream, eager, captured = digits("split-digits", 25), Ends(), Ends()
    small = {"fisher_every": 3, "reference_batch": 9}
    options = replace(
        found.learner.options(),
        **{key: value for key, value in small.items() if hasattr(found.learner.options(), key)},
    )
    monkeypatch.setattr(gradients, "trace", partial(trace, on_gpu=True))
    train(stream, "cv", found, runs(found, 2), setup, options, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    with caplog.at_level(logging.WARNING):
        train(stream, "cv", found, runs(found, 2), setup, options, keeper=captured)
    assert not caplog.records
    assert Simulated.launched > 8
    same_bits(eager, captured)


PARTS = [slice(None), slice(0, 2), slice(1, 2), slice(1, None)]


@given(st.data())
def test_regions_that_share_a_byte_meet(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    matrix = torch.arange(rows * columns).view(rows, columns)

    def part() -> Tensor:
        begin, end = sorted(data.draw(st.integers(0, columns)) for _ in range(2))
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


def test_a_region_that_meets_another_meets_those_that_cover_it() -> None:
    block = torch.zeros(3, 4, 5)
    some = [
        one for part in product(PARTS, PARTS, PARTS) if (one := region(block[part])) is not None
    ]
    assert sum(one.covers(other) for one, other in product(some, some)) > len(some)
    for one, other, third in product(some, some, some):
        assert not one.covers(other) or not third.meets(other) or third.meets(one)


def test_the_rows_of_two_runs_do_not_meet_whatever_shapes_their_parameters_have() -> None:
    gradient = torch.zeros(2, 60)
    convolution = gradient[0, :36].view(2, 3, 3, 2).movedim(-1, 1)
    one, other = region(convolution), region(gradient[1, 36:].view(4, 6))
    assert one is not None
    assert other is not None
    assert not one.meets(other)
    assert not other.meets(one)


def test_a_capture_counts_nothing() -> None:
    method = METHODS["s-gem"]
    feed, fleet, learner = assemble(ToyStream(), "ev", method, runs(method), SETUP)
    take = Simulated(fleet, learner)
    for task in range(3):
        learner.begin_task(task)
        for batches, steps in feed.stretches(task, 0, lambda _, left: min(left, 3)):
            take(batches, steps)
        assert fleet.steps_in_task == -(-47 // SETUP.batch_size)  # type: ignore[attr-defined]
        assert int(fleet.step[0]) == (task + 1) * fleet.steps_in_task
        learner.end_task()


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda values: values["list"].append(1),
    lambda values: values.update(number=2),
    lambda values: values.update(tensor=torch.zeros(2)),
    lambda values: values["map"].update(a=2),
    lambda values: values["deep"]["er"].append(2),
    lambda values: values["queue"].append(2),
    lambda values: values["array"].__iadd__(1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_on_the_host_is_noticed(change: Callable[[dict[str, Any]], Any]) -> None:
    values: dict[str, Any] = {"list": [], "number": 1, "tensor": torch.zeros(2), "map": {"a": 1}}
    values |= {"deep": {"er": []}, "queue": deque(), "array": np.zeros(2)}
    before = step_graphs._fingerprint(values)
    values["tensor"] += 1
    assert step_graphs._fingerprint(values) == before, "what is written in place is no change"
    change(values)
    assert step_graphs._fingerprint(values) != before


class Full(Simulated):
    """A device without memory left for a capture, of which the graph makes another error."""

    def _record(self, work: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_out_of_memory_while_steps_are_captured_asks_for_a_smaller_fleet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    van = METHODS["van"]
    eager = train(digits("permuted-digits"), "cv", van, runs(van, 1), SETUP)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Full)
    with pytest.raises(RuntimeError) as caught:
        train(digits("permuted-digits"), "cv", van, runs(van), SETUP)
    assert is_out_of_memory(caught.value)
    with caplog.at_level(logging.WARNING):  # none is smaller than a single run
        same(train(digits("permuted-digits"), "cv", van, runs(van, 1), SETUP), eager)
    assert "one by one" in caplog.text


def test_out_of_memory_while_gradients_are_traced_is_no_reason_for_plain_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("onepass.engine.gradients.trace", full)
    with pytest.raises(torch.OutOfMemoryError):
        train(digits("permuted-digits"), "cv", METHODS["van"], runs(METHODS["van"]), SETUP)


@pytest.mark.parametrize(
    ("kind", "word"), [(Counting, "turn"), (Replacing, "last"), (Listing, "seen")]
)
def test_a_method_that_does_things_on_the_host_is_taken_step_by_step(
    kind: type[Van], word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = replace(METHODS["van"], learner=kind)
    eager = train(ToyStream(), "ev", method, runs(method), SETUP)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    with caplog.at_level(logging.WARNING):
        same(eager, train(ToyStream(), "ev", method, runs(method), SETUP))
    assert Simulated.launched == 0
    assert f"one by one, not captured: a step changes {word} on the host" in caplog.text


def test_every_learner_but_gem_can_be_captured() -> None:
    stream = ToyStream(shared=True)
    for name in set(METHODS) - {"icarl"}:
        *_, learner = assemble(stream, "ev", METHODS[name], runs(METHODS[name]), SETUP)
        learner.begin_task(0)
        # Gem needs a GPU to solve its dual problem without the host.
        assert (learner.capture() is not None) == (name != "gem")


def test_batch_norm_writes_its_running_statistics_and_its_backward_pass_does_not() -> None:
    x, weight, bias, mean, variance, out = (torch.randn(3, 4), *torch.ones(4, 4), torch.randn(3, 4))
    forward = torch.ops.aten.native_batch_norm.default
    _, writes = _touched(forward, (x, weight, bias, mean, variance, True, 0.1, 1e-5), {})
    assert writes == [region(mean), region(variance)]
    arguments = (out, x, weight, mean, variance, mean, variance, True, 1e-5, [True] * 3)
    assert _touched(torch.ops.aten.native_batch_norm_backward.default, arguments, {})[1] == []
