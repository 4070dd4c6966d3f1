"""The check kit: properties that every method must have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onepass.engine.fleet import Fleet
from onepass.learners import METHODS
from onepass.learners.base import Learner
from onepass.protocol import Run, Setup, assemble, train
from onepass.streams import STREAMS
from onepass.streams.base import Stream
from toys import ToyStream

SETUP = Setup(hidden=(12, 12), memory_per_task=6)


def digits(name: str) -> Stream:
    options = STREAMS[name].options(train_examples=66, test_examples=20)
    return STREAMS[name].make(options, None)


STREAM = {"permuted-digits": digits("permuted-digits"), "split-digits": digits("split-digits"), "ragged": ToyStream(ragged=True)}
every_method = pytest.mark.parametrize("method", METHODS)
every_stream = pytest.mark.parametrize("stream", STREAM)


def runs(method: str, seeds: list[int], rate: float = 0.1) -> list[Run]:
    return [Run(seed, dict.fromkeys(METHODS[method].hyperparameters, 1.0) | {"learning_rate": rate}) for seed in seeds]


def finish(method: str, stream: str, rows: list[Run], setup: Setup = SETUP) -> tuple[Fleet, Learner]:
    """The fleet after training without any evaluation."""
    feed, fleet, learner = assemble(STREAM[stream], "cv", METHODS[method], rows, setup)
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            fleet.learn(learner, batch)
        learner.end_task()
    return fleet, learner


@every_method
@every_stream
@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_fleet_row_equals_the_same_run_alone(method: str, stream: str, mode: str) -> None:
    from dataclasses import replace

    together, _ = finish(method, stream, runs(method, [1, 2, 3]), replace(SETUP, gradients=mode))
    alone, _ = finish(method, stream, runs(method, [2]), replace(SETUP, gradients="looped"))
    assert together.step[1] == alone.step[0]
    assert torch.allclose(together.theta[1], alone.theta[0], atol=2e-4)


@every_method
def test_the_same_seed_gives_the_same_result_and_another_seed_another(method: str) -> None:
    first, again = (finish(method, "split-digits", runs(method, [1, 2]))[0].theta for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


@every_method
@every_stream
def test_evaluation_changes_nothing(method: str, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without evaluation, parameters, learner state and memory end bit-identical."""
    ended = []

    def keep(*arguments: object, **more: object) -> object:
        made = assemble(*arguments, **more)  # type: ignore[arg-type]
        ended.append(made)
        return made

    monkeypatch.setattr("onepass.protocol.assemble", keep)
    random = torch.get_rng_state()
    for evaluate in (True, False):
        train(STREAM[stream], "cv", METHODS[method], runs(method, [1, 2]), SETUP, evaluate=evaluate)
    assert torch.equal(random, torch.get_rng_state())
    (_, fleet, learner), (_, other, its) = ended
    assert torch.equal(fleet.theta, other.theta)
    assert torch.equal(fleet.step, other.step)
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, its.state()[name])
    for name, tensor in (learner.memory.state() if learner.memory else {}).items():
        assert torch.equal(tensor, its.memory.state()[name])


@every_method
def test_a_row_with_a_learning_rate_of_a_million_diverges_alone_and_is_reported(method: str) -> None:
    wild = [*runs(method, [1]), *runs(method, [2], rate=1e6), *runs(method, [3])]
    records = train(STREAM["permuted-digits"], "cv", METHODS[method], wild, SETUP)
    assert [r.diverged for r in records] == [False, True, False]
    calm = train(STREAM["permuted-digits"], "cv", METHODS[method], runs(method, [1, 2, 3]), SETUP)
    for r in (0, 2):
        assert np.array_equal(records[r].accuracy, calm[r].accuracy)
        assert records[r].violations == calm[r].violations


@every_method
def test_state_is_plain_tensors_of_the_fleets_rows(method: str) -> None:
    _, learner = finish(method, "split-digits", runs(method, [1, 2]))
    for tensor in [*learner.state().values(), *(learner.memory.state().values() if learner.memory else ())]:
        assert type(tensor) is torch.Tensor
        assert tensor.shape[0] == 2
        assert not tensor.requires_grad


@every_method
def test_a_step_asks_the_device_no_question(method: str) -> None:
    """No `.item()`, no branch on a tensor."""
    feed, fleet, learner = assemble(STREAM["split-digits"], "cv", METHODS[method], runs(method, [1, 2]), SETUP)
    asked: list[str] = []
    quiet = 0

    class Listen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default):
                asked.append(str(func))
            return func(*args, **(kwargs or {}))

    for phase in range(feed.phases):
        learner.begin_task(phase)
        for number, batch in enumerate(feed.batches(phase)):
            if batch.x.shape[1] == SETUP.batch_size and number > 3:
                with Listen():
                    fleet.learn(learner, batch)
                    quiet += 1
            else:
                fleet.learn(learner, batch)  # the first steps of a shape may ask: they build and check programs
        learner.end_task()
    assert asked == []
    assert quiet > 5
