"""How much of a study is left: run-steps, weighed by what they cost.

The cost of a step comes from its shapes first (`packing.cost_of_step`). As fleets proceed, the
measured speed of each method takes over. A method that has not begun is expected to be as much
faster or slower than its count as those that have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onepass.streams.base import Part

SHARED = 2.0  # a step of a fleet takes as long as this many rows, and its own rows (benchmarks/packing.py)
TRUST = 0.01  # share of the whole work after which a method's own speed counts for half


@dataclass(frozen=True)
class Piece:
    """What is left of one fleet, in run-steps of all its rows."""

    method: str
    part: Part
    rows: int
    steps: float

    @property
    def rowsteps(self) -> float:
        """Steps as if each row were alone, less what rows of a fleet share."""
        return weighed(self.steps, self.rows)


def weighed(steps: float, rows: int) -> float:
    """Run-steps of a fleet, weighed by how many rows share what a step costs whatever their number.

    >>> weighed(100, rows=1), weighed(100, rows=50)
    (300.0, 104.0)
    """
    return steps * (1 + SHARED / max(rows, 1))


class Forecast:
    """Learns how fast each method is, and says how long the rest will take."""

    def __init__(self, costs: Mapping[str, float], pieces: Iterable[Piece]) -> None:
        self._costs = dict(costs)  # of a run-step
        self._trust = TRUST * sum(self._work(piece) for piece in pieces)
        # By method: seconds that were measured, the work that was done in them, and all that was done.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._measured: defaultdict[str, float] = defaultdict(float)
        self._done: defaultdict[str, float] = defaultdict(float)
        self._share = 0.0

    def _work(self, piece: Piece) -> float:
        return self._costs[piece.method] * piece.rowsteps

    def proceeded(self, piece: Piece, seconds: float | None) -> None:
        """Note that a piece of a fleet is done, and how many seconds it took a worker if that is known."""
        self._done[piece.method] += self._work(piece)
        if seconds is not None:
            self._measured[piece.method] += self._work(piece)
            self._seconds[piece.method] += seconds

    def left(self, pieces: Iterable[Piece], workers: int) -> float | None:
        """Seconds until all of it is done; None as long as nothing was measured.

        Not less than the longest method takes on its own: its runs follow on its grid.
        """
        if not sum(self._measured.values()):
            return None
        total, longest = 0.0, dict[tuple[str, Part], float]()
        for piece in pieces:
            seconds = self._work(piece) * self._pace(piece.method)
            total += seconds
            place = piece.method, piece.part
            longest[place] = max(seconds, longest.get(place, 0.0))
        chains = [
            longest.get((name, "cv"), 0.0) + longest.get((name, "ev"), 0.0) for name in self._costs
        ]
        return max([total / max(workers, 1), *chains])

    def share(self, pieces: Iterable[Piece]) -> float:
        """The share of the work that is done. It never shrinks."""
        done = sum(work * self._pace(name) for name, work in self._done.items())
        left = sum(self._work(piece) * self._pace(piece.method) for piece in pieces)
        self._share = max(self._share, done / (done + left) if done + left else 1.0)
        return self._share

    def _pace(self, method: str) -> float:
        """Seconds for a unit of a method's work: the average, until enough of it was measured."""
        measured = sum(self._measured.values())
        average = sum(self._seconds.values()) / measured if measured else 1.0
        return (
            (self._seconds[method] + self._trust * average) / (self._measured[method] + self._trust)
            if self._trust
            else average
        )
