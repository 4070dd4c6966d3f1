"""What the header of a saved learner may say: its schema.

What a file says is data about the learner, and nothing else is taken from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model

from onepass.errors import InputError, first_line
from onepass.learners import METHODS
from onepass.live.container import AlteredError
from onepass.live.inputs import KEPT, KINDS, Examples
from onepass.live.plan import Memory
from onepass.live.settings import PRECISIONS, Name, read_settings, read_tasks

LARGE = 2**53  # more batches or examples than any stream has
Count = Annotated[int, Field(ge=0, lt=LARGE)]
Length = Annotated[int, Field(ge=0, lt=2**59)]  # of an example's dimension


class Part(BaseModel):
    """A part of the header: exactly these keys and types, and no number that is not finite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


# A field of `Memory` that a file does not have is at its default.
_FIELDS: Any = {
    f.name: (get_type_hints(Memory)[f.name], f.default) for f in dataclasses.fields(Memory)
}
Plan: type[Part] = create_model("Plan", __base__=Part, **_FIELDS)


class Settings(Part):
    method: str
    learning_rate: float | None
    tasks: list[tuple[Name, list[Count]]] | None
    task_free: bool
    grow: bool | str
    memory: Plan  # type: ignore[valid-type]
    precision: str
    seed: int
    own: dict[str, JsonValue]


class SavedOptimizer(Part):
    kind: str
    groups: list[dict[str, JsonValue]]
    numbers: dict[str, JsonValue]


class Fleet(Part):
    partial: Annotated[int, Field(ge=0, le=1)]
    generation: Count
    number: Count


class Kept(Part):
    """What a memory counts with: `groups` of (task, class, rows, examples that passed by)."""

    task: Count
    number: Count
    groups: list[tuple[Count, Annotated[int, Field(gt=-LARGE, lt=LARGE)], Count, Count]]
    quota: list[tuple[Count, Annotated[int, Field(ge=0)]]]


class Looks(Part):
    """What examples look like: type and shape of every input and of the target."""

    kinds: Annotated[list[tuple[str, list[Length]]], Field(min_length=2)]
    keywords: list[str]

    def examples(self) -> Examples:
        kinds = [(KINDS[kind], tuple(shape)) for kind, shape in self.kinds]
        return Examples(tuple(kinds[:-1]), tuple(self.keywords), kinds[-1])


class Header(Part):
    format: Literal[1]
    settings: Settings
    own_loss: bool
    optimizer: SavedOptimizer | None
    fleet: Fleet
    learner: dict[str, Count]
    memory: Kept | None
    outputs: Annotated[int, Field(ge=2, lt=LARGE)] | None
    examples: Looks | None
    replays: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=4)]
    segment: Annotated[int, Field(ge=0, lt=2**31)]
    batches: Count
    task: Name | None
    best: list[tuple[int, float]]
    tensors: str

    @property
    def tasks(self) -> dict[Name, list[int]] | None:
        return None if self.settings.tasks is None else dict(self.settings.tasks)

    @property
    def plan(self) -> dict[str, Any]:
        """The fields of `Memory` as they were."""
        return dict(self.settings.memory)


def read_header(about: Mapping[str, Any]) -> Header:
    """The header, if it is one and its parts agree with each other."""
    try:
        header = Header.model_validate_json(json.dumps(about))  # as JSON, where a tuple is a list
    except ValidationError as reason:
        first = reason.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise AlteredError(
            f"{ascii(place)[1:-1][:80]} in its header: {first['msg'][:80]}"
        ) from None
    for sound, what in _agreements(header):
        if not sound:
            raise AlteredError(f"{what} in its header")
    return header


def _agreements(header: Header) -> list[tuple[bool, str]]:
    settings, number, classifies = header.settings, header.fleet.number, not header.own_loss
    begun, names = number > 0, [name for name, _ in settings.tasks or ()]
    looks = header.examples
    return [
        (settings.method in METHODS, "the method"),
        (settings.precision in PRECISIONS, "the precision"),
        (settings.tasks != [], "the tasks"),
        (len(set(names)) == len(names), "the names of the tasks"),
        (-(2**63) <= settings.seed < 2**63, "the seed"),
        ((settings.learning_rate is None) == (header.optimizer is not None), "the learning rate"),
        (settings.grow is False or (classifies and settings.grow is not True), "grow"),
        (header.segment + header.batches <= number, "the number of batches"),
        (not settings.task_free or (header.batches == number and header.task is None), "the task"),
        (header.task is None or header.batches > 0, "the task"),
        (not names or header.batches == 0 or header.task in names, "the task"),
        ((header.outputs is not None) == (begun and classifies), "the number of outputs"),
        ((looks is not None) == begun, "the kind of the examples"),
        (
            looks is None or all(KINDS.get(kind) in KEPT for kind, _ in looks.kinds),
            "the kind of the examples",
        ),
        (
            looks is None
            or all(math.prod(max(n, 1) for n in shape) < 2**59 for _, shape in looks.kinds),
            "the shape of the examples",
        ),
        (
            looks is None or not classifies or looks.kinds[-1] == ("int64", []),
            "the kind of the labels",
        ),
        (
            looks is None or len(looks.keywords) in (0, len(looks.kinds) - 1),
            "the names of the inputs",
        ),
        (
            looks is None or len(set(looks.keywords)) == len(looks.keywords),
            "the names of the inputs",
        ),
        (begun or not header.replays, "the sizes of batches"),
        (len({group for group, _ in header.best}) == len(header.best), "the best scores"),
    ]


def check_settings(header: Header) -> dict[str, Any]:
    """The hyper-parameters and options of the method, by its own rules.

    A name that is not one of them is refused, whatever else it names.
    """
    own = dict(header.settings.own)
    try:
        read_settings(header.settings.method, own)
        read_tasks(header.tasks)
        Memory(**header.plan | {"where": "module", "folder": None})
    except InputError as reason:
        raise AlteredError(f"in its header, {ascii(first_line(reason))[1:100]}") from None
    return own


def placed(header: Header, given: Mapping[str, Any], path: str) -> Memory:
    """The memory as it was, in the place that the caller says.

    Only a place that needs no folder may come from the file.
    """
    where, folder = given.get("where"), given.get("folder")
    if where is None:
        where = header.plan["where"]
        if where == "disk" and folder is None:
            raise InputError(
                f"{path} was saved with its memory on disk, and only you can say where that may be: give where='disk' and folder='…', "
                "or where='cpu' or where='module'"
            )
    return Memory(**header.plan | {"where": where, "folder": folder})
