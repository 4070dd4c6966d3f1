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
_HINTS = get_type_hints(Memory)
_FIELDS: Any = {f.name: (_HINTS[f.name], f.default) for f in dataclasses.fields(Memory)}
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


class SavedFleet(Part):
    partial: Annotated[int, Field(ge=0, le=1)]
    generation: Count
    number: Count


class SavedMemory(Part):
    """What a memory counts with: `groups` of (task, class, rows, examples that passed by)."""

    task: Count
    number: Count
    groups: list[tuple[Count, Annotated[int, Field(gt=-LARGE, lt=LARGE)], Count, Count]]
    quota: list[tuple[Count, Annotated[int, Field(ge=0)]]]


class SavedExamples(Part):
    """The type and the shape of every input and of the target of an example."""

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
    fleet: SavedFleet
    learner: dict[str, Count]
    memory: SavedMemory | None
    outputs: Annotated[int, Field(ge=2, lt=LARGE)] | None
    examples: SavedExamples | None
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
        place = ascii(".".join(str(part) for part in first["loc"]))[1:-1][:80]
        raise AlteredError(f"{place} in its header: {first['msg'][:80]}") from None
    for sound, what in _agreements(header):
        if not sound:
            raise AlteredError(f"{what} in its header")
    return header


def _agreements(header: Header) -> list[tuple[bool, str]]:
    settings, number, classifies = header.settings, header.fleet.number, not header.own_loss
    names = [name for name, _ in settings.tasks or ()]
    free, task = settings.task_free, header.task
    rate, driven = settings.learning_rate, header.optimizer is not None
    return [
        (settings.method in METHODS, "the method"),
        (settings.precision in PRECISIONS, "the precision"),
        (settings.tasks != [], "the tasks"),
        (len(set(names)) == len(names), "the names of the tasks"),
        (-(2**63) <= settings.seed < 2**63, "the seed"),
        ((rate is None) == driven, "the learning rate"),
        (settings.grow is False or (classifies and settings.grow is not True), "grow"),
        (header.segment + header.batches <= number, "the number of batches"),
        (not free or (header.batches == number and task is None), "the task"),
        (task is None or header.batches > 0, "the task"),
        (not names or header.batches == 0 or task in names, "the task"),
        ((header.outputs is not None) == (number > 0 and classifies), "the number of outputs"),
        ((header.examples is not None) == (number > 0), "the kind of the examples"),
        *_about_examples(header),
        (number > 0 or not header.replays, "the sizes of batches"),
        (len({group for group, _ in header.best}) == len(header.best), "the best scores"),
    ]


def _about_examples(header: Header) -> list[tuple[bool, str]]:
    if header.examples is None:
        return []
    kinds, names = header.examples.kinds, header.examples.keywords
    sizes = [math.prod(max(n, 1) for n in shape) for _, shape in kinds]
    labels = header.own_loss or kinds[-1] == ("int64", [])
    return [
        (all(KINDS.get(kind) in KEPT for kind, _ in kinds), "the kind of the examples"),
        (all(size < 2**59 for size in sizes), "the shape of the examples"),
        (labels, "the kind of the labels"),
        (len(names) in (0, len(kinds) - 1), "the names of the inputs"),
        (len(set(names)) == len(names), "the names of the inputs"),
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
            what = "was saved with its memory on disk, and only you can say where that may be"
            how = "give where='disk' and folder='…', or where='cpu' or where='module'"
            raise InputError(f"{path} {what}: {how}")
    return Memory(**header.plan | {"where": where, "folder": folder})
