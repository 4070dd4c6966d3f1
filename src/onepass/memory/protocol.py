"""What learners and the recorder need of an episodic memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from onepass.engine.batch import Batch

Chooser = Callable[[int], Tensor]  # what the next n steps choose, [R, n, …]


class EpisodicMemory(Protocol):
    """Examples of the past as they came, with their slots, for each of R runs.

    `FleetMemory` keeps them for the runs of a study, `onepass.live.memory.StreamMemory` for one
    stream whose end is not known.
    """

    @property
    def task(self) -> int:
        """The current task."""

    @property
    def sizes(self) -> Sequence[int]:
        """Visible examples of each run, as the host knows them."""

    @property
    def include_current(self) -> bool:
        """Whether examples of the current task may be drawn."""

    # ---- what is kept

    def begin_task(self, task: int) -> None:
        """Start the reservoirs of a task."""

    def observe(self, batch: Batch) -> None:
        """Offer a batch of the current task; nothing in it reads from the device."""

    def end_task(self) -> None:
        """Make the task visible."""

    # ---- what is drawn

    def draw(self, count: int) -> Batch | None:
        """Return a reference batch of `count` visible examples, uniform without replacement.

        All of them while they are fewer; None while there are none.
        """

    def of(self, tasks: Sequence[int]) -> Batch:
        """All that is kept of one past task per run: `tasks[r]` in row `r`."""

    def of_chosen(self, choose: Chooser) -> Batch:
        """`of` the tasks that `choose(1)` names, `[R, 1]`.

        `choose(n)` names those of the next n steps, this one included.
        """

    def contents(self, room: bool = False) -> tuple[Batch, Tensor] | None:
        """All visible examples, and the task of each, `[R, n]`: −1 behind a row's end.

        With `room`, `n` is what there is room for, if that is known.
        """

    # ---- steps that are captured, as `onepass.engine.step_graphs` does

    def form(self, count: int | None = None) -> Hashable | None:
        """What tells this step's `draw(count)` (or `of_chosen`) from that of another step.

        None if no two are alike, so that no step can be captured.
        """

    def look_ahead(self, steps: int) -> None:
        """Gather what the next captured steps draw."""

    def captured(self) -> AbstractContextManager[None]:
        """A context in which draws read what `look_ahead` has gathered."""

    def turn(self, step: int) -> None:
        """Make `step` the current one of the captured steps."""

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        """The examples, and everything that decides which ones come next."""

    def counters(self) -> dict[str, Any]:
        """What the host counts with."""

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Go on from a saved `state()` and `counters()`."""
