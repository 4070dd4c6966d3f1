"""What the rows of a store may say.

A checksum shows that a row is as it was written, not that onepass has written it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from onepass.studies.recovery import DamagedError

PLANNED = 100_000  # units: every command counts those that are planned
TASKS = 10_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")  # commands of a terminal


def _plain_text(given: str) -> str:
    if _CONTROL.search(given):
        raise ValueError("it has control characters")
    return given


Text = Annotated[str, Field(max_length=10_000), AfterValidator(_plain_text)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**60)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Recipe(_Strict):
    """What every command relies on; the recipe's own class says whether the rest makes sense."""

    name: Text
    stream: Text
    stream_options: dict[Text, Any] = {}
    methods: Annotated[list[Text], Field(min_length=1, max_length=1000)]
    seeds: Count
    cv_seeds: Count
    grids: dict[Text, dict[Text, Annotated[list[Number], Field(min_length=1)]]]
    options: dict[Text, dict[Text, Any]] = {}

    @model_validator(mode="after")
    def _can_be_counted_through(self) -> Recipe:
        planned = 0
        for name in dict.fromkeys(self.methods):  # older versions kept what was given twice
            if name not in self.grids:
                raise ValueError(f"it has no grid for {name}")
            points = math.prod(len(set(values)) for values in self.grids[name].values())
            planned += points * self.cv_seeds + self.seeds
        if planned > PLANNED:
            raise ValueError(f"it plans more than {PLANNED} units")
        return self


class Counts(_Strict):
    units: Index
    records: Index


class Study(_Strict):
    """What a study knows about itself."""

    recipe: Recipe
    counts: Counts
    packing: dict[
        Text, dict[Literal["cv", "ev"], Annotated[list[Count], Field(min_length=2, max_length=2)]]
    ] = {}

    @model_validator(mode="after")
    def _packing_is_of_both_parts(self) -> Study:
        if any(len(parts) != 2 for parts in self.packing.values()):
            raise ValueError("its packing lacks a part")
        return self


class Configuration(_Strict):
    """The configuration of a unit; what else is in it depends on the method."""

    method: Text
    part: Literal["cv", "ev"]
    seed: Index
    hyperparameters: dict[Text, Number]
    __pydantic_extra__: dict[str, Text | int | float | bool | list[Any] | dict[str, Any] | None]

    @model_validator(mode="after")
    def _can_be_learnt_with(self) -> Configuration:
        if "learning_rate" not in self.hyperparameters:
            raise ValueError("it has no learning_rate")
        for key in self.__pydantic_extra__ or {}:
            _plain_text(key)
        return self


class Place(_Strict):
    """Where a unit is in the plan, and how it failed."""

    fleet: Index
    place: Index
    traceback: str | None


class Outcome(_Strict):
    """What came out of a unit."""

    unit: str
    arrays: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.safetensors$")]
    violations: Annotated[list[Bytes], Field(max_length=TASKS)] | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    state_bytes: Bytes
    diverged: Literal[0, 1]
    device: Text
    versions: dict[Text, Text]
    revision: Text
    finished: Text


class Checkpoint(_Strict):
    """What is known of a fleet in the middle of its work, beside its tensors."""

    format: int
    fleet: str
    software: str
    phase: Index
    batches: Index
    numbers: dict[str, Any]
    tensors: str


def check(kind: type[BaseModel], what: str, values: Mapping[str, Any]) -> None:
    """Raise, with the first thing that is wrong, unless the values are what onepass writes."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        why = (where + ": " if where else "") + first["msg"][:200]
        sentence = f"{what} is not what onepass writes: {why}"
        raise DamagedError(_CONTROL.sub("?", sentence)) from None


def printable(text: str) -> str:
    """A text of several lines without the characters that a terminal takes for commands."""
    return "\n".join(
        _CONTROL.sub("\N{REPLACEMENT CHARACTER}", line.expandtabs(8)) for line in text.split("\n")
    )
