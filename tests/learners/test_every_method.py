"""The check kit: properties that every method must have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.errors import InputError
from onepass.feed import Feed
from onepass.learners import METHODS
from onepass.learners.base import Learner
from onepass.metrics import Record
from onepass.protocol import Run, Setup, assemble, train
from onepass.streams import STREAMS
from onepass.streams.base import Stream
from tests.toys import ToyStream

SETUP = Setup(hidden=(12, 12), memory_per_task=6)


def digits(name: str) -> Stream:
    options = STREAMS[name].options(train_examples=60, test_examples=20)
    return STREAMS[name].make(options, None)


STREAM = {
    "permuted-digits": digits("permuted-digits"),
    "split-digits": digits("split-digits"),
    "ragged": ToyStream(ragged=True),
}
every_method = pytest.mark.parametrize("method", METHODS)
SHARED = {"permuted-digits"}
everywhere = pytest.mark.parametrize(  # every method on every stream that makes sense for it
    ("method", "stream"),
    [
        (m, s)
        for m in METHODS
        for s in STREAM
        if not (METHODS[m].learner.needs.own_classes and s in SHARED)
    ],
)
every_size = pytest.mark.parametrize("size", [1, 3])


def runs(method: str, seeds: list[int], rate: float = 0.1) -> list[Run]:
    return [
        Run(seed, dict.fromkeys(METHODS[method].hyperparameters, 0.5) | {"learning_rate": rate})
        for seed in seeds
    ]


def finish(
    method: str, stream: str, rows: list[Run], setup: Setup = SETUP
) -> tuple[Fleet, Learner]:
    """The fleet after training without any evaluation."""
    feed, fleet, learner = assemble(STREAM[stream], "cv", METHODS[method], rows, setup)
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            fleet.learn(learner, batch)
        if learner.needs.second_pass:
            learner.review(feed.batches(phase))
        learner.end_task()
    return fleet, learner


@everywhere
@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_fleet_row_equals_the_same_run_alone(method: str, stream: str, mode: Mode) -> None:
    alone = trained(method, stream, 1)[1]
    together = (
        trained(method, stream, 3)[1]
        if mode == "stacked"
        else finish(method, stream, runs(method, [1, 2, 3]), replace(SETUP, gradients=mode))[0]
    )
    assert together.gradients.stacked == (mode == "stacked")
    assert together.step[0] == alone.step[0]
    assert torch.allclose(together.theta[0], alone.theta[0], atol=2e-4)


@cache
def trained(method: str, stream: str, size: int) -> tuple[list[Record], Fleet, Learner, list[int]]:
    """Trained and evaluated under the protocol.

    The records, what is left, and the passes over the data.
    """
    kept: list[tuple[Feed, Fleet, Learner]] = []
    passes: list[int] = []
    stretches = Feed.stretches

    def keep(*arguments: Any, **more: Any) -> tuple[Feed, Fleet, Learner]:
        kept.append(assemble(*arguments, **more))
        return kept[-1]

    def counted(feed: Feed, phase: int, *arguments: Any) -> Iterator[tuple[Batch, int]]:
        passes.append(phase)
        return stretches(feed, phase, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.protocol.assemble", keep)
        patch.setattr(Feed, "stretches", counted)
        records = train(
            STREAM[stream], "cv", METHODS[method], runs(method, list(range(1, size + 1))), SETUP
        )
    return records, kept[0][1], kept[0][2], passes


@everywhere
@every_size
def test_evaluation_changes_nothing_and_results_repeat(method: str, stream: str, size: int) -> None:
    """With and without evaluation, parameters, learner state and memory end bit-identical."""
    random = torch.get_rng_state()
    _, fleet, learner, _ = trained(method, stream, size)
    assert torch.equal(random, torch.get_rng_state())
    other, its = finish(method, stream, runs(method, list(range(1, size + 1))))
    assert torch.equal(fleet.theta, other.theta)
    assert torch.equal(fleet.step, other.step)
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, its.state()[name])
    for name, tensor in (learner.memory.state() if learner.memory else {}).items():
        assert torch.equal(tensor, its.memory.state()[name])  # type: ignore[union-attr]


@everywhere
@every_size
def test_parameters_are_finite_and_no_two_seeds_end_the_same(
    method: str, stream: str, size: int
) -> None:
    _, fleet, _, _ = trained(method, stream, size)
    assert fleet.theta.isfinite().all()
    assert len(fleet.theta.unique(dim=0)) == size


@everywhere
@every_size
def test_every_example_is_shown_once_and_a_second_look_is_declared(
    method: str, stream: str, size: int
) -> None:
    *_, passes = trained(method, stream, size)
    looks = 1 + METHODS[method].learner.needs_with(METHODS[method].learner.options()).second_pass
    assert passes == [phase for phase in range(max(passes) + 1) for _ in range(looks)]


@everywhere
def test_a_row_alone_is_evaluated_like_a_row_of_a_fleet(method: str, stream: str) -> None:
    (alone,), (first, *_) = trained(method, stream, 1)[0], trained(method, stream, 3)[0]
    assert np.allclose(
        alone.accuracy, first.accuracy, atol=0.051
    )  # an example or two of 20 or more may tip over by rounding


@everywhere
def test_a_row_with_a_learning_rate_of_a_million_diverges_alone_and_is_reported(
    method: str, stream: str
) -> None:
    wild = [*runs(method, [1]), *runs(method, [2], rate=1e6), *runs(method, [3])]
    records = train(STREAM[stream], "cv", METHODS[method], wild, SETUP)
    assert [r.diverged for r in records] == [False, True, False]
    calm = trained(method, stream, 3)[0]
    for r in (0, 2):
        assert np.array_equal(records[r].accuracy, calm[r].accuracy)
        assert records[r].violations == calm[r].violations


@every_method
def test_state_is_plain_tensors_of_the_fleets_rows(method: str) -> None:
    _, learner = finish(method, "split-digits", runs(method, [1, 2]))
    for tensor in [
        *learner.state().values(),
        *(learner.memory.state().values() if learner.memory else ()),
    ]:
        assert type(tensor) is torch.Tensor
        assert tensor.shape[0] == 2
        assert not tensor.requires_grad


@pytest.mark.parametrize(
    "method", [name for name, found in METHODS.items() if found.learner.needs.memory]
)
def test_without_a_past_a_method_with_a_memory_is_plain_sgd(method: str) -> None:
    feed, fleet, learner = assemble(
        STREAM["split-digits"], "cv", METHODS[method], runs(method, [1, 2]), SETUP
    )
    _, plain, van = assemble(
        STREAM["split-digits"], "cv", METHODS["van"], runs("van", [1, 2]), SETUP
    )
    for task in range(2):
        learner.begin_task(task)
        for batch in feed.batches(task):
            fleet.learn(learner, batch)
            plain.learn(van, batch)
        learner.end_task()
        assert torch.equal(fleet.theta, plain.theta) == (task == 0)


@every_method
def test_a_method_learns(method: str) -> None:
    whole = STREAMS["split-digits"].make(STREAMS["split-digits"].options(), None)
    gentle = {"strength": 0.01, "margin": 0.0, "sensitivity": 0.01, "distillation": 1.0}
    (run,) = runs(method, [1], rate=0.3)
    chosen = {name: gentle.get(name, value) for name, value in run.hyperparameters.items()}
    (record,) = train(
        whole,
        "cv",
        METHODS[method],
        [replace(run, hyperparameters=chosen)],
        replace(SETUP, hidden=(32, 32)),
    )
    assert record.accuracy[-1, -1] > 0.85  # chance is a half
    assert record.accuracy[-1].mean() > 0.75


@pytest.mark.parametrize(
    "method", [name for name, found in METHODS.items() if found.learner.needs.own_classes]
)
def test_a_method_that_needs_classes_of_its_own_says_so_on_other_streams(method: str) -> None:
    with pytest.raises(InputError, match="classes of their own"):
        assemble(STREAM["permuted-digits"], "cv", METHODS[method], runs(method, [1]), SETUP)


@every_method
def test_a_step_asks_the_device_no_question(method: str) -> None:
    """No `.item()`, no branch on a tensor."""
    feed, fleet, learner = assemble(
        STREAM["split-digits"], "cv", METHODS[method], runs(method, [1, 2]), SETUP
    )
    asked: list[str] = []
    quiet = 0

    class Listen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.nonzero.default,
                torch.ops.aten.is_nonzero.default,
            ):
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
                fleet.learn(
                    learner, batch
                )  # the first steps of a shape may ask: they build and check programs
        if learner.needs.second_pass:
            learner.review(feed.batches(phase))
        learner.end_task()
    assert asked == []
    assert quiet > 5
