"""What is recorded of a run: accuracies, learning curves, violations, seconds, bytes.

Recording changes nothing of the training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.feed import Feed
from onepass.learners.base import Learner
from onepass.metrics import Array, Record

BETA = 10  # the learning curve is recorded for this many batches of each task
# In one forward pass: test examples of a run, or on a GPU the numbers in those of all runs.
EVALUATE_AT_ONCE = {"cpu": 2_000, "cuda": 2**28}


def at_once(fleet: Fleet, batch: Batch) -> int:
    """How many examples of each run go through the network in one pass."""
    most = EVALUATE_AT_ONCE[fleet.device.type]
    return most if fleet.device.type == "cpu" else max(1, most // batch.x[:, 0].numel())


def right_predictions(fleet: Fleet, learner: Learner, batch: Batch) -> Tensor:
    """Which examples are predicted right, `[R, n]`; the host does not wait for the device."""
    width = at_once(fleet, batch)
    right = []
    for start in range(0, batch.x.shape[1], width):
        piece = batch.piece(start, start + width)
        right.append(fleet.competition.correct(learner.scores(piece), piece.slots))
    return torch.cat(right, 1)


def accuracy(fleet: Fleet, learner: Learner, batch: Batch) -> Tensor:
    """Share of right predictions of each run, `[R]` in float64; NaN for a run without examples."""
    return share(right_predictions(fleet, learner, batch), batch.sizes)


def share(right: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """The share of true entries among the first `sizes[r]` of each row."""
    if sizes is None:
        return right.sum(1).double() / right.shape[1]
    counts = torch.tensor(sizes, device=right.device)
    real = torch.arange(right.shape[1], device=right.device) < counts[:, None]
    return (right & real).sum(1).double() / counts


class Clock:
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


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.cpu().numpy(), dtype=np.float64)


def _check_counters(counters: Mapping[str, Any], runs: int) -> None:
    violations, diverged = counters["violations"], counters["diverged"]
    whole = [count for row in [*violations, counters["state_bytes"]] for count in row]
    counted = all(type(count) is int and count >= 0 for count in whole)
    if len(violations) != runs or len(diverged) != runs or not counted:
        raise ValueError("what was counted is not of these runs")
    seconds = counters["seconds"]
    possible = type(seconds) is float and 0 <= seconds < float("inf")
    if not possible or any(type(one) is not bool for one in diverged):
        raise ValueError("what was measured is not of these runs")


class Recorder:
    """Collects the raw record of all runs."""

    def __init__(self, fleet: Fleet, learner: Learner, feed: Feed, evaluate: bool) -> None:
        self.fleet, self.learner, self.feed, self.evaluate = fleet, learner, feed, evaluate
        runs, tasks, phases = fleet.runs, feed.tasks, feed.phases
        self.clock = Clock(fleet.device)
        self._has_curve = not (learner.needs.ended_task or feed.joined)
        self.diverged = [False] * runs
        self._accuracy = np.full((runs, phases, tasks), np.nan)
        self._curve = np.full((runs, tasks if self._has_curve else 0, BETA + 1), np.nan)
        self._memory = np.full((runs, tasks, tasks), np.nan)
        self._violations: list[list[int]] = [[] for _ in range(runs)]
        self._state_bytes: list[int] = []  # per run, at the end of each task
        self._initial = np.full((runs, tasks), np.nan)

    def begin(self) -> None:
        self._initial = self._on_all_tasks()

    def state(self) -> dict[str, Tensor]:
        names = ("accuracy", "curve", "memory", "initial")
        return {name: torch.from_numpy(getattr(self, f"_{name}")) for name in names}

    def counters(self) -> dict[str, Any]:
        return {
            "violations": self._violations,
            "diverged": self.diverged,
            "seconds": self.clock.seconds,
            "state_bytes": self._state_bytes,
        }

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        for name, fresh in self.state().items():
            if state[name].shape != fresh.shape or state[name].dtype != fresh.dtype:
                shapes = f"{tuple(state[name].shape)}, not {tuple(fresh.shape)}"
                raise ValueError(f"the record's {name} has the shape {shapes}")
            setattr(self, f"_{name}", state[name].numpy())
        _check_counters(counters, self.fleet.runs)
        self._violations = counters["violations"]
        self._state_bytes = counters["state_bytes"]
        self.diverged = counters["diverged"]
        self.clock.seconds = counters["seconds"]

    def _on_all_tasks(self) -> Array:
        if not self.evaluate:
            return np.full((self.fleet.runs, self.feed.tasks), np.nan)
        found: list[Tensor] = []
        for tests in self._tests():
            together = tests[0]
            if len(tests) > 1:
                x, slots = (
                    torch.cat([t.x for t in tests], 1),
                    torch.cat([t.slots for t in tests], 1),
                )
                together = Batch(x, slots)
            right = right_predictions(self.fleet, self.learner, together)
            parts = right.split_with_sizes([t.x.shape[1] for t in tests], 1)
            found += [share(own, test.sizes) for own, test in zip(parts, tests, strict=True)]
        return _array(torch.stack(found, 1))

    def _tests(self) -> Iterator[list[Batch]]:
        """The test examples of all tasks: on a GPU as many tasks at once as one pass takes."""
        group: list[Batch] = []
        for task in range(self.feed.tasks):
            test = self.feed.test(task)
            alone = self.fleet.device.type == "cpu" or self.learner.needs.task_to_predict
            together = sum(t.x.shape[1] for t in [*group, test])
            if group and (alone or together > at_once(self.fleet, test)):
                yield group
                group = []
            group.append(test)
        yield group

    def _on(self, batch: Batch) -> Array:
        return _array(accuracy(self.fleet, self.learner, batch))

    def begin_task(self, phase: int, batches: int = 0) -> None:
        """Record what comes before task `phase`, or before it goes on after some batches."""
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
        memory = self.learner.memory
        if memory is None or not self.evaluate:
            return
        # On a GPU a new shape costs more than empty places do.
        contents = memory.contents(room=self.fleet.device.type == "cuda")
        if contents is not None:
            batch, owner = contents
            right = right_predictions(self.fleet, self.learner, batch)
            of = [owner == task for task in range(self._phase + 1)]
            shares = [(right & own).sum(1).double() / own.sum(1) for own in of]
            self._memory[:, self._phase, : self._phase + 1] = _array(torch.stack(shares, 1))

    def records(self, runs: Sequence[tuple[int, Mapping[str, float]]]) -> list[Record]:
        """What was recorded of runs with these seeds and hyper-parameters."""
        return [
            Record(
                seed=seed,
                hyperparameters=dict(hyperparameters),
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
            for r, (seed, hyperparameters) in enumerate(runs)
        ]
