"""What learners and the recorder need of an episodic memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.step_graphs import Lookups

Chooser = Callable[[int], Tensor]  # what the next n steps choose, [R, n, …]


class EpisodicMemory(Lookups, Protocol):
    """Examples of the past as they came, with their slots, for each of R runs.

    `FleetMemory` keeps them for the runs of a study, `onepass.live.memory.StreamMemory` for one
    stream whose end is not known. What captured steps need is in `Lookups`.
    """

    @property
    def task(self) -> int: ...  # the current one
    @property
    def sizes(self) -> Sequence[int]: ...  # visible examples of each run, as the host knows them
    @property
    def include_current(self) -> bool: ...  # whether examples of the current task may be drawn

    def begin_task(self, task: int) -> None:
        """Start the reservoirs of a task."""

    def observe(self, batch: Batch) -> None:
        """Offer a batch of the current task; nothing in it reads from the device."""

    def end_task(self) -> None:
        """Make the task visible."""

    def draw(self, count: int) -> Batch | None:
        """A reference batch of `count` visible examples, uniform without replacement.

        All of them while they are fewer; None while there are none.
        """

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that is kept of one past task per run: `tasks[r]` in row `r`."""

    def of_chosen(self, choose: Chooser) -> Batch:
        """`of` the tasks that `choose(1)` names, `[R, 1]`.

        `choose(n)` names those of the next n steps, this one included.
        """

    def form(self, count: int | None = None) -> Hashable | None:
        """What tells this step's `draw(count)` (or `of_chosen`) from that of another step.

        None if no two are alike, so that no step can be captured.
        """

    def contents(self, room: bool = False) -> tuple[Batch, Tensor] | None:
        """All visible examples, and the task of each, `[R, n]`: −1 behind a row's end.

        With `room`, `n` is what there is room for, if that is known.
        """

    def state(self) -> dict[str, Tensor]:
        """The examples, and everything that decides which ones come next."""

    def counters(self) -> dict[str, Any]:
        """What the host counts with."""

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Go on from a saved `state()` and `counters()`."""
