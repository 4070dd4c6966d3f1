"""Settings: fields of frozen dataclasses, each declared once with all that a study has to know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, field, fields
from typing import Any, Literal, TypeVar

Scope = Literal["run", "memory", "joined pass", "computation"]
T = TypeVar("T")


def setting(default: T, *, scope: Scope = "run", later: bool = False) -> T:
    """Return a field with this default.

    `scope` says what the setting belongs to: every run, the episodic memory, a joined pass, or only
    how a result is computed. A unit's configuration has the scopes of its method, and never how it
    is computed. A setting that came `later` than the first studies is left out while it has its
    default, so that the ids of earlier units stay.
    """
    made: T = field(default=default, metadata={"scope": scope, "later": later})
    return made


def of_unit(settings: Any, scopes: Collection[str] = ("run",)) -> dict[str, Any]:
    """Return the settings that belong to a unit's configuration, by name.

    >>> from onepass.protocol import Setup
    >>> of_unit(Setup(stem="7x7"))
    {'hidden': (256, 256), 'stem': '7x7', 'batch_size': 10}
    """
    values = asdict(settings)
    for each in fields(settings):
        usual = each.metadata.get("later", False) and values[each.name] == each.default
        if usual or each.metadata.get("scope", "run") not in scopes:
            del values[each.name]
    return values
