"""The paper's protocol (its Algorithm 1): choose hyper-parameters on `D^CV`, then learn `D^EV` in a single pass.

Rows of a fleet are runs: grid points × seeds on the cross-validation stream, seeds on the evaluation stream.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.learners import Method
from onepass.learners.base import Learner
from onepass.memory import EpisodicMemory, Policy
from onepass.metrics import Array, Record
from onepass.models.mlp import mlp
from onepass.streams.base import Part, Stream
from onepass.streams.batch import Batch
from onepass.streams.feed import Feed

BETA = 10  # the learning curve is recorded for this many batches of each task
EVALUATE_AT_ONCE = 2_000  # test examples in one forward pass


@dataclass(frozen=True)
class Setup:
    """What all runs of a study share."""

    hidden: tuple[int, ...] = (256, 256)
    batch_size: int = 10
    memory_per_task: int = 250
    memory: Policy = "class-reservoir"
    memory_includes_current_task: bool = False
    memory_with_replacement: bool = False
    union_softmax: bool = True
    gradients: Mode = "auto"


@dataclass(frozen=True)
class Run:
    """One row of a fleet: a seed and the method's hyper-parameters."""

    seed: int
    hyperparameters: Mapping[str, float]


Progress = Callable[[int], None]  # told how many run-steps were done


@dataclass(frozen=True)
class Snapshot:
    """A fleet in the middle of its work: `batches` of task `phase` are learnt. Enough to go on as if nothing had happened."""

    phase: int
    batches: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # what the host counts with: plain JSON


class Keeper(Protocol):
    """Somebody who keeps snapshots. Training goes on in the tensors of a snapshot, so `keep` copies them."""

    def last(self) -> Snapshot | None: ...
    def due(self, batches: int) -> bool: ...  # asked after every batch of a task, and with 0 between tasks
    def keep(self, snapshot: Snapshot) -> None: ...


