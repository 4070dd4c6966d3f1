"""Numbers as tables print them."""

from __future__ import annotations

from collections.abc import Iterable

NONE = "–"


def number(values: Iterable[float], scale: float, digits: int) -> str:
    """A mean, or a mean and a spread.

    >>> number([0.512, 0.01], 100, 1)
    '51.2±1.0'
    """
    return "±".join(f"{value * scale:.{digits}f}" for value in values)


def size(count: int, digits: int = 1) -> str:
    """Bytes, with `digits` digits behind the point of a megabyte.

    >>> size(1_077_288, 2), size(9640)
    ('1.08MB', '9.6kB')
    """
    return f"{count / 1e6:.{digits}f}MB" if count >= 1e5 else f"{count / 1e3:.1f}kB"


def duration(seconds: float) -> str:
    """An estimated time, as precise as such an estimate can be.

    >>> duration(5), duration(200), duration(9000)
    ('5 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
