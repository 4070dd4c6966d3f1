"""What a learner is: a direction for every run of a fleet, on `[R, P]`, and what it does between tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from onepass.engine.fleet import Fleet
from onepass.memory import EpisodicMemory
from onepass.streams.batch import Batch


@dataclass(frozen=True)
class NoOptions:
    """A method without options."""


class Learner(ABC):
    """Base of all methods. A subclass overrides `direction` and whatever else it needs.

    `columns` are the method's hyper-parameters besides the learning rate, `[R, 1]` each. `keeps` names the attributes that make up the
    method's state: tensors, and whole numbers the host counts with. Saving copies them, resuming sets them. Nothing inside a step may ask
    the device a question (no `.item()`, no branch on a tensor).
    """

    hyperparameters: ClassVar[tuple[str, ...]] = ()  # besides learning_rate
    options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the method's options
    needs_memory: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, ...]] = ()  # attributes that are state, memory aside
    violations: Tensor | None = None  # [R], steps whose constraint was violated, for methods that have one

    def __init__(self, fleet: Fleet, columns: Mapping[str, Tensor], options: object, memory: EpisodicMemory | None) -> None:
        self.fleet = fleet
        self.columns = columns
        self.memory = memory
        self.wants_delta = type(self).after_step is not Learner.after_step

    def begin_task(self, task: int) -> None:
        """Before the first batch of a task; state that depends on P is sized here."""

    @abstractmethod
    def direction(self, batch: Batch) -> Tensor:
        """What to subtract from theta, times the learning rate: `[R, P]`."""

    def after_step(self, delta: Tensor) -> None:
        """After the fleet moved theta by `delta [R, P]`."""

    def end_task(self) -> None:
        """After the last batch of a task."""

    def scores(self, batch: Batch) -> Tensor:
        """Scores of all slots `[R, B, S]` for evaluation; changes nothing."""
        return self.fleet.forward(batch).logits

    def state(self) -> dict[str, Tensor]:
        """The method's own tensors, memory aside."""
        return {name: value for name in self.keeps if isinstance(value := getattr(self, name), Tensor)}

    def counters(self) -> dict[str, int]:
        """What the host counts with."""
        return {name: int(getattr(self, name)) for name in self.keeps if not isinstance(getattr(self, name), Tensor)}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a saved `state()` and `counters()` of the same runs."""
        for name in self.keeps:
            before = getattr(self, name)
            setattr(self, name, state[name].to(self.fleet.device) if isinstance(before, Tensor) else type(before)(counters[name]))

    def state_bytes(self) -> int:
        """Bytes of the method's state a run, episodic memory included."""
        tensors = [*self.state().values(), *(self.memory.state().values() if self.memory else ())]
        total: int = sum(t.nbytes for t in tensors)
        return total // self.fleet.runs
