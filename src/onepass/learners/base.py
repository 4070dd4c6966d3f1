"""What a learner is: a direction for every run of a fleet, on `[R, P]`, and what it does between tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Carry, Fleet
from onepass.memory import EpisodicMemory

Example = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class NoOptions:
    """A method without options."""


class Learner(ABC):
    """Base of all methods. A subclass overrides `direction` and whatever else it needs.

    `columns` are the method's hyper-parameters besides the learning rate, `[R, 1]` each. `keeps` names the attributes that make up the
    method's state: tensors, and whole numbers the host counts with. Saving copies them, resuming sets them. Nothing inside a step may ask
    the device a question (no `.item()`, no branch on a tensor).
    """

    hyperparameters: ClassVar[
        Mapping[str, tuple[float, ...]]
    ] = {}  # besides the learning rate, with the values to choose from
    options: ClassVar[type] = NoOptions  # a frozen dataclass; its fields are the method's options
    needs_memory: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, ...]] = ()  # attributes that are state, memory aside
    needs_own_classes: ClassVar[bool] = False  # no class may belong to two tasks
    has_curve: ClassVar[bool] = True  # can it answer in the middle of a task?
    task_free: ClassVar[bool] = False  # does it make sense for a stream without task boundaries?
    one_input: ClassVar[bool] = False  # does it keep examples itself, of a network with one input?
    own_network: ClassVar[bool] = (
        False  # does it build a network of its own, so that it cannot learn in somebody else's?
    )
    answers_by_task: ClassVar[bool] = False  # does `scores` ask for `batch.task`?
    points: ClassVar[
        tuple[str, ...]
    ] = ()  # attributes [R, P] that are places in the space of theta, as against sums over it
    reads_task: ClassVar[bool] = (
        True  # may a step depend on `batch.task`? If not, steps captured in one task serve the next
    )
    counts: tuple[str, ...] = ()  # attributes that go up by one a step, on the host
    period: int = 1  # in each of so many steps, as `counts` has them, the host does the same, but for the last one
    violations: Tensor | None = (
        None  # [R], steps whose constraint was violated, for methods that have one
    )

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: object,
        memory: EpisodicMemory | None,
    ) -> None:
        self.fleet = fleet
        self.columns = columns
        self.memory = memory
        self.needs_review = self.looks_again(options)
        self.wants_delta = type(self).after_step is not Learner.after_step

    def begin_task(self, task: int) -> None:
        """Before the first batch of a task; state that depends on P is sized here."""

    @abstractmethod
    def direction(self, batch: Batch) -> Tensor:
        """What to subtract from theta, times the learning rate: `[R, P]`."""

    def accept(self) -> None:
        """The step was taken: sums over the gradients of steps go here, so that a step which is refused leaves no trace in them. The gradients
        of the step are still there."""

    def after_step(self, delta: Tensor) -> None:
        """After the fleet moved theta by `delta [R, P]`."""

    @classmethod
    def looks_again(cls, options: object) -> bool:
        """Does it need a second look at a task's data? The table says so."""
        return False

    def review(self, batches: Iterable[Batch]) -> None:
        """The second look: all batches of the task again, before it ends. For methods that `looks_again`.

        One that looks at a batch at a time overrides `look_again`, which can be captured, and what comes before and after it.
        """
        self.begin_review()
        for batch in batches:
            self.look_again(batch)
        self.end_review()

    def begin_review(self) -> None:
        """Before the first batch of a second look."""

    def look_again(self, batch: Batch) -> None:
        """One batch of a second look."""

    def end_review(self) -> None:
        """After the last batch of a second look."""

    def end_task(self) -> None:
        """After the last batch of a task."""

    def form(self) -> Hashable | None:
        """What a step does differently from another one, the learner's own attributes aside; None: no two are alike, or it asks the device."""
        if self.memory is None:
            return ()
        alike = len(set(self.memory.sizes)) == 1 and not self.memory.include_current
        return tuple(self.memory.sizes) if alike else None

    def passes(self) -> int:
        """How many times as much a step does as plain SGD, roughly."""
        return 1

    def scores(self, batch: Batch) -> Tensor:
        """Scores of all slots `[R, B, S]` for evaluation; changes nothing."""
        return self.fleet.forward(batch).logits

    def marked(self) -> dict[str, Any]:
        """All attributes as they are, to go back to: what is state is copied, since it may be changed in place."""
        return {
            name: value.clone() if isinstance(value, Tensor) and name in self.keeps else value
            for name, value in vars(self).items()
        }

    def resize(self, before: int, carry: Carry) -> None:
        """The fleet's parameters were `before` many and are more now: what is sized like them is carried over, zero for what is new; a point
        is where theta is."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor) and value.shape == (self.fleet.runs, before):
                setattr(
                    self,
                    name,
                    carry(value, self.fleet.theta.clone() if name in self.points else None),
                )

    def state(self) -> dict[str, Tensor]:
        """The method's own tensors, memory aside."""
        return {
            name: value for name in self.keeps if isinstance(value := getattr(self, name), Tensor)
        }

    def counters(self) -> dict[str, int]:
        """What the host counts with."""
        return {
            name: int(getattr(self, name))
            for name in self.keeps
            if not isinstance(getattr(self, name), Tensor)
        }

    def accepts(
        self, state: Mapping[str, Tensor], counters: Mapping[str, int], example: Example | None
    ) -> bool:
        """Whether this could be a saved `state()` and `counters()` of its own, before it is restored. `example` is the type and the shape of an
        example, if there were some."""
        mine, numbers = self.state(), self.counters()
        return (
            state.keys() == mine.keys()
            and counters.keys() == numbers.keys()
            and all(
                state[name].dtype == tensor.dtype and state[name].shape == tensor.shape
                for name, tensor in mine.items()
            )
            and all(
                counters[name] in (0, 1)
                for name in numbers
                if isinstance(getattr(self, name), bool)
            )
        )

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a saved `state()` and `counters()` of the same runs."""
        for name in self.keeps:
            before = getattr(self, name)
            setattr(
                self,
                name,
                state[name].to(self.fleet.device)
                if isinstance(before, Tensor)
                else type(before)(counters[name]),
            )

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        """How many examples a step looks at besides its batch, on average: what it costs."""
        return 0

    def largest_batch(self, batch_size: int) -> int:
        """How many examples it looks at in one pass at most."""
        return batch_size

    def examples_held(self) -> int:
        """How many examples of past tasks it keeps at most."""
        return 0 if self.memory is None else self.memory.tasks * self.memory.budget

    def kept(self) -> tuple[dict[int, int], int]:
        """Examples of a single run that it keeps itself: how many of each past task, and bytes in all."""
        return {}, 0

    def peak_bytes(self, tasks: int) -> int:
        """Bytes a run needs at most in a stream of `tasks`, activations and examples aside: parameters, state, and the gradients of a step."""
        gradients = 3  # of the batch, of a reference batch, and a temporary one
        return (
            self.fleet.state_bytes()
            + self.state_bytes()
            + gradients * self.fleet.theta.nbytes // self.fleet.runs
        )

    def state_bytes(self) -> int:
        """Bytes of the method's state a run, episodic memory included."""
        tensors = [*self.state().values(), *(self.memory.state().values() if self.memory else ())]
        total: int = sum(t.nbytes for t in tensors)
        return total // self.fleet.runs


