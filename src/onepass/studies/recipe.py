"""Recipes: a study as data. What to train on what, with which grid, how often."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, get_type_hints

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from onepass.errors import InputError, shortened, shown, unknown
from onepass.learners import METHODS, method
from onepass.protocol import Setup
from onepass.streams import stream
from onepass.studies.changes import apply_changes
from onepass.studies.options import LARGEST, Count, read_options, with_types
from onepass.studies.paper import FOLDER, KNOWN_DIFFERENCES, Model, Paper

Value = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
Grid = dict[str, Annotated[list[Value], Field(min_length=1)]]

MOST_UNITS = 100_000  # of a study: all are planned, and named, before the first is trained
GROWING = {"methods", "seeds", "cv_seeds", "grids", "options"}  # what a study may get more of
OF_THE_PACKAGE = {"summary", "paper"}  # of a recipe's fields, what no study keeps


class _Plan(Model):
    """What a recipe says before its settings."""

    name: str
    summary: str
    stream: str
    stream_options: dict[str, Any] = {}
    methods: list[str]
    seeds: Count = 5
    cv_seeds: Count = 1


def _strict(settings: type) -> dict[str, Any]:
    """The settings of a dataclass as fields of a model that takes no type for another."""
    strict = {int: Count, bool: Switch, tuple[int, ...]: list[Count]}
    types = get_type_hints(settings)
    return {
        f.name: (
            strict.get(types[f.name], types[f.name]),
            list(f.default) if isinstance(f.default, tuple) else f.default,
        )
        for f in fields(settings)
    }


_PlanAndSetup: Any = create_model("_PlanAndSetup", __base__=_Plan, **_strict(Setup))


class Recipe(_PlanAndSetup, _Plan):  # type: ignore[misc]
    """A study: a stream, methods with their grids, and the settings that all runs share (`Setup`).

    `cv_seeds` is how many seeds each grid point is tried with on `D^CV`; `seeds` how many runs the
    chosen one gets on `D^EV`.
    """

    grids: dict[str, Grid] = Field(default={}, validate_default=True)
    options: dict[str, dict[str, Any]] = {}
    paper: Paper = Paper()

    @field_validator("methods", mode="after")
    @classmethod
    def _each_method_once(cls, given: list[str]) -> list[str]:
        return list(dict.fromkeys(given))

    @field_validator("grids", mode="after")
    @classmethod
    def _every_method_has_a_grid(cls, given: dict[str, Grid]) -> dict[str, Grid]:
        """Each value once: a grid point that is there twice would be waited for twice."""
        once = {
            name: {hyper: list(dict.fromkeys(values)) for hyper, values in grid.items()}
            for name, grid in given.items()
        }
        return once | {name: found.grid | once.get(name, {}) for name, found in METHODS.items()}

    @model_validator(mode="after")
    def _is_possible(self) -> Recipe:
        if not self.methods:
            raise InputError("a study needs at least one method")
        self.make_stream_options()
        self.setup().check(stream(self.stream).kind.shape)
        for name in self.methods:
            self._check_method(name)
        for name in self.options:
            self.method_options(name)
        self.check_size()
        return self

    def _check_method(self, name: str) -> None:
        found, grid = method(name), self.grids[name]
        if found.learner.needs.own_classes and not stream(self.stream).kind.own_classes:
            raise InputError(
                f"{name} needs a stream whose tasks have classes of their own,"
                f" such as split-digits, and {self.stream} has not"
            )
        expected = set(found.hyperparameters)
        if set(grid) != expected:
            raise InputError(
                f"the grid of '{name}' must name {', '.join(sorted(expected))},"
                f" not {', '.join(sorted(grid))}"
            )
        if min(grid["learning_rate"]) <= 0:
            raise InputError(
                f"grids.{name}.learning_rate={grid['learning_rate']} is not valid:"
                " learning rates must be above 0"
            )

    def check_size(self) -> None:
        """Refuse more units of work than can be planned."""
        grid = sum(math.prod(map(len, self.grids[name].values())) for name in self.methods)
        units = grid * self.cv_seeds + len(self.methods) * self.seeds
        if units > MOST_UNITS:
            raise InputError(
                f"a study of {units} units is too large: up to {MOST_UNITS} can be planned;"
                " use fewer seeds, cv_seeds or grid points"
            )

    def make_stream_options(self) -> Any:
        return read_options(stream(self.stream).options, self.stream_options)

    def method_options(self, name: str) -> Any:
        return read_options(method(name).learner.options, self.options.get(name, {}))

    def setup(self) -> Setup:
        settings = {f.name: getattr(self, f.name) for f in fields(Setup)}
        return Setup(**settings | {"hidden": tuple(settings["hidden"])})

    def stored(self) -> dict[str, Any]:
        """What a study keeps of it. What the paper says is not part of a study."""
        return self.model_dump(mode="json", exclude=OF_THE_PACKAGE)

    def changes(self) -> list[str]:
        """What is set differently from the recipe of this name, besides how much of it is done."""
        if self.name not in names():
            return []
        original = Recipe(**read(self.name))
        usual = original.stored()
        found = []
        for key, value in self.stored().items():
            if key == "stream_options":
                found += _differences(self.make_stream_options(), original.make_stream_options())
            elif key == "options":
                for name in self.methods:
                    mine, theirs = self.method_options(name), original.method_options(name)
                    found += [f"options.{name}.{each}" for each in _differences(mine, theirs)]
            elif key not in GROWING and value != usual[key]:
                found.append(f"{key}={value}")
        return found


def _differences(options: Any, usual: Any) -> list[str]:
    theirs = asdict(usual)
    return [f"{name}={mine}" for name, mine in asdict(options).items() if mine != theirs[name]]


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(
        f.name.removesuffix(".toml")
        for f in FOLDER.iterdir()
        if f.name.endswith(".toml") and f.name != KNOWN_DIFFERENCES
    )


def read(name: str) -> dict[str, Any]:
    """A recipe's document, as written."""
    if name not in names():
        raise unknown("recipe", name, names())
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def load(
    name: str,
    changes: list[str] | None = None,
    methods: str | None = None,
    seeds: int | None = None,
    stored: Mapping[str, Any] | None = None,
) -> Recipe:
    """A recipe with changes of the form `key=value`.

    With the recipe of a `stored` study, the changes are made to that one.
    """
    document = {**read(name), **with_types(_kept(stored or {}))}
    if methods is not None:
        chosen = [m.strip() for m in methods.split(",") if m.strip()]
        if chosen == ["all"]:
            chosen = all_methods(document["stream"])
        for wanted in chosen:
            method(wanted)
        document["methods"] = list(dict.fromkeys(chosen))
    if seeds is not None:
        document["seeds"] = seeds
    apply_changes(changes or [], document, Recipe.model_fields)
    return _made(document)


