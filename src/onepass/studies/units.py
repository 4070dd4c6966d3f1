"""Units of work and what came out of them, as the rows of a store have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count
from typing import Any

from onepass.files import canonical, digest
from onepass.studies import schema
from onepass.studies.recovery import DamagedError
from onepass.studies.tables import TABLES


@dataclass(frozen=True)
class Unit:
    """A unit of work: one run of one method, named by the hash of its resolved configuration."""

    configuration: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        return digest(canonical(self.configuration))[:16]

    @property
    def method(self) -> str:
        return str(self.configuration["method"])

    @property
    def part(self) -> str:
        return str(self.configuration["part"])

    @property
    def seed(self) -> int:
        return int(self.configuration["seed"])

    @property
    def hyperparameters(self) -> dict[str, float]:
        """The learning rate first, then by name."""
        given = self.configuration["hyperparameters"]
        return {name: given[name] for name in sorted(given, key=_learning_rate_first)}


def _learning_rate_first(name: str) -> tuple[bool, str]:
    return name != "learning_rate", name


@dataclass(frozen=True)
class Provenance:
    """Where and with what a result was made."""

    device: str
    versions: Mapping[str, str]
    revision: str


@dataclass(frozen=True)
class Entry:
    """A unit in the store: its place in the plan, and how it failed, if it did."""

    unit: Unit
    fleet: int
    place: int
    traceback: str | None = None


@dataclass(frozen=True)
class Stored:
    """What came out of a unit, with its provenance."""

    unit: str
    arrays: str  # the file that holds them, which is also named by its hash
    violations: list[int] | None
    seconds: float
    state_bytes: int
    diverged: bool
    provenance: Provenance
    finished: str


@dataclass
class Contents:
    """All rows of a store."""

    study: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    records: dict[str, Stored] = field(default_factory=dict)

    def copy(self) -> Contents:
        return Contents(dict(self.study), dict(self.entries), dict(self.records))

    def free_fleets(self) -> Iterator[int]:
        """Numbers that no fleet has, the smallest first: a stored fleet may have any number."""
        taken = {entry.fleet for entry in self.entries.values()}
        return (number for number in count() if number not in taken)


def fleet_name(units: Sequence[str]) -> str:
    """The name of a fleet of these units, in this order."""
    return digest(canonical(list(units)))[:16]


def by_fleet(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Entries by the number of their fleet, both in the order of the plan."""
    fleets: dict[int, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.fleet, entry.place)):
        fleets.setdefault(entry.fleet, []).append(entry)
    return fleets


def entry_row(entry: Entry) -> tuple[Any, ...]:
    """A row of the table `units`."""
    place = {"fleet": entry.fleet, "place": entry.place, "traceback": entry.traceback}
    schema.check(schema.Place, "the place of a unit", place)
    return entry.unit.id, canonical(entry.unit.configuration), *place.values()


def entry_of(row: Sequence[Any]) -> Entry:
    """The entry in a row of the table `units`, checked."""
    identity, text, fleet, place, traceback = row
    configuration = parsed(text)
    schema.check(schema.Configuration, "the configuration of a unit", configuration)
    given = {"fleet": fleet, "place": place, "traceback": traceback}
    schema.check(schema.Place, "the place of a unit", given)
    shown = None if traceback is None else schema.printable(traceback)
    entry = Entry(Unit(configuration), fleet, place, shown)
    if identity != entry.unit.id:
        raise DamagedError("a unit is not named by its configuration")
    return entry


def stored_row(stored: Stored) -> tuple[Any, ...]:
    """A row of the table `records`."""
    made = stored.provenance
    return (
        stored.unit,
        stored.arrays,
        canonical(stored.violations),
        stored.seconds,
        stored.state_bytes,
        int(stored.diverged),
        made.device,
        canonical(dict(made.versions)),
        made.revision,
        stored.finished,
    )


def stored_of(row: Sequence[Any]) -> Stored:
    """What a row of the table `records` says, checked."""
    values = dict(zip(TABLES["records"], row, strict=True))
    values |= {name: parsed(values[name]) for name in ("violations", "versions")}
    schema.check(schema.Outcome, "a record", values)
    values["provenance"] = Provenance(*(values.pop(one.name) for one in fields(Provenance)))
    return Stored(**values | {"diverged": bool(values["diverged"])})


def parsed(text: Any) -> Any:
    """The value that a JSON text in a row stands for."""
    if not isinstance(text, str):
        raise DamagedError("a value is not text")
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise DamagedError(f"{name} is no number")
