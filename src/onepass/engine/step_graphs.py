"""Steps without the host: on a GPU a stretch of steps is captured once as a CUDA graph, and replayed from then on.

A replay repeats the operations of a stretch in the same memory. So whatever a step is given is copied to where the captured one found it
(its batches, what it looks up in the episodic memory), and whatever it keeps must be written in place. What the host counts is counted
afterwards. A stretch that cannot be captured is taken step by step, for a reason that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import Graph, captured, streams
from onepass.engine.fleet import Fleet, Steps
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

STRETCH = 20  # gradients: from here on, the start of a graph is a small part of it
LOOPED = 4  # gradients that are looped
LONGEST = 200  # steps of a graph
KEPT = 4  # graphs: a method has one for the first task and one for the others, and each a shorter one beside it


class Lookups(Protocol):
    """What replays need of an episodic memory."""

    def look_ahead(self, steps: int) -> None: ...
    def captured(self) -> AbstractContextManager[None]: ...
    def turn(self, step: int) -> None: ...
    def observe(self, batch: Batch) -> None: ...


class Captured(Steps, Protocol):
    """What replays need of a learner."""

    counts: tuple[str, ...]
    reads_task: ClassVar[bool]
    period: int

    def form(self) -> Hashable | None: ...
    def passes(self) -> int: ...

    @property
    def memory(self) -> Lookups | None: ...


@dataclass(frozen=True)
class _Stretch:
    form: Hashable
    x: Tensor
    slots: Tensor
    graph: Graph


class StepGraphs:
    """Lets a fleet learn from a stretch of batches, or do anything else with each of them: `take` says what, by default `Fleet.learn`.

    `capture=False` takes all steps one by one, and so does a device that has no graphs.
    """

    device = "cuda"

    def __init__(
        self,
        fleet: Fleet,
        learner: Captured,
        take: Callable[[Batch], None] | None = None,
        *,
        capture: bool = True,
    ) -> None:
        self._fleet, self._learner = fleet, learner
        self._learns, self._take = take is None, take or (lambda batch: fleet.learn(learner, batch))
        self._memory = learner.memory if self._learns else None
        self._on = capture and fleet.device.type == self.device
        self._graphs: dict[Hashable, _Stretch] = {}
        self._taken: set[Hashable] = (
            set()
        )  # such as were taken step by step once, so that all they need is in its place
        if self._on and self.device == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            streams(fleet.device)  # outside any capture

    def stretch(self, at_most: int) -> int:
        """How many steps to take at once, of so many that are left before something else is to be done."""
        if not self._on or self._learner.form() is None:
            return 1
        period = self._learner.period if self._learns else 1
        looped = (
            not self._fleet.gradients.stacked
        )  # each run has a gradient of its own, of hundreds of operations
        if period > LONGEST or (looped and period > 1):
            return 1
        most = max(
            (LOOPED // self._fleet.runs if looped else STRETCH) // self._learner.passes(), period
        )
        steps = min(at_most, most)
        whole = steps - steps % period
        if (
            whole < most and period == 1
        ):  # a single step is captured anyway, and a graph more takes longer than some replays of that
            return 1
        return (
            whole
            if whole
            and all(getattr(self._learner, name) % period == 0 for name in self._learner.counts)
            else 1
        )

    def __call__(self, batches: Batch, steps: int) -> None:
        """Take `steps` batches of one size, which lie one behind the other in `batches`."""
        turns = self._turns(1)
        key = self._key(batches, steps, turns)
        if key in self._taken and key not in self._graphs:
            self._capture(key, batches, steps)
        if key in self._graphs:
            self._replay(self._graphs[key], batches, steps)
            return
        width = batches.slots.shape[1] // steps
        for number in range(steps):
            self._take(_cut(batches, number, width))
        key = self._key(batches, steps, turns)  # as the next stretch of its kind will find it
        if key is not None:
            self._taken.add(key)

    def _key(self, batches: Batch, steps: int, turns: Hashable) -> Hashable | None:
        """What a captured stretch depends on besides the values of tensors; None if it cannot be captured."""
        if (
            not self._on
            or batches.sizes is not None
            or batches.extra
            or (self._learns and not self._fleet.steady)
        ):
            return None
        form = self._learner.form()
        if form is None or (
            self._learns and steps > 1 and not all((*self._turns(0), *self._turns(steps)))
        ):
            return None
        return (
            steps,
            batches.x.shape,
            self._told(batches),
            form,
            turns,
            _print(self._fleet.places()),
            *self._state().items(),
        )

    def _turns(self, steps: int) -> tuple[bool, ...]:
        """Which counters are at the end of a period after so many steps more."""
        return tuple(
            (getattr(self._learner, name) + steps) % self._learner.period == 0
            for name in self._learner.counts
        )

    def _told(self, batches: Batch) -> int | None:
        """The task, if the learner looks at it: then no other task can replay what was captured."""
        return batches.task if self._learner.reads_task else None

    def _state(self) -> dict[str, Hashable]:
        """What a learner has besides its counters: a captured step must leave everything in it where it was."""
        return {
            name: _print(value)
            for name, value in vars(self._learner).items()
            if name not in self._learner.counts
        }

    def _capture(self, key: Hashable, batches: Batch, steps: int) -> None:
        x, slots = (
            torch.empty_like(batches.x, memory_format=torch.contiguous_format),
            batches.slots.clone(),
        )
        inputs, width = (
            replace(batches, x=x, slots=slots, task=self._told(batches)),
            slots.shape[1] // steps,
        )
        x.copy_(batches.x)
        owners = [(owner, dict(vars(owner))) for owner in (self._fleet, self._learner)]
        before = self._state() | {
            name: getattr(self._learner, name) for name in self._learner.counts
        }
        try:
            if self._memory is not None:
                self._memory.look_ahead(steps)
            form = self._learner.form()
            if any(stretch.form != form for stretch in self._graphs.values()):
                self._forget()
            with nullcontext() if self._memory is None else self._memory.captured():
                graph = self._record(
                    [
                        partial(self._one, _cut(inputs, number, width), number)
                        for number in range(steps)
                    ]
                )
            self._check(before, steps)
            self._graphs[key] = _Stretch(form, x, slots, graph)
            if len(self._graphs) > KEPT:
                del self._graphs[next(iter(self._graphs))]
        except Exception as reason:  # whatever cannot be captured: a model's or a method's own errors come up again without a graph
            if is_out_of_memory(reason) and self._fleet.runs > 1:
                raise  # for a smaller fleet; a single run goes on without a graph
            log.warning("steps are taken one by one, not replayed: %s", first_line(reason))
            self._on = False
        finally:
            for owner, values in owners:
                vars(owner).update(values)

    def _forget(self) -> None:
        """Let go of all graphs: with a memory that has grown none of them is of use, and each holds the activations of its steps."""
        if self.device == "cuda":
            torch.cuda.synchronize(self._fleet.device)
        self._graphs.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()

    def _one(self, batch: Batch, number: int) -> None:
        if self._memory is not None:
            self._memory.turn(number)
        self._take(batch)

    def _record(self, work: Sequence[Callable[[], None]]) -> Graph:
        return captured(self._fleet.device, self._pool, work)

    def _check(self, before: Mapping[str, Any], steps: int) -> None:
        """Raise if the captured steps did something that a replay does not repeat."""
        changed = [
            name for name, now in self._state().items() if name not in before or before[name] != now
        ]
        if changed:
            raise RuntimeError(
                f"a step changes {', '.join(changed)} on the host: tensors are to be written in place, counters named in `counts`"
            )
        for name in self._learner.counts if self._learns else ():
            if getattr(self._learner, name) != before[name] + steps:
                raise RuntimeError(
                    f"a step must add one to {name}, which is among the learner's `counts`"
                )

    def _replay(self, stretch: _Stretch, batches: Batch, steps: int) -> None:
        stretch.x.copy_(batches.x)
        stretch.slots.copy_(batches.slots)
        if self._memory is not None:
            self._memory.look_ahead(steps)
        stretch.graph.replay()
        if self._learns:
            self._fleet.learnt(steps)
            for name in self._learner.counts:
                setattr(self._learner, name, getattr(self._learner, name) + steps)
        if self._memory is not None:
            self._memory.observe(batches)


def _cut(batches: Batch, number: int, width: int) -> Batch:
    return (
        batches
        if width == batches.slots.shape[1]
        else batches.piece(number * width, (number + 1) * width)
    )


def _print(value: Any) -> Hashable:
    """What tells two states of an object apart: the places of its tensors, its plain values, and those of all that containers hold."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride()
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    if isinstance(value, Mapping):
        return (len(value), *((name, _print(one)) for name, one in value.items()))
    if isinstance(value, Collection):
        return (type(value), len(value), *(_print(one) for one in value))
    return id(value)
