"""The protocol: what is chosen in cross-validation, and what is recorded of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onepass import recording
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.learners.base import Learner
from onepass.learners.rehearsal import Reference
from onepass.metrics import Record, select
from onepass.protocol import Run, Setup, assemble, grid_points, train
from tests.toys import ToyStream

SETUP = Setup(hidden=(8,), memory_per_task=6)
BLANK = Record(0, {}, np.zeros((2, 2)), np.zeros(2), np.zeros((2, 11)), None, None, 0.0, 0, False)


def tried(rate: float, *accuracies: float, diverged: bool = False) -> list[Record]:
    blank = replace(BLANK, hyperparameters={"learning_rate": rate}, diverged=diverged)
    return [replace(blank, accuracy=np.full((2, 2), a)) for a in accuracies]


def rows(*rates: float) -> list[Run]:
    """A run per learning rate, with seeds from 0."""
    return [Run(seed, {"learning_rate": rate}) for seed, rate in enumerate(rates)]


def test_the_best_average_accuracy_over_seeds_is_chosen() -> None:
    found = select([*tried(0.3, 0.9, 0.1), *tried(0.1, 0.6, 0.7), *tried(0.03, 0.5, 0.5)])
    assert found == {"learning_rate": 0.1}


def test_of_equals_the_first_in_the_grid_is_chosen() -> None:
    assert select([*tried(0.1, 0.5), *tried(0.3, 0.6), *tried(0.03, 0.6)]) == {"learning_rate": 0.3}


def test_a_grid_point_of_which_a_run_diverged_has_lost() -> None:
    records = [*tried(0.3, 0.9), *tried(0.3, 0.9, diverged=True), *tried(0.1, 0.2, 0.2)]
    assert select(records) == {"learning_rate": 0.1}
    with pytest.raises(InputError, match="diverged"):
        select(tried(0.3, 0.9, diverged=True))


def test_selection_looks_at_the_last_row_of_accuracies_alone() -> None:
    early = replace(BLANK, accuracy=np.array([[1.0, 1.0], [0.4, 0.4]]))
    assert select([early, *tried(0.1, 0.5)]) == {"learning_rate": 0.1}


def test_a_grid_point_without_a_result_has_lost() -> None:
    assert select([*tried(0.3, float("nan")), *tried(0.1, 0.2)]) == {"learning_rate": 0.1}


def test_a_grid_is_all_combinations() -> None:
    assert len(grid_points({"learning_rate": [1, 2, 3], "strength": [1, 2]})) == 6


@pytest.mark.parametrize("method", ["van", "ewc", "a-gem"])
def test_the_record_is_what_a_plain_evaluation_finds(method: str) -> None:
    two = [Run(seed, {"learning_rate": 0.2, "strength": 1.0}) for seed in (0, 1)]
    records = train(ToyStream(), "ev", METHODS[method], two, SETUP)
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS[method], two, SETUP)

    def by_hand(task: int, run: int) -> float:
        test = feed.test(task)
        logits = fleet.forward(test).logits[run]
        own = logits[:, 2 * task : 2 * task + 2].argmax(1) + 2 * task
        return float((own == test.slots[run]).double().mean())

    for r in (0, 1):
        assert records[r].initial.tolist() == [by_hand(j, r) for j in range(4)]
    for k in range(4):
        learner.begin_task(k)
        for r in (0, 1):
            assert records[r].curve[k, 0] == by_hand(k, r)
        for number, batch in enumerate(feed.batches(k), start=1):
            fleet.learn(learner, batch)
            for r in (0, 1):
                assert records[r].curve[k, number] == by_hand(k, r)
        learner.end_task()
        assert np.isnan(records[0].curve[k, number + 1 :]).all()
        for r in (0, 1):
            assert records[r].accuracy[k].tolist() == [by_hand(j, r) for j in range(4)]


def test_accuracy_on_memories_is_recorded_for_past_tasks() -> None:
    (record,) = train(ToyStream(), "ev", METHODS["a-gem"], rows(0.2), SETUP)
    assert record.memory_accuracy is not None
    assert np.isnan(record.memory_accuracy[np.triu_indices(4, k=1)]).all()
    assert np.isfinite(record.memory_accuracy[np.tril_indices(4)]).all()
    # Six examples per task.
    assert ((record.memory_accuracy[np.tril_indices(4)] * 6) % 1 == 0).all()
    assert record.violations is not None
    assert record.violations[0] == 0
    assert len(record.violations) == 4


def test_a_joined_pass_has_one_row_of_accuracies_and_no_learning_curve() -> None:
    (record,) = train(ToyStream(), "ev", METHODS["multi-task"], rows(0.05), SETUP)
    assert record.accuracy.shape == (1, 4)
    assert record.curve.size == 0
    assert record.violations is None
    assert record.accuracy.mean() > 0.65


@pytest.mark.parametrize("union", [False, True])
def test_the_softmax_of_a_joined_pass_is_over_all_slots_or_over_the_tasks_own(union: bool) -> None:
    setup = replace(SETUP, union_softmax=union)
    feed, fleet, _ = assemble(ToyStream(), "ev", METHODS["multi-task"], rows(0.2), setup)
    batch = next(feed.batches(0))
    logits, slots = fleet.forward(batch).logits[0], batch.slots[0]
    rivals = [range(8) if union else range(int(s) // 2 * 2, int(s) // 2 * 2 + 2) for s in slots]
    examples = zip(logits, slots, rivals, strict=True)
    losses = [x[list(r)].logsumexp(0) - x[s] for x, s, r in examples]
    assert torch.allclose(fleet.grad(batch)[1][0], torch.stack(losses).mean(), atol=1e-5)


def test_every_test_example_is_scored_whatever_the_size_of_a_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS["van"], rows(0.2, 0.2), SETUP)
    batch = feed.test(1)
    whole = recording.accuracy(fleet, learner, batch)
    monkeypatch.setitem(recording.EVALUATE_AT_ONCE, "cpu", 7)
    assert torch.equal(recording.accuracy(fleet, learner, batch), whole)
    monkeypatch.setattr(learner, "scores", lambda b: nn.functional.one_hot(b.slots, 8).float())
    assert recording.accuracy(fleet, learner, batch).tolist() == [1.0, 1.0]


def test_rows_of_unequal_length_are_recorded_as_if_alone() -> None:
    stream, all_three = ToyStream(ragged=True), rows(0.2, 0.2, 0.2)
    together = train(stream, "ev", METHODS["a-gem"], all_three, SETUP)
    for row, record in zip(all_three, together, strict=True):
        (alone,) = train(stream, "ev", METHODS["a-gem"], [row], SETUP)
        assert np.array_equal(np.isnan(alone.curve), np.isnan(record.curve))
        # One of twenty test examples may differ.
        assert np.allclose(alone.accuracy, record.accuracy, atol=0.051)
        assert alone.violations is not None
        assert record.violations is not None
        assert np.abs(np.array(alone.violations) - np.array(record.violations)).max() <= 1


def test_the_record_adds_up() -> None:
    """Violations and accuracy on memories are per task; the learning curve has ten batches."""
    stream, two = ToyStream(examples=120), rows(0.5, 0.5)
    stream.pool = replace(stream.pool, training=240)
    setup = replace(SETUP, batch_size=4)
    records = train(stream, "ev", METHODS["a-gem"], two, setup)
    feed, fleet, learner = assemble(stream, "ev", METHODS["a-gem"], two, setup)
    totals = []
    for k in range(4):
        learner.begin_task(k)
        for number, batch in enumerate(feed.batches(k), start=1):
            fleet.learn(learner, batch)
            if number == 10:
                tenth = recording.accuracy(fleet, learner, feed.test(k))
        assert number > 10
        learner.end_task()
        assert learner.violations is not None
        totals.append(learner.violations.tolist())
        assert learner.memory is not None
        contents = learner.memory.contents()
        assert contents is not None
        batch, owner = contents
        right = fleet.competition.correct(fleet.forward(batch).logits, batch.slots)
        for r, record in enumerate(records):
            assert record.curve[k, 10] == tenth[r]
            assert record.memory_accuracy is not None
            of_task = [right[r][owner[r] == j].double().mean() for j in range(k + 1)]
            assert record.memory_accuracy[k, : k + 1].tolist() == [float(a) for a in of_task]
    for r, record in enumerate(records):
        assert record.violations is not None
        assert np.cumsum(record.violations).tolist() == [t[r] for t in totals]
        assert sum(v > 0 for v in record.violations) > 1


def test_padding_is_never_scored() -> None:
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS["van"], rows(0.2, 0.2), SETUP)
    batch = feed.test(0)
    right = fleet.competition.correct(fleet.forward(batch).logits, batch.slots)
    found = recording.accuracy(fleet, learner, replace(batch, sizes=(20, 7)))
    assert found.tolist() == [float(right[0].double().mean()), float(right[1, :7].double().mean())]


def test_seconds_are_a_runs_share_of_training_and_leave_evaluation_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("onepass.recording.time.perf_counter", lambda: now[0])
    step, score = Fleet.learn, Learner.scores

    def learn(self: Fleet, learner: Any, batch: Any) -> None:
        now[0] += 1
        step(self, learner, batch)

    def scores(self: Learner, batch: Any) -> Any:
        now[0] += 1000
        return score(self, batch)

    monkeypatch.setattr(Fleet, "learn", learn)
    monkeypatch.setattr(Learner, "scores", scores)
    records = train(ToyStream(), "ev", METHODS["van"], rows(0.2, 0.2), SETUP)
    assert [r.seconds for r in records] == [4 * 5 / 2, 4 * 5 / 2]


def test_rows_have_their_own_hyperparameters_and_a_method_its_options() -> None:
    stream = ToyStream()
    two = [
        Run(0, {"learning_rate": 0.1, "strength": 0.5}),
        Run(1, {"learning_rate": 0.2, "strength": 100.0}),
    ]
    _, fleet, learner = assemble(stream, "ev", METHODS["ewc"], two, SETUP)
    assert learner.columns["strength"].tolist() == [[0.5], [100.0]]
    assert torch.equal(fleet.learning_rate, torch.tensor([[0.1], [0.2]]))
    setup = replace(SETUP, memory="ring", memory_includes_current_task=True)
    setup = replace(setup, memory_with_replacement=True)
    _, _, learner = assemble(stream, "ev", METHODS["a-gem"], two, setup, Reference(7))
    memory = learner.memory
    assert memory is not None
    assert memory.policy == "ring"
    assert memory.include_current
    assert memory.with_replacement
    assert learner.option.reference_batch == 7  # type: ignore[attr-defined]


def test_state_bytes_count_parameters_importances_and_memory() -> None:
    run = Run(0, {"learning_rate": 0.2, "strength": 1.0})
    bytes_of = {
        name: train(ToyStream(), "ev", METHODS[name], [run], SETUP)[0].state_bytes
        for name in ("van", "pi", "a-gem")
    }
    parameters = 4 * (6 * 8 + 8 + 8 * 8 + 8)
    assert bytes_of["van"] == parameters
    assert parameters * 5 <= bytes_of["pi"] < parameters * 5 + 100
    assert bytes_of["a-gem"] > parameters + 4 * 6 * 6
