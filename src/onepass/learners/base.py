"""What a learner is: a direction for every run of a fleet, on `[R, P]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Carry, Fleet
from onepass.learners.declarations import Capture, Cost, Needs, Workload
from onepass.learners.state import Field
from onepass.memory import EpisodicMemory

Example = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class NoOptions:
    """A method without options."""


@dataclass(frozen=True)
class Saved:
    """The state of a learner: tensors, and what the host counts with."""

    tensors: dict[str, Tensor]
    counters: dict[str, int]


class Learner(ABC):
    """Base of all methods: a subclass writes its equation in `direction`, and declares its state.

    `columns` are the method's hyper-parameters besides the learning rate, `[R, 1]` each; `option`
    holds its options. State is declared in the class body (see `learners.state`). Nothing inside a
    step may read from the device (no `.item()`, no branch on a tensor).
    """

    hyperparameters: ClassVar[
        Mapping[str, tuple[float, ...]]
    ] = {}  # with the values to choose from
    options: ClassVar[type] = NoOptions  # a frozen dataclass
    needs: Needs = Needs()
    former: ClassVar[tuple[str, ...]] = ()  # counters in older files, which the fleet has now
    violations: Tensor | None = None  # [R], steps whose constraint was violated, if there is one

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: object = None,
        memory: EpisodicMemory | None = None,
    ) -> None:
        self.fleet = fleet
        self.columns = columns
        self.option: Any = self.options() if options is None else options
        self.memory = memory
        self.needs = self.needs_with(self.option)
        for name, field in self.fields().items():
            setattr(self, name, field.make(self))

    # ---- the equation

    @abstractmethod
    def direction(self, batch: Batch) -> Tensor:
        """What to subtract from theta, times the learning rate: `[R, P]`."""

    def accept(self) -> None:
        """Add to sums over gradients: the step was taken, and its gradients are still there.

        A step that is refused leaves no trace, so sums do not change in `direction`.
        """

    def after_step(self, delta: Tensor) -> None:
        """Hear that theta moved by `delta [R, P]`; called if the method `needs` delta."""

    def begin_task(self, task: int) -> None:
        """Prepare for the first batch of a task."""
        self.fleet.steps_in_task = 0

    def end_task(self) -> None:
        """Keep what is to be kept of the task whose last batch was learnt."""

    def review(self, batches: Iterable[Batch]) -> None:
        """Make the second pass over a task, before it ends, for methods that need one."""
        self.begin_review()
        for batch in batches:
            self.review_batch(batch)
        self.end_review()

    def begin_review(self) -> None:
        """Prepare for the first batch of the second pass."""

    def review_batch(self, batch: Batch) -> None:
        """See one batch of the second pass."""

    def end_review(self) -> None:
        """Conclude the second pass."""

    def scores(self, batch: Batch) -> Tensor:
        """Scores of all slots `[R, B, S]` for evaluation; changes nothing."""
        return self.fleet.forward(batch).logits

    # ---- declarations

    @classmethod
    def needs_with(cls, options: Any) -> Needs:
        """What the method needs with these options."""
        return cls.needs

    def capture(self) -> Capture | None:
        """What a captured step may assume now; None if no two steps are alike."""
        if self.memory is None:
            return Capture()
        sizes = self.memory.sizes
        alike = len(set(sizes)) == 1 and not self.memory.include_current
        return Capture(tuple(sizes)) if alike else None

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        """What a run takes besides plain SGD."""
        if not cls.needs.memory:
            return Cost()
        return Cost(largest_batch=work.memory_per_task, held=work.tasks * work.memory_per_task)

    def peak_bytes(self, work: Workload) -> int:
        """Bytes that a run needs at most, activations and kept examples aside."""
        gradients = self.cost(self.option, work).gradients * self.fleet.theta.nbytes
        return self.fleet.state_bytes() + self.state_bytes() + gradients // self.fleet.runs

    def kept(self) -> tuple[dict[int, int], int]:
        """Examples of a single run that the method keeps itself: by task, and bytes in all."""
        return {}, 0

    # ---- state

    @classmethod
    @cache
    def fields(cls) -> dict[str, Field]:
        """The declared fields, those of base classes first."""
        declared = [vars(base) for base in reversed(cls.__mro__)]
        return {
            n: value for one in declared for n, value in one.items() if isinstance(value, Field)
        }

    @classmethod
    def state_names(cls) -> list[str]:
        """The fields that are state."""
        return [name for name, field in cls.fields().items() if field.kind != "workspace"]

    def _of_kind(self, counters: bool) -> dict[str, Any]:
        kinds = self.fields()
        names = [name for name in self.state_names() if (kinds[name].kind == "counter") == counters]
        return {name: getattr(self, name) for name in names}

    def state(self) -> dict[str, Tensor]:
        """The method's own tensors, memory aside."""
        return self._of_kind(counters=False)

    def counters(self) -> dict[str, int]:
        """What the host counts with."""
        return {name: int(value) for name, value in self._of_kind(counters=True).items()}

    def accepts(
        self, state: Mapping[str, Tensor], counters: Mapping[str, int], example: Example | None
    ) -> bool:
        """Whether these may be a saved `state()` and `counters()` of this learner.

        `example` is the type and shape of an example, if there were some.
        """
        mine, numbers = self.state(), self._of_kind(counters=True)
        flags = [name for name, value in numbers.items() if isinstance(value, bool)]
        return (
            _shapes(state) == _shapes(mine)
            and counters.keys() == numbers.keys()
            and all(counters[name] in (0, 1) for name in flags)
        )

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a saved `state()` and `counters()` of the same runs."""
        for name in self._of_kind(counters=False):
            setattr(self, name, state[name].to(self.fleet.device))
        for name, value in self._of_kind(counters=True).items():
            setattr(self, name, type(value)(counters[name]))

    def saved(self) -> Saved:
        """A copy of all state, to go back to with `go_back`."""
        return Saved({name: value.clone() for name, value in self.state().items()}, self.counters())

    def go_back(self, saved: Saved) -> None:
        """Undo what came after `saved()`."""
        self.restore(saved.tensors, saved.counters)
        self._make_workspaces()

    def resize(self, carry: Carry) -> None:
        """Carry state over to a network that has got more parameters."""
        for name, field in self.fields().items():
            if field.kind == "sum" and getattr(self, name).shape[1]:
                setattr(self, name, carry(getattr(self, name)))
            elif field.kind == "point":
                setattr(self, name, carry(getattr(self, name), self.fleet.theta.clone()))
        self._make_workspaces()

    def _make_workspaces(self) -> None:
        for name, field in self.fields().items():
            if field.kind == "workspace":
                setattr(self, name, field.make(self))

    def state_bytes(self) -> int:
        """Bytes of the method's state per run, episodic memory included."""
        tensors = [*self.state().values(), *(self.memory.state().values() if self.memory else ())]
        total: int = sum(t.nbytes for t in tensors)
        return total // self.fleet.runs


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