def grid_points(grid: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """All combinations of a grid, in the order in which they are written.

    >>> grid_points({"learning_rate": [0.1, 0.03], "strength": [1]})
    [{'learning_rate': 0.1, 'strength': 1}, {'learning_rate': 0.03, 'strength': 1}]
    """
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def train(
    stream: Stream,
    part: Part,
    method: Method,
    runs: Sequence[Run],
    setup: Setup,
    options: object | None = None,
    *,
    device: torch.device | str = "cpu",
    evaluate: bool = True,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> list[Record]:
    """Train all runs side by side in one single pass over a part of the stream, and record what happened.

    Evaluation (before the first batch of each task, after each of the first ten, on all tasks and memories at task ends) changes nothing
    of the training: with `evaluate=False` the parameters end bit-identical. A `keeper` is given snapshots at task ends and in between, as
    often as it likes; if it has one already, training goes on from there and ends bit-identical too.
    """
    feed, fleet, learner = assemble(stream, part, method, runs, setup, options, device=device)
    record = _Recorder(fleet, learner, feed, evaluate)
    saved = keeper.last() if keeper is not None else None
    first, skip = (saved.phase, saved.batches) if saved is not None else (0, 0)
    if saved is None:
        record.begin()
    else:
        _restore(saved, fleet, learner, record)
        if progress is not None:
            progress(feed.steps(first, skip))

    def keep_if_due(phase: int, batches: int) -> None:
        if keeper is not None and keeper.due(batches):
            with record.clock.paused():
                keeper.keep(_snapshot(phase, batches, fleet, learner, record))

    for phase in range(first, feed.phases):
        if skip == 0:
            learner.begin_task(phase)
        record.begin_task(phase, skip)
        record.clock.start()
        for number, batch in enumerate(feed.batches(phase, skip), start=skip + 1):
            fleet.learn(learner, batch)
            if number <= BETA:
                with record.clock.paused():
                    record.after_batch(number, batch)
            if progress is not None:
                progress(sum(n > 0 for n in batch.sizes) if batch.sizes is not None else fleet.runs)
            keep_if_due(phase, number)
        if learner.needs_review:
            learner.review(feed.batches(phase))
        learner.end_task()
        record.clock.stop()
        record.end_task()
        skip = 0
        if all(record.diverged):
            break
        if phase + 1 < feed.phases:
            keep_if_due(phase + 1, 0)
    return record.records(runs)


def _snapshot(phase: int, batches: int, fleet: Fleet, learner: Learner, record: _Recorder) -> Snapshot:
    memory = learner.memory
    parts = {"fleet": fleet.state(), "learner": learner.state(), "memory": memory.state() if memory else {}, "record": record.state()}
    tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
    numbers = {"fleet": fleet.counters(), "learner": learner.counters(), "record": record.counters(), "task": memory.task if memory else None}
    return Snapshot(phase, batches, tensors, numbers)


def _restore(saved: Snapshot, fleet: Fleet, learner: Learner, record: _Recorder) -> None:
    def part(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}."): tensor for key, tensor in saved.tensors.items() if key.startswith(f"{name}.")}

    learner.restore(part("learner"), saved.numbers["learner"])  # first, since a learner may have to rebuild the fleet's architecture
    fleet.restore(part("fleet"), saved.numbers["fleet"])
    if learner.memory is not None:
        learner.memory.restore(part("memory"), saved.numbers["task"])
    record.restore(part("record"), saved.numbers["record"])


def assemble(
    stream: Stream,
    part: Part,
    method: Method,
    runs: Sequence[Run],
    setup: Setup,
    options: object | None = None,
    *,
    device: torch.device | str = "cpu",
) -> tuple[Feed, Fleet, Learner]:
    """The feed, fleet and learner of some runs, before their first step."""
    seeds = [run.seed for run in runs]
    feed = Feed(stream, part, seeds, setup.batch_size, device=device, joined=method.joined, union_softmax=setup.union_softmax)
    inputs, outputs = stream.pool.x.shape[1], feed.slots.count
    fleet = Fleet(
        lambda: mlp(inputs, setup.hidden, outputs),
        seeds,
        feed.slots,
        [run.hyperparameters["learning_rate"] for run in runs],
        device=device,
        prepare=stream.pool.prepare,
        gradients=setup.gradients,
    )
    columns = {name: torch.tensor([[run.hyperparameters[name]] for run in runs], device=fleet.device) for name in method.learner.hyperparameters}
    memory = None
    if method.learner.needs_memory:
        memory = EpisodicMemory(
            fleet,
            feed.tasks,
            setup.memory_per_task,
            policy=setup.memory,
            include_current=setup.memory_includes_current_task,
            with_replacement=setup.memory_with_replacement,
        )
    return feed, fleet, method.learner(fleet, columns, options or method.learner.options(), memory)


def accuracy(fleet: Fleet, learner: Learner, batch: Batch) -> Tensor:
    """Share of right answers of each run on its own examples, `[R]` in float64; NaN for a run without examples."""
    total = batch.x.shape[1]
    right = torch.zeros(fleet.runs, dtype=torch.int64, device=fleet.device)
    counts = torch.tensor(batch.sizes or [total] * fleet.runs, device=fleet.device)
    for start in range(0, total, EVALUATE_AT_ONCE):
        piece = batch.piece(start, start + EVALUATE_AT_ONCE)
        correct = fleet.competition.correct(learner.scores(piece), piece.slots)
        counted = torch.arange(start, start + correct.shape[1], device=fleet.device) < counts[:, None]
        right += (correct & counted).sum(1)
    return right.double() / counts


class _Clock:
    """Seconds of training: evaluation happens while it stands still."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0
        self._since: float | None = None  # None: it stands still

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        self._since = self._now()

    def stop(self) -> None:
        if self._since is not None:
            self.seconds += self._now() - self._since
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        running = self._since is not None
        self.stop()
        yield
        if running:
            self.start()


class _Recorder:
    """Collects the raw record of all runs."""

    def __init__(self, fleet: Fleet, learner: Learner, feed: Feed, evaluate: bool) -> None:
        self.fleet, self.learner, self.feed, self.evaluate = fleet, learner, feed, evaluate
        runs, tasks, phases = fleet.runs, feed.tasks, feed.phases
        self.clock = _Clock(fleet.device)
        self._has_curve = learner.has_curve and not feed.joined
        self.diverged = [False] * runs
        self._accuracy = np.full((runs, phases, tasks), np.nan)
        self._curve = np.full((runs, tasks if self._has_curve else 0, BETA + 1), np.nan)
        self._memory = np.full((runs, tasks, tasks), np.nan)
        self._violations: list[list[int]] = [[] for _ in range(runs)]
        self._state_bytes: list[int] = []  # a run, at the end of each task
        self._initial = np.full((runs, tasks), np.nan)

    def begin(self) -> None:
        self._initial = self._on_all_tasks()

    def state(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, f"_{name}")) for name in ("accuracy", "curve", "memory", "initial")}

    def counters(self) -> dict[str, Any]:
        return {"violations": self._violations, "diverged": self.diverged, "seconds": self.clock.seconds, "state_bytes": self._state_bytes}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        for name, tensor in state.items():
            setattr(self, f"_{name}", tensor.numpy())
        self._violations, self.diverged, self.clock.seconds = counters["violations"], counters["diverged"], counters["seconds"]
        self._state_bytes = counters["state_bytes"]

    def _on_all_tasks(self) -> Array:
        if not self.evaluate:
            return np.full((self.fleet.runs, self.feed.tasks), np.nan)
        return np.stack([self._on(self.feed.test(task)) for task in range(self.feed.tasks)], axis=1)

    def _on(self, batch: Batch) -> Array:
        return np.asarray(accuracy(self.fleet, self.learner, batch).cpu().numpy(), dtype=np.float64)

    def begin_task(self, phase: int, batches: int = 0) -> None:
        """Task `phase` begins, or goes on after some batches."""
        self._phase = phase
        if self.evaluate and self._has_curve:
            self._test = self.feed.test(phase)
            if batches == 0:
                self._curve[:, phase, 0] = self._on(self._test)

    def after_batch(self, number: int, batch: Batch) -> None:
        if self.evaluate and self._has_curve:
            took_part = np.array([n > 0 for n in batch.sizes]) if batch.sizes is not None else True
            self._curve[:, self._phase, number] = np.where(took_part, self._on(self._test), np.nan)

    def end_task(self) -> None:
        self.diverged = self.fleet.diverged()
        self._state_bytes.append(self.fleet.state_bytes() + self.learner.state_bytes())
        self._accuracy[:, self._phase] = self._on_all_tasks()
        if self.learner.violations is not None:
            for row, total in zip(self._violations, self.learner.violations.tolist(), strict=True):
                row.append(int(total) - sum(row))
        contents = self.learner.memory.contents() if self.learner.memory is not None and self.evaluate else None
        if contents is not None:
            batch, owner = contents
            for task in range(self._phase + 1):
                self._memory[:, self._phase, task] = self._on_memory(batch, owner == task)

    def _on_memory(self, batch: Batch, chosen: Tensor) -> Array:
        correct = self.fleet.competition.correct(self.learner.scores(batch), batch.slots)
        return np.asarray(((correct & chosen).sum(1).double() / chosen.sum(1)).cpu().numpy(), dtype=np.float64)

    def records(self, runs: Sequence[Run]) -> list[Record]:
        return [
            Record(
                seed=run.seed,
                hyperparameters=dict(run.hyperparameters),
                accuracy=self._accuracy[r],
                initial=self._initial[r],
                curve=self._curve[r],
                memory_accuracy=None if self.learner.memory is None else self._memory[r],
                violations=None if self.learner.violations is None else self._violations[r],
                seconds=self.clock.seconds / self.fleet.runs,
                state_bytes=self._state_bytes[-1],
                diverged=self.diverged[r],
                state_by_task=list(self._state_bytes),
            )
            for r, run in enumerate(runs)
        ]
