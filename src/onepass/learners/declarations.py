"""What a method declares besides its equation and state; every default suits plain SGD."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a method needs of a stream, a network and the fleet."""

    memory: bool = False
    """An episodic memory."""
    delta: bool = False
    """The step that was really taken: `after_step(delta)` is called."""
    second_pass: bool = False
    """A task's data again before the task ends (`begin_review` to `end_review`)."""
    single_pass_by: str = ""
    """The setting that does without the second pass."""
    own_classes: bool = False
    """Tasks with classes of their own: no class belongs to two tasks."""
    boundaries: bool = True
    """To know where tasks end."""
    ended_task: bool = False
    """The end of a task before its classes can be predicted: there is no learning curve."""
    task_to_predict: bool = False
    """`batch.task` in `scores`."""
    own_examples: bool = False
    """To keep examples itself, of a network with one input."""
    own_network: bool = False
    """A network that it builds itself, so that it cannot learn in a user's module."""
    classes_unless: str = ""
    """Predicted class probabilities, and so the cross-entropy, unless this setting is chosen."""


@dataclass(frozen=True)
class Capture:
    """What a captured step may assume: it stands for every step of the same form."""

    form: Hashable = ()
    """What tells steps apart, besides the values of the learner's attributes."""
    gradients: int = 1
    """How many times the work of plain SGD a step does, roughly."""
    period: int = 1
    """The host does something else only in the last of `period` steps of a task."""
    reads_task: bool = True
    """Whether a step may depend on `batch.task`; if not, captured steps serve later tasks too."""
    second_pass: bool = True
    """Whether `review_batch` may be captured too."""


@dataclass(frozen=True)
class Workload:
    """What decides the cost of a run besides the method."""

    tasks: int
    batch_size: int
    memory_per_task: int
    repeats: bool = False
    """Whether a reference batch may have an example twice, and so be larger than the memory."""

    def drawn(self, count: int) -> int:
        """How many examples a reference batch of `count` has at most."""
        return count if self.repeats else min(count, self.tasks * self.memory_per_task)


@dataclass(frozen=True)
class Cost:
    """What one run takes, for planning."""

    examples: int = 0
    """Examples of a step besides its batch, on average."""
    largest_batch: int = 0
    """Examples in one pass at most, if they are more than a batch."""
    held: int = 0
    """Examples of past tasks that are kept at most."""
    gradients: int = 3
    """Gradients at a time: of the batch, of a reference batch, and a temporary one."""
