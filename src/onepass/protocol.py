"""The paper's protocol (its Algorithm 1): choose hyper-parameters on `D^CV`, learn `D^EV` once.

Rows of a fleet are runs: grid points × seeds on the cross-validation stream, seeds on the
evaluation stream.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.precision import products
from onepass.engine.step_graphs import StepGraphs
from onepass.errors import first_line, is_out_of_memory
from onepass.feed import Feed
from onepass.learners import Method
from onepass.learners.base import Learner
from onepass.memory import FleetMemory, Policy
from onepass.metrics import Record
from onepass.models import Network
from onepass.recording import BETA, Recorder
from onepass.settings import setting
from onepass.streams.base import Part, Stream

log = logging.getLogger(__name__)

TRIED = 10  # ways of computing a convolution on a GPU


@dataclass(frozen=True)
class Setup(Network):
    """The settings that all runs of a study share: those of their network, and these."""

    batch_size: int = 10
    memory_per_task: int = setting(250, scope="memory")
    memory: Policy = setting("class-reservoir", scope="memory")
    memory_includes_current_task: bool = setting(False, scope="memory")
    memory_with_replacement: bool = setting(False, scope="memory")
    union_softmax: bool = setting(True, scope="joined pass")
    gradients: Mode = setting("auto", scope="computation")
    tf32: bool = setting(True, later=True)  # on a GPU, multiply in TF32


@dataclass(frozen=True)
class Run:
    """One row of a fleet: a seed and the method's hyper-parameters."""

    seed: int
    hyperparameters: Mapping[str, float]


Progress = Callable[[int], None]  # told how many run-steps were done


@dataclass(frozen=True)
class Snapshot:
    """A fleet in the middle of its work, after `batches` of `phase`: all that resuming needs."""

    phase: int
    batches: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # what the host counts with: plain JSON


class Keeper(Protocol):
    """A place for snapshots."""

    def last(self) -> Snapshot | None:
        """The snapshot to go on from."""

    def due(self, batches: int, since: int) -> bool:
        """Whether to keep one after batches `since + 1` to `batches`; (0, 0) is between tasks."""

    def keep(self, snapshot: Snapshot) -> None:
        """Copy a snapshot: training goes on in its tensors."""


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
    """Train all runs side by side in a single pass over a part of the stream; return their records.

    Evaluation (before the first batch of each task, after each of the first ten, on all tasks and
    memories at task ends) changes nothing of the training: with `evaluate=False` the parameters end
    bit-identical. A `keeper` is given snapshots at task ends and in between, as often as it likes.
    If it has one already, training goes on from there and ends bit-identical too.
    """
    on_gpu = torch.device(device).type == "cuda"
    with (
        torch.cuda.device(device) if on_gpu else nullcontext(),
        products(torch.device(device), tf32=setup.tf32, tried=TRIED),
    ):
        anew = partial(assemble, stream, part, method, runs, setup, options, device=device)
        feed, fleet, learner = anew()
        record = Recorder(fleet, learner, feed, evaluate)
        saved = keeper.last() if keeper is not None else None
        if saved is not None and not _restored(saved, feed, fleet, learner, record):
            saved = None
            feed, fleet, learner = anew()
            record = Recorder(fleet, learner, feed, evaluate)
        learn, review = StepGraphs(fleet, learner), StepGraphs(fleet, learner, review=True)
        first, skip = (saved.phase, saved.batches) if saved is not None else (0, 0)
        if saved is None:
            record.begin()
        elif progress is not None:
            progress(feed.steps(first, skip))

        def at_once(done: int, left: int) -> int:
            return learn.stretch(left) if done >= BETA else 1

        def keep_if_due(phase: int, batches: int, since: int) -> None:
            if keeper is not None and keeper.due(batches, since):
                with record.clock.paused():
                    keeper.keep(_snapshot(phase, batches, fleet, learner, record))

        for phase in range(first, feed.phases):
            if skip == 0:
                learner.begin_task(phase)
            record.begin_task(phase, skip)
            record.clock.start()
            number = skip
            for batches, steps in feed.stretches(phase, skip, at_once):
                learn(batches, steps)
                number += steps
                if number <= BETA:
                    with record.clock.paused():
                        record.after_batch(number, batches)
                if progress is not None:
                    active = fleet.runs
                    if batches.sizes is not None:
                        active = sum(n > 0 for n in batches.sizes)
                    progress(steps * active)
                keep_if_due(phase, number, number - steps)
            if learner.needs.second_pass:
                learner.begin_review()
                whole = feed.stretches(phase, 0, lambda _, left: review.stretch(left))
                for batches, steps in whole:
                    review(batches, steps)
                learner.end_review()
            learner.end_task()
            record.clock.stop()
            record.end_task()
            skip = 0
            if all(record.diverged):
                break
            if phase + 1 < feed.phases:
                keep_if_due(phase + 1, 0, 0)
        return record.records([(run.seed, run.hyperparameters) for run in runs])


