"""Draws of steps that are captured as a CUDA graph and repeated.

A captured step reads the same addresses each time. So before it runs, what it will draw is gathered
into tensors that stay where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.memory.protocol import Chooser

Found = tuple[Tensor, Tensor]  # examples and slots


class CapturedDraws(ABC):
    """Base of a memory whose draws can be captured, if each step draws as the one before."""

    def __init__(self) -> None:
        self._asked: Hashable = None  # what the last step drew
        self._chooser: Chooser | None = None  # the places that the next steps draw in the same way
        self._tensors: dict[torch.Size, Found] = {}  # for what captured steps draw
        self._ready: Found | None = None  # what the coming captured steps draw
        self._turn: int | None = None  # the current one of them

    @abstractmethod
    def _gather(self, places: Tensor, into: Found | None) -> Found:
        """Copy the examples at places `[R, steps, n]`, into these tensors if there are some."""

    def _draw(self, asked: Hashable, now: Callable[[], Batch], ahead: Chooser) -> Batch:
        """Draw by `now`, or in a captured step read what `ahead` has chosen.

        `asked` tells one way of drawing from another.
        """
        if self._turn is None:
            self._asked, self._chooser = asked, ahead
            return now()
        if self._ready is None or asked != self._asked:
            raise RuntimeError(
                "a step asks the episodic memory for something else than the one before"
            )
        x, slots = self._ready
        return Batch(x[:, self._turn], slots[:, self._turn])

    def look_ahead(self, steps: int) -> None:
        """Gather what the next steps draw, if they draw as the last one did."""
        if self._chooser is None:
            return
        places = self._chooser(steps)
        self._ready = self._gather(places, self._tensors.get(places.shape))
        self._tensors[places.shape] = self._ready

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, draws read what `look_ahead` has gathered, and nothing is observed."""
        self._turn = 0
        try:
            yield
        finally:
            self._turn = None

    def turn(self, step: int) -> None:
        """Make `step` the current one of the captured steps."""
        self._turn = step


class NeverCaptured:
    """Base of a memory whose steps are not captured, since no two of them are alike."""

    def form(self, count: int | None = None) -> None: ...
    def look_ahead(self, steps: int) -> None: ...
    def turn(self, step: int) -> None: ...

    def captured(self) -> AbstractContextManager[None]:
        return nullcontext()