class Rehearsal(Learner):
    """Base of the methods that look back at an episodic memory."""

    needs_memory = True
    reads_task = False

    def __init__(
        self, fleet: Fleet, columns: Mapping[str, Tensor], options: object, memory: EpisodicMemory
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.episodic: EpisodicMemory = memory

    def largest_batch(self, batch_size: int) -> int:
        return max(batch_size, self.episodic.budget)

    def begin_task(self, task: int) -> None:
        self.episodic.begin_task(task)

    def end_task(self) -> None:
        self.episodic.end_task()


@dataclass(frozen=True)
class Reference:
    """`reference_batch` examples are drawn from the memory a step; `reference_moves_buffers` lets that pass move batch-norm statistics, as the
    A-GEM authors' code does."""

    reference_batch: int = 256
    reference_moves_buffers: bool = True


class Referring(Rehearsal):
    """Base of the methods that correct a step by a random reference batch of the memory: a subclass says how in `correct`."""

    options = Reference
    task_free = True

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Reference,
        memory: EpisodicMemory,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.reference_batch, self.moves = options.reference_batch, options.reference_moves_buffers

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        assert isinstance(options, Reference)
        return min(options.reference_batch, tasks * memory_per_task)

    def largest_batch(self, batch_size: int) -> int:
        return max(batch_size, self.episodic.drawn(self.reference_batch))

    def form(self) -> Hashable | None:
        return self.episodic.form(self.reference_batch)

    def direction(self, batch: Batch) -> Tensor:
        reference = self.episodic.draw(self.reference_batch)
        if reference is None:
            g, _ = self.fleet.grad(batch)
        else:  # the batch last, so that it is what running statistics have seen last
            g_ref, loss_ref = self.reference_gradient(reference)
            g, loss = self.fleet.grad(batch)
            g = self.correct(g, loss[:, None], g_ref, loss_ref[:, None])
        self.episodic.observe(batch)
        return g

    def reference_gradient(self, reference: Batch) -> tuple[Tensor, Tensor]:
        """`g_ref [R, P]` and the loss `[R]` on the reference batch."""
        return self.fleet.grad(reference, update_buffers=self.moves)

    @abstractmethod
    def correct(self, g: Tensor, loss: Tensor, g_ref: Tensor, loss_ref: Tensor) -> Tensor:
        """The direction from the gradients `[R, P]` and losses `[R, 1]` of the batch and of the reference batch."""
