"""Notices a stream that is shown more than once: its memory would silently fill with copies."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PLACES = 1024  # hashes that are remembered, a power of two
ENOUGH = 10  # examples that came again, after which the user is told: a few may be alike by nature


class Repeats:
    """Counts examples that enter the memory and were in it before; changes nothing in what is kept.

    It remembers a 64-bit hash of the last examples that entered, in a table of fixed size, and of
    some of all that ever entered: a large memory has long left that table behind when it fills with
    copies. Most examples of a long stream do not enter, and cost nothing.
    """

    def __init__(self) -> None:
        self._table = array("q", bytes(8 * PLACES))
        self._some = array("q")  # hashes, in order, that are divisible by
        self._by = 1  # this power of two
        self._again = 0
        self._told = False

    def __copy__(self) -> Repeats:
        twin = object.__new__(Repeats)
        vars(twin).update(vars(self) | {"_table": self._table[:], "_some": self._some[:]})
        return twin

    def note(self, columns: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        """These rows entered the memory."""
        if self._again >= ENOUGH:
            return
        for found in hashes(columns, rows):
            place = found % PLACES
            self._again += self._table[place] == found or self._is_kept(found)
            self._table[place] = found
            if found % self._by == 0:
                self._keep(found)

    def _keep(self, found: int) -> None:
        """Remember a hash for good, or half of them where they are too many."""
        if not self._is_kept(found):
            insort(self._some, found)
        while len(self._some) > PLACES:
            self._by *= 2
            self._some = array("q", [one for one in self._some if one % self._by == 0])

    def _is_kept(self, found: int) -> bool:
        place = bisect_left(self._some, found)
        return place < len(self._some) and self._some[place] == found

    def tell(self) -> None:
        """Log it, once. Not in `note`, amid a change: a handler of the log may raise."""
        if self._again >= ENOUGH and not self._told:
            self._told = True
            log.warning(
                "%d examples entered the memory that were in it before, so the stream seems to "
                "repeat, and the memory fills with copies: show each example once (ignore this "
                "where examples are alike by nature)",
                self._again,
            )

    def remember(self, columns: Mapping[str, Tensor], size: int) -> None:
        """The examples of a restored memory."""
        for found in hashes(columns, range(max(0, size - PLACES), size)):
            self._table[found % PLACES] = found
        for found in hashes(columns, range(0, size, -(-size // PLACES))):
            self._keep(found)


def hashes(columns: Mapping[str, Tensor], rows: Sequence[int]) -> list[int]:
    """A hash of each of these rows over all columns, never 0; of no use in another process."""
    parts = []
    for _, tensor in sorted(columns.items()):  # in an order that a file keeps
        places: Sequence[int] = rows
        if tensor.device.type != "cpu":
            tensor = tensor.index_select(0, torch.tensor(rows, device=tensor.device)).cpu()
            places = range(len(rows))
        lines = tensor.reshape(len(tensor), tensor.shape[1:].numel())
        content = lines.contiguous().view(torch.uint8).numpy()
        parts.append([content[place].tobytes() for place in places])
    return [hash(line) or 1 for line in zip(*parts, strict=True)]