def _snapshot(
    phase: int, batches: int, fleet: Fleet, learner: Learner, record: Recorder
) -> Snapshot:
    memory = learner.memory
    parts = {
        "fleet": fleet.state(),
        "learner": learner.state(),
        "memory": memory.state() if memory else {},
        "record": record.state(),
    }
    tensors = {f"{part}.{name}": t for part, state in parts.items() for name, t in state.items()}
    numbers = {
        "fleet": fleet.counters(),
        "learner": learner.counters(),
        "record": record.counters(),
        "task": memory.task if memory else None,
    }
    return Snapshot(phase, batches, tensors, numbers)


def _restored(
    saved: Snapshot, feed: Feed, fleet: Fleet, learner: Learner, record: Recorder
) -> bool:
    """Go on from a snapshot if it fits; with the right name and hash it may still hold anything."""
    try:
        if not 0 <= saved.phase < feed.phases:
            raise ValueError("the stream has no such place")
        if not 0 <= saved.batches <= -(-max(feed.lengths(saved.phase)) // feed.batch_size):
            raise ValueError("the stream has no such place")
        counted = [count for part in ("fleet", "learner") for count in saved.numbers[part].values()]
        possible = all(type(count) is int and 0 <= count < 2**31 for count in counted)
        # Tensors that are empty before the first task grow with the tasks.
        own = {f"learner.{name}": t for name, t in learner.state().items() if t.numel()}
        if not possible or not _shapes(own).items() <= _shapes(saved.tensors).items():
            raise ValueError("its method has other tensors or numbers")
        _restore(saved, fleet, learner, record)
        now = _snapshot(saved.phase, saved.batches, fleet, learner, record)
        if _shapes(now.tensors) != _shapes(saved.tensors) or now.numbers != saved.numbers:
            raise ValueError("it has other tensors or numbers than these runs")
    except Exception as reason:
        if is_out_of_memory(reason):
            raise
        log.warning(
            "a checkpoint is not used, and its runs begin anew: it does not fit them (%s)",
            first_line(reason),
        )
        return False
    return True


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _restore(saved: Snapshot, fleet: Fleet, learner: Learner, record: Recorder) -> None:
    def part(name: str) -> dict[str, Tensor]:
        prefix = f"{name}."
        found = {key: t for key, t in saved.tensors.items() if key.startswith(prefix)}
        return {key.removeprefix(prefix): tensor for key, tensor in found.items()}

    # The learner comes first, since it may have to rebuild the fleet's architecture.
    learner.restore(part("learner"), saved.numbers["learner"])
    fleet.restore(part("fleet"), saved.numbers["fleet"])
    if learner.memory is not None:
        learner.memory.restore(part("memory"), {"task": saved.numbers["task"]})
    record.restore(part("record"), saved.numbers["record"])
    fleet.steps_in_task = saved.batches


def assemble(
    stream: Stream,
    part: Part,
    method: Method,
    runs: Sequence[Run],
    setup: Setup,
    options: object | None = None,
    *,
    device: torch.device | str = "cpu",
    fleet_type: type[Fleet] = Fleet,
) -> tuple[Feed, Fleet, Learner]:
    """The feed, fleet and learner of some runs, before their first step."""
    seeds = [run.seed for run in runs]
    feed = Feed(
        stream,
        part,
        seeds,
        setup.batch_size,
        device=device,
        joined=method.joined,
        union_softmax=setup.union_softmax,
    )
    pool, outputs = stream.pool.on(device), feed.slots.count
    fleet = fleet_type(
        lambda: setup.build(pool.shape, outputs),
        seeds,
        feed.slots,
        [run.hyperparameters["learning_rate"] for run in runs],
        device=device,
        prepare=pool.prepare_images if setup.convolutional else pool.prepare,
        gradients=setup.gradients,
    )
    columns = {}
    for name in method.learner.hyperparameters:
        values = [[run.hyperparameters[name]] for run in runs]
        columns[name] = torch.tensor(values, device=fleet.device)
    memory = None
    if method.learner.needs.memory:
        memory = FleetMemory(
            fleet,
            feed.tasks,
            setup.memory_per_task,
            policy=setup.memory,
            include_current=setup.memory_includes_current_task,
            with_replacement=setup.memory_with_replacement,
        )
    return feed, fleet, method.learner(fleet, columns, options or method.learner.options(), memory)