def _made(document: dict[str, Any]) -> Recipe:
    try:
        return Recipe(**document)
    except ValidationError as error:
        raise InputError(_sentence(error)) from None


def grown(stored: Recipe, asked: Recipe) -> Recipe:
    """The recipe of a study with what is asked for now.

    A grid that lacks what was tried already is refused: the choice would not be its own.
    """
    both = united(stored, asked)
    for name in set(stored.methods) & set(asked.methods):
        for hyper, values in stored.grids[name].items():
            lost = [value for value in values if value not in asked.grids[name][hyper]]
            if lost:
                raise InputError(
                    f"{hyper} = {lost[0]:g} of {name} was tried already, and a grid may only grow"
                )
    return both


def united(one: Recipe, other: Recipe) -> Recipe:
    """What two studies have together: their methods, the larger number of seeds, all grid points.

    The rest must be the same. Each brings the grids and options of its own methods.
    """
    first, second = one.stored(), other.stored()
    for key, value in first.items():
        if key not in GROWING and second[key] != value:
            raise InputError(f"{key} = {shown(value)}, not {shown(second[key])}")
    both = set(one.methods) & set(other.methods)
    for name in both:
        if one.method_options(name) != other.method_options(name):
            mine, theirs = (shown(recipe["options"].get(name, {})) for recipe in (first, second))
            raise InputError(f"options of {name} = {mine}, not {theirs}")
    own = [name for name in one.methods if name not in both]
    grids = other.grids | {name: one.grids[name] for name in own}
    grids |= {name: _joined(one.grids[name], other.grids[name]) for name in both}
    options = {name: chosen for name, chosen in other.options.items() if name not in own}
    options |= {name: one.options[name] for name in own if name in one.options}
    together = other.model_copy(
        update={
            "methods": list(dict.fromkeys([*one.methods, *other.methods])),
            "grids": grids,
            "options": options,
            "seeds": max(one.seeds, other.seeds),
            "cv_seeds": max(one.cv_seeds, other.cv_seeds),
        }
    )
    together.check_size()
    return together


def _joined(one: Grid, other: Grid) -> Grid:
    return {
        key: list(dict.fromkeys([*one.get(key, []), *other.get(key, [])])) for key in one | other
    }


def from_stored(stored: Mapping[str, Any]) -> Recipe:
    """The recipe of a study, with what the paper says about it today."""
    document: dict[str, Any] = {"summary": "", "paper": {}}
    kept = _kept(stored)
    if kept.get("name") in names():
        document |= {key: value for key, value in read(kept["name"]).items() if key in document}
    return _made(document | with_types(kept))


def _kept(stored: Any) -> dict[str, Any]:
    """What a study says about its recipe.

    What the paper says is the package's alone: a study would else be verified against itself.
    """
    if not isinstance(stored, Mapping):
        raise InputError(f"a recipe has settings with names, and {shown(stored)} has none")
    return {key: value for key, value in stored.items() if key not in OF_THE_PACKAGE}


def all_methods(stream_name: str) -> list[str]:
    """Every method that makes sense for a stream."""
    own_classes = stream(stream_name).kind.own_classes
    return [
        name
        for name, found in METHODS.items()
        if own_classes or not found.learner.needs.own_classes
    ]


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    if isinstance(first.get("ctx", {}).get("error"), InputError):
        return str(first["ctx"]["error"])
    where = ".".join(shortened(str(part), 100) for part in first["loc"]) or "the recipe"
    why = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}={shown(first['input'])} is not valid: {why}"
