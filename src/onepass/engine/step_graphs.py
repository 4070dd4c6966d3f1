"""CUDA graphs of steps: a stretch of steps is captured once, and launched from then on.

A graph repeats the operations of a stretch in the same memory. So whatever a step is given is
copied to where the captured one found it (its batches, what it draws from the episodic memory), and
whatever it keeps must be written in place. Counters of the host are advanced afterwards. A stretch
that cannot be captured is taken step by step, for a reason that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import Graph, captured, streams
from onepass.engine.fleet import Fleet, Steps
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

STRETCH = 20  # gradients: from here on, launching a graph is a small part of it
LOOPED = 4  # gradients that are looped
LONGEST = 200  # steps of a graph
KEPT = 4  # graphs: a method has one for the first task, one for later ones, and shorter ones beside


class Lookups(Protocol):
    """What graphs need of an episodic memory."""

    def look_ahead(self, steps: int) -> None: ...
    def captured(self) -> AbstractContextManager[None]: ...
    def turn(self, step: int) -> None: ...
    def observe(self, batch: Batch) -> None: ...


class Contract(Protocol):
    """What a captured step may assume (`learners.declarations.Capture`)."""

    @property
    def form(self) -> Hashable: ...
    @property
    def gradients(self) -> int: ...
    @property
    def period(self) -> int: ...
    @property
    def reads_task(self) -> bool: ...
    @property
    def second_pass(self) -> bool: ...


class Capturable(Steps, Protocol):
    """What graphs need of a learner."""

    def capture(self) -> Contract | None: ...
    def review_batch(self, batch: Batch) -> None: ...

    @property
    def memory(self) -> Lookups | None: ...


@dataclass(frozen=True)
class _Stretch:
    form: Hashable
    x: Tensor
    slots: Tensor
    graph: Graph


class StepGraphs:
    """Lets a fleet learn from a stretch of batches; with `review`, makes the second pass of one.

    `capture=False` takes all steps one by one, and so does a device that has no graphs.
    """

    device = "cuda"

    def __init__(
        self, fleet: Fleet, learner: Capturable, *, review: bool = False, capture: bool = True
    ) -> None:
        self._fleet, self._learner, self._learns = fleet, learner, not review
        self._take: Callable[[Batch], None] = partial(fleet.learn, learner)
        if review:
            self._take = learner.review_batch
        self._memory = learner.memory if self._learns else None
        self._on = capture and fleet.device.type == self.device
        self._graphs: dict[Hashable, _Stretch] = {}
        self._taken: set[Hashable] = set()  # taken step by step once, so that all is allocated
        if self._on and self.device == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            streams(fleet.device)  # outside any capture

    def stretch(self, at_most: int) -> int:
        """How many steps to take at once, of `at_most` that are left before something else."""
        contract = self._contract() if self._on else None
        if contract is None:
            return 1
        period = contract.period if self._learns else 1
        looped = not self._fleet.gradients.stacked  # each run's gradient is hundreds of operations
        if period > LONGEST or (looped and period > 1):
            return 1
        gradients = LOOPED // self._fleet.runs if looped else STRETCH
        most = max(gradients // contract.gradients, period)
        steps = min(at_most, most)
        whole = steps - steps % period
        # A single step is captured anyway, and another graph costs more than launches of that.
        if whole < most and period == 1:
            return 1
        return whole if whole and self._fleet.steps_in_task % period == 0 else 1

    def __call__(self, batches: Batch, steps: int) -> None:
        """Take `steps` batches of one size, which lie one behind the other in `batches`."""
        ends = self._ends_period(1)
        key = self._key(batches, steps, ends)
        if key in self._taken and key not in self._graphs:
            self._capture(key, batches, steps)
        if key in self._graphs:
            self._launch(self._graphs[key], batches, steps)
            return
        width = batches.slots.shape[1] // steps
        for number in range(steps):
            self._take(_cut(batches, number, width))
        key = self._key(batches, steps, ends)  # as the next stretch of its kind will find it
        if key is not None:
            self._taken.add(key)

    def _contract(self) -> Contract | None:
        contract = self._learner.capture()
        if contract is not None and not self._learns and not contract.second_pass:
            return None
        return contract

    def _key(self, batches: Batch, steps: int, ends: Hashable) -> Hashable | None:
        """What a captured stretch depends on besides the values of tensors; None if it cannot be.

        None stands for a stretch that cannot be captured.
        """
        if not self._on or batches.sizes is not None or batches.extra:
            return None
        if self._learns and not self._fleet.steady:
            return None
        contract = self._contract()
        if contract is None:
            return None
        if self._learns and steps > 1 and not (self._ends_period(0) and self._ends_period(steps)):
            return None
        shape, places = batches.x.shape, _fingerprint(self._fleet.places())
        task = self._task(batches)
        return steps, shape, task, contract.form, ends, places, *self._state().items()

    def _ends_period(self, steps: int) -> bool:
        """Whether a period of the learner ends after `steps` more."""
        contract = self._learner.capture()
        period = 1 if contract is None else contract.period
        return (self._fleet.steps_in_task + steps) % period == 0

    def _task(self, batches: Batch) -> int | None:
        """The task, if the learner reads it: then a graph serves no other task."""
        contract = self._learner.capture()
        return batches.task if contract is None or contract.reads_task else None

    def _state(self) -> dict[str, Hashable]:
        """Fingerprints of all attributes, declared as state or not: a step must leave them be."""
        return {name: _fingerprint(value) for name, value in vars(self._learner).items()}

    def _capture(self, key: Hashable, batches: Batch, steps: int) -> None:
        x = torch.empty_like(batches.x, memory_format=torch.contiguous_format)
        slots = batches.slots.clone()
        inputs = replace(batches, x=x, slots=slots, task=self._task(batches))
        width = slots.shape[1] // steps
        x.copy_(batches.x)
        owners = [(owner, dict(vars(owner))) for owner in (self._fleet, self._learner)]
        before = self._state()
        try:
            if self._memory is not None:
                self._memory.look_ahead(steps)
            contract = self._contract()
            form = None if contract is None else contract.form
            if any(stretch.form != form for stretch in self._graphs.values()):
                self._forget()
            work = [partial(self._one, _cut(inputs, n, width), n) for n in range(steps)]
            with nullcontext() if self._memory is None else self._memory.captured():
                graph = self._record(work)
            self._check(before)
            self._graphs[key] = _Stretch(form, x, slots, graph)
            if len(self._graphs) > KEPT:
                del self._graphs[next(iter(self._graphs))]
        except Exception as reason:  # a model's or a method's own errors come up again without one
            if is_out_of_memory(reason) and self._fleet.runs > 1:
                raise  # for a smaller fleet; a single run goes on without a graph
            log.warning("steps are taken one by one, not captured: %s", first_line(reason))
            self._on = False
        finally:
            for owner, values in owners:  # nothing was computed yet
                vars(owner).update(values)

    def _forget(self) -> None:
        """Free all graphs: once a memory has grown none is of use, and each holds activations."""
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

    def _check(self, before: Mapping[str, Any]) -> None:
        """Raise if the captured steps did something that a graph does not repeat."""
        now = self._state()
        changed = [name for name, value in now.items() if before.get(name, now) != value]
        if changed:
            names = ", ".join(changed)
            raise RuntimeError(f"a step changes {names} on the host: write tensors in place")

    def _launch(self, stretch: _Stretch, batches: Batch, steps: int) -> None:
        stretch.x.copy_(batches.x)
        stretch.slots.copy_(batches.slots)
        if self._memory is not None:
            self._memory.look_ahead(steps)
        stretch.graph.replay()
        if self._learns:
            self._fleet.count(steps)
        if self._memory is not None:
            self._memory.observe(batches)


def _cut(batches: Batch, number: int, width: int) -> Batch:
    if width == batches.slots.shape[1]:
        return batches
    return batches.piece(number * width, (number + 1) * width)


def _fingerprint(value: Any) -> Hashable:
    """What tells two states of an object apart.

    The addresses of its tensors, its plain values, and those of all that containers hold.
    """
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride()
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    if isinstance(value, Mapping):
        return (len(value), *((name, _fingerprint(one)) for name, one in value.items()))
    if isinstance(value, Collection):
        return (type(value), len(value), *(_fingerprint(one) for one in value))
    return id(value)
