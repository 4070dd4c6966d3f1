from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass.engine import gradients
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.feed import Feed
from onepass.learners import METHODS
from onepass.learners.declarations import Workload
from onepass.learners.prognn import Options, ProgNN
from onepass.metrics import metrics
from onepass.models.mlp import mlp
from onepass.models.resnet import ResNet
from onepass.protocol import Run, Setup, train
from onepass.recording import accuracy
from onepass.streams.base import separate_heads
from tests.toys import FEATURES, ToyStream, small_net

fully_connected = partial(mlp, FEATURES, [5], 8)
residual = partial(ResNet, 2, 8, blocks=(1, 1))
Values = dict[str, Tensor]


def made(
    seeds: Sequence[int] = (4, 5), inputs: bool = False, mode: Mode = "looped", ragged: bool = False
) -> tuple[Feed, Fleet, ProgNN]:
    """A learner on a stream of four tasks, before its first step."""
    stream = ToyStream(ragged, examples=40)
    feed = Feed(stream, "ev", seeds, 10)
    fleet = Fleet(
        fully_connected,
        seeds,
        feed.slots,
        [0.3] * len(seeds),
        prepare=stream.pool.prepare,
        gradients=mode,
    )
    return feed, fleet, ProgNN(fleet, {}, Options(inputs), None)


def with_images(
    seeds: Sequence[int] = (4, 5), build: Callable[[], nn.Module] = residual
) -> tuple[Fleet, ProgNN]:
    fleet = Fleet(build, seeds, Slots(separate_heads(4, 2)), [0.05] * len(seeds))
    return fleet, ProgNN(fleet, {}, Options(), None)


def images(task: int, number: int, runs: int = 2, sizes: tuple[int, ...] | None = (6, 5)) -> Batch:
    generator = torch.Generator().manual_seed(10 * task + number)
    slots = torch.randint(2 * task, 2 * task + 2, (runs, 6), generator=generator)
    return Batch(torch.randn(runs, 6, 3, 8, 8, generator=generator), slots, sizes, task=task)


def values_of(fleet: Fleet) -> Values:
    parameters = dict(
        zip(fleet.architecture.names, fleet.architecture.views(fleet.theta), strict=True)
    )
    return {name: value.clone() for name, value in (parameters | fleet.buffers).items()}


def learn(feed: Feed, fleet: Fleet, learner: ProgNN, tasks: Sequence[int], skip: int = 0) -> None:
    for k in tasks:
        if k == learner.grown:  # not begun yet
            learner.begin_task(k)
        for batch in feed.batches(k, skip):
            fleet.learn(learner, batch)
        learner.end_task()
        skip = 0


def assert_only_the_last_column_moved(before: Values, after: Values, last: int) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.startswith(f"columns.{last}."):
            assert (after[name] != value).flatten(1).any(1).all(), f"{name} did not move"
        else:
            assert torch.equal(after[name], value), f"{name} moved"


@pytest.mark.parametrize(("mode", "inputs"), [("looped", True), ("stacked", False)])
def test_a_task_moves_the_parameters_of_its_own_column_alone(mode: Mode, inputs: bool) -> None:
    feed, fleet, learner = made(inputs=inputs, mode=mode)
    ended: Values = {}
    for k in range(3):
        learner.begin_task(k)
        begun = values_of(fleet)
        assert all(torch.equal(begun[name], value) for name, value in ended.items()), (
            "adding a column changes no other"
        )
        assert {name.split(".")[1] for name in begun} == {str(j) for j in range(k + 1)}
        for batch in feed.batches(k):
            fleet.learn(learner, batch)
        ended = values_of(fleet)
        assert_only_the_last_column_moved(begun, ended, k)


@pytest.mark.parametrize("sizes", [None, (6, 5)], ids=["equal", "unequal"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_task_moves_batch_norm_statistics_of_its_own_column_alone(
    sizes: tuple[int, ...] | None, evaluated: bool
) -> None:
    fleet, learner = with_images()
    for k in range(2):
        learner.begin_task(k)
        begun = values_of(fleet)
        for number in range(2):
            if evaluated:
                learner.scores(images(0, 7))
            fleet.learn(learner, images(k, number, sizes=sizes))
        assert_only_the_last_column_moved(begun, values_of(fleet), k)


@pytest.mark.parametrize("shared", [False, True], ids=["a head a task", "shared head"])
def test_nothing_is_ever_forgotten(shared: bool) -> None:
    rows = [Run(seed, {"learning_rate": 0.3}) for seed in (0, 1)]
    stream, setup = ToyStream(shared=shared, examples=60), Setup(hidden=(32,), batch_size=2)
    for record in train(
        stream, "ev", METHODS["prog-nn"], rows, setup, Options(input_laterals=shared)
    ):
        for k in range(4):
            assert record.accuracy[k:, k].tolist() == [record.accuracy[k, k]] * (4 - k)
            assert (
                record.accuracy[:k, k].tolist() == [0] * k == record.initial[1 : k + 1].tolist()
            )  # no answer, no right answer
        learnt = np.diag(record.accuracy)
        assert learnt.min() >= 0.5
        assert learnt.mean() > 0.7
        assert (
            metrics(record).F_T,
            metrics(record).worst_forgetting,
            metrics(record).backward_transfer,
        ) == (0, 0, 0)


@pytest.mark.parametrize("build", ["mlp", "resnet"])
def test_answers_of_a_learnt_task_are_bit_identical_ever_after(build: str) -> None:
    feed, fleet, learner = made()
    test: Callable[[int], Batch] = feed.test
    if build == "resnet":
        fleet, learner = with_images()
        test = partial(images, number=9)
    answers: list[Tensor] = []
    for k in range(3):
        learner.begin_task(k)
        for number, batch in enumerate(feed.batches(k)):
            fleet.learn(learner, batch if build == "mlp" else images(k, number))
        answers.append(learner.scores(test(k)))
        for j, before in enumerate(answers):
            assert torch.equal(learner.scores(test(j)), before)
    assert not torch.allclose(
        answers[1], fleet.forward(test(1)).logits
    )  # column 2 would say something else


def test_looking_at_an_old_column_does_not_change_which_one_learns() -> None:
    feed, fleet, learner = made()
    learn(feed, fleet, learner, range(2))
    batch = next(feed.batches(1))
    g, _ = fleet.grad(batch)
    learner.scores(feed.test(0))
    assert torch.equal(fleet.grad(batch)[0], g)
    with pytest.raises(RuntimeError):
        learner.scores(
            Batch(torch.zeros(2, 3, FEATURES + 1), torch.zeros(2, 3, dtype=torch.int64), task=0)
        )
    assert torch.equal(fleet.grad(batch)[0], g)


def test_tasks_not_learnt_yet_get_no_answer() -> None:
    feed, fleet, learner = made()
    for k in range(4):
        for unknown in range(k, 4):
            test = feed.test(unknown)
            scores = learner.scores(test)
            assert scores.shape == (2, test.x.shape[1], 8)
            assert scores.isnan().all()
            assert accuracy(fleet, learner, test).tolist() == [0, 0]
        learn(feed, fleet, learner, [k])


@pytest.mark.parametrize("mode", ["looped", "stacked"])
@pytest.mark.parametrize("sizes", [None, (6, 5)], ids=["program", "autograd"])
def test_no_gradient_is_computed_for_frozen_columns(
    mode: Mode, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fleet, learner = made(mode=mode)
    asked: list[list[torch.Size]] = []
    trace, autograd = gradients.trace, torch.autograd.grad

    def listen_to_trace(function: Any, arguments: list[Tensor], outputs: list[Tensor]) -> Any:
        asked.append([o.shape[1:] if mode == "stacked" else o.shape for o in outputs])
        return trace(function, arguments, outputs)

    def listen_to_autograd(outputs: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        asked.append([i.shape for i in inputs])
        return autograd(outputs, inputs, *rest, **more)

    monkeypatch.setattr(gradients, "trace", listen_to_trace)
    monkeypatch.setattr(torch.autograd, "grad", listen_to_autograd)
    for k in range(3):
        learner.begin_task(k)
        asked.clear()
        g, _ = fleet.grad(
            Batch(
                torch.rand(2, 6, FEATURES), torch.randint(2 * k, 2 * k + 2, (2, 6)), sizes, task=k
            )
        )
        frozen, own = fleet.architecture.frozen, [5 * FEATURES + 5 + 5 * 8 + 8, 5 * 8 * k]
        assert fleet.trainable == slice(fleet.architecture.size - sum(own), fleet.architecture.size)
        assert fleet.architecture.shapes[frozen:] == [
            (5, FEATURES),
            (5,),
            (8, 5),
            (8,),
            *([(8, 5 * k)] if k else []),
        ]
        assert asked
        assert all(shapes == fleet.architecture.shapes[frozen:] for shapes in asked)
        assert (g[:, : fleet.trainable.start] == 0).all()
        assert (g[:, fleet.trainable] != 0).any(1).all()


def test_new_columns_depend_on_the_seed_and_the_task_and_on_no_other_run() -> None:
    together, alone, first = made(seeds=(4, 5, 6)), made(seeds=(5,)), []
    for k in range(3):
        for feed, fleet, learner in (together, alone):
            torch.rand(3)  # the global random state is nobody's business
            learner.begin_task(k)
            first.extend(values_of(fleet)[f"columns.{k}.bodies.0.weight"])
            learn(feed, fleet, learner, [k])
        assert torch.equal(first[-3], first.pop())
        assert torch.equal(together[1].theta[1], alone[1].theta[0])
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


def work(tasks: int) -> Workload:
    return Workload(tasks, batch_size=10, memory_per_task=1)


@pytest.mark.parametrize("inputs", [False, True])
def test_parameters_grow_with_the_square_of_the_tasks_and_the_estimate_covers_them(
    inputs: bool,
) -> None:
    _, fleet, learner = made(inputs=inputs)
    estimate = [learner.peak_bytes(work(tasks)) for tasks in range(1, 5)]
    own, between = 5 * (FEATURES + 1) + 8 * (5 + 1), 5 * 8 + (FEATURES * 5 if inputs else 0)
    for k in range(4):
        learner.begin_task(k)
        assert fleet.theta.shape == (2, (k + 1) * own + k * (k + 1) // 2 * between)
        assert estimate[k] >= 2 * 4 * fleet.theta.shape[1]  # parameters and a gradient
    fleet, learner = with_images()
    expected = learner.peak_bytes(work(2))
    learner.begin_task(1)
    assert expected >= fleet.state_bytes() > 0


def test_the_estimate_allocates_nothing_and_draws_nothing() -> None:
    _, fleet, learner = made()
    allocated = 0

    class Listen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal allocated
            out = func(*args, **(kwargs or {}))
            allocated += out.nbytes if isinstance(out, Tensor) and out.device.type != "meta" else 0
            return out

    random, theta = torch.get_rng_state(), fleet.theta
    with Listen():
        learner.peak_bytes(work(17))
    assert torch.equal(torch.get_rng_state(), random)
    assert fleet.theta is theta
    assert allocated == 0


def restored(fleet: Fleet, learner: ProgNN, fresh: Fleet, again: ProgNN) -> None:
    """Save and restore in the order of the protocol."""
    tensors = [{name: t.clone() for name, t in part.state().items()} for part in (learner, fleet)]
    again.restore(tensors[0], learner.counters())
    fresh.restore(tensors[1], fleet.counters())
    assert torch.equal(fresh.theta, fleet.theta)


def test_it_resumes_in_the_middle_of_a_task_and_adds_the_same_columns_afterwards() -> None:
    (feed, fleet, learner), (_, fresh, again) = made(ragged=True), made(ragged=True)
    learn(feed, fleet, learner, range(2))
    learner.begin_task(2)
    for batch in list(feed.batches(2))[:2]:
        fleet.learn(learner, batch)
    restored(fleet, learner, fresh, again)
    for k in range(3):
        assert torch.equal(again.scores(feed.test(k)), learner.scores(feed.test(k)))
    for one, its in ((fleet, learner), (fresh, again)):
        learn(feed, one, its, [2], skip=2)
        its.begin_task(3)
    assert torch.equal(fresh.theta, fleet.theta), (
        "the initial values of a column that is added after resuming"
    )
    for one, its in ((fleet, learner), (fresh, again)):
        learn(feed, one, its, [3])
    assert torch.equal(fresh.theta, fleet.theta)


def test_it_resumes_with_batch_norm_whether_or_not_it_was_evaluated_before() -> None:
    (fleet, learner), (fresh, again) = with_images(), with_images()
    for k in range(3):
        learner.begin_task(k)
        learner.scores(images(k, 9))
        fleet.learn(learner, images(k, 0))
    restored(fleet, learner, fresh, again)
    for one, its in ((fleet, learner), (fresh, again)):
        one.learn(its, images(2, 1))
        its.begin_task(3)
        one.learn(its, images(3, 0))
    assert all(
        torch.equal(value, values_of(fleet)[name]) for name, value in values_of(fresh).items()
    )


def test_a_network_that_cannot_be_taken_apart_is_refused_before_anything_is_learnt() -> None:
    with pytest.raises(InputError, match="take apart"):
        with_images(build=small_net)


def test_examples_without_a_task_are_refused() -> None:
    feed, fleet, learner = made()
    learn(feed, fleet, learner, [0])
    with pytest.raises(InputError, match="whose examples"):
        learner.scores(Batch(feed.test(0).x, feed.test(0).slots))
