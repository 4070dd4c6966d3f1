"""Recipes: a study as data. What to train on what, with which grid, how often."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from onepass.engine.gradients import Mode
from onepass.errors import InputError, shortened, shown, unknown
from onepass.learners import METHODS, method
from onepass.memory import Policy
from onepass.models import Kind
from onepass.models.initial import Initialisation
from onepass.models.norm import Constants
from onepass.models.resnet import Stem
from onepass.protocol import Setup
from onepass.streams import STREAMS, stream
from onepass.studies.options import LARGEST, read_options, with_types

Value = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(gt=0, le=2**31, strict=True)]
MOST_UNITS = 100_000  # of a study: all are planned, and named, before the first is trained
Product = Annotated[str, Field(pattern=r"^[PBHMT](\*[PBHMT])*$")]


KNOWN_DIFFERENCES = "known-differences.toml"
GROWING = {"methods", "seeds", "cv_seeds", "grids", "options"}  # what a study may get more of
OF_THE_PACKAGE = {"summary", "paper"}  # of a recipe's fields, what no study keeps
FIXED = {
    "name",
    "summary",
    "methods",
    "stream",
    "stream_options",
    "grids",
    "options",
    "paper",
}  # of a recipe's fields, not for --set


class Companions(BaseModel):
    """The paper's side tables: training `seconds` a run, steps with a violated constraint a task, and what a method holds while it trains.

    `state` is a sum in numbers of 4 bytes, a factor a product: `2*P + M*H` is `{ P = 2, "M*H" = 1 }`. P are the parameters, B the examples of
    a batch, H the hidden units of the network, M the examples of the episodic memory, T the tasks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    violations: dict[str, list[Annotated[int, Field(ge=0, strict=True)]]] = {}
    state: dict[str, Annotated[dict[Product, Count], Field(min_length=1)]] = {}

    @field_validator("seconds", "violations", "state", mode="after")
    @classmethod
    def _methods_exist(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            method(name)
        return given


class Paper(BaseModel):
    """What the paper reports for a stream: the hyper-parameters it chose, and `[mean]` or `[mean, standard deviation]` a metric.

    The spread is a population standard deviation over `runs` runs. That a method diverged or ran out of memory is a result too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    runs: Count = 5
    selected: dict[str, dict[str, float]] = {}
    published: dict[str, dict[str, list[float]] | Literal["diverged", "out of memory"]] = {}
    companions: Companions = Companions()


class KnownDifference(BaseModel):
    """A result that is not the published one, and the experiment that shows why."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    method: str
    metric: str
    explanation: str
    experiment: str  # the command, and where its outcome is written down


class Recipe(BaseModel):
    """A study: a stream, methods with their grids, and everything that all runs share.

    `cv_seeds` is how many seeds each grid point is tried with on `D^CV`; `seeds` how many runs the chosen one gets on `D^EV`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    summary: str
    stream: str
    stream_options: dict[str, Any] = {}
    methods: list[str]
    seeds: Count = 5
    cv_seeds: Count = 1
    network: Kind = "mlp"
    hidden: list[Count] = [256, 256]
    stem: Stem = "3x3"
    batch_norm: Constants = "torch"
    initialisation: Initialisation = "normal"
    batch_size: Count = 10
    memory_per_task: Count = 250
    memory: Policy = "class-reservoir"
    memory_includes_current_task: Switch = False
    memory_with_replacement: Switch = False
    union_softmax: Switch = True
    gradients: Mode = "auto"
    tf32: Switch = True
    grids: dict[str, dict[str, Annotated[list[Value], Field(min_length=1)]]] = Field(
        default={}, validate_default=True
    )
    options: dict[str, dict[str, Any]] = {}
    paper: Paper = Paper()

    @field_validator("methods", mode="after")
    @classmethod
    def _each_method_once(cls, given: list[str]) -> list[str]:
        return list(dict.fromkeys(given))

    @field_validator("grids", mode="after")
    @classmethod
    def _every_method_has_a_grid(
        cls, given: dict[str, dict[str, list[float]]]
    ) -> dict[str, dict[str, list[float]]]:
        """Each value once: a grid point that is there twice would be waited for twice."""
        once = {
            name: {hyper: list(dict.fromkeys(values)) for hyper, values in grid.items()}
            for name, grid in given.items()
        }
        return once | {name: found.grid | once.get(name, {}) for name, found in METHODS.items()}

    @model_validator(mode="after")
    def _names_exist(self) -> Recipe:
        if not self.methods:
            raise InputError("a study needs at least one method")
        self.make_stream_options()
        self.setup().model().check(stream(self.stream).image)
        for name in self.methods:
            expected = set(method(name).hyperparameters)
            if method(name).learner.needs.own_classes and not stream(self.stream).own_classes:
                raise InputError(
                    f"{name} needs a stream whose tasks have classes of their own, such as split-digits, and {self.stream} has not"
                )
            if set(self.grids[name]) != expected:
                raise InputError(
                    f"the grid of '{name}' must name {', '.join(sorted(expected))}, not {', '.join(sorted(self.grids[name]))}"
                )
            if min(self.grids[name]["learning_rate"]) <= 0:
                raise InputError(
                    f"grids.{name}.learning_rate={self.grids[name]['learning_rate']} is not valid: learning rates must be above 0"
                )
        for name in self.options:
            self.method_options(name)
        self.check_size()
        return self

    def check_size(self) -> None:
        """Refuse more units of work than can be planned."""
        grid = sum(math.prod(map(len, self.grids[name].values())) for name in self.methods)
        units = grid * self.cv_seeds + len(self.methods) * self.seeds
        if units > MOST_UNITS:
            raise InputError(
                f"a study of {units} units is too large: up to {MOST_UNITS} can be planned; use fewer seeds, cv_seeds or grid points"
            )

    def make_stream_options(self) -> Any:
        return read_options(stream(self.stream).options, self.stream_options)

    def method_options(self, name: str) -> Any:
        return read_options(method(name).learner.options, self.options.get(name, {}))

    def stored(self) -> dict[str, Any]:
        """What a study keeps of it. What the paper says is not part of a study."""
        return self.model_dump(mode="json", exclude=OF_THE_PACKAGE)

    def changes(self) -> list[str]:
        """What is set differently from the recipe of this name, besides how much of it is done."""
        if self.name not in names():
            return []
        original = Recipe(**read(self.name))
        found = []
        for key, value in self.stored().items():
            if key == "stream_options":
                mine, theirs = (
                    dataclasses.asdict(recipe.make_stream_options()) for recipe in (self, original)
                )
                found += [f"{name}={mine[name]}" for name in mine if mine[name] != theirs[name]]
            elif key == "options":
                for name in self.methods:
                    mine, theirs = (
                        dataclasses.asdict(recipe.method_options(name))
                        for recipe in (self, original)
                    )
                    found += [
                        f"options.{name}.{option}={mine[option]}"
                        for option in mine
                        if mine[option] != theirs[option]
                    ]
            elif key not in GROWING and value != original.stored()[key]:
                found.append(f"{key}={value}")
        return found

    def setup(self) -> Setup:
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Setup)}
        return Setup(**shared | {"hidden": tuple(self.hidden)})


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(
        f.name.removesuffix(".toml")
        for f in _folder().iterdir()
        if f.name.endswith(".toml") and f.name != KNOWN_DIFFERENCES
    )


def _folder() -> Any:
    return resources.files("onepass.studies") / "recipes"


def known_differences(name: str) -> list[KnownDifference]:
    """Those of one recipe."""
    document = tomllib.loads((_folder() / KNOWN_DIFFERENCES).read_text(encoding="utf-8"))
    return [
        known
        for entry in document.get("difference", [])
        if (known := KnownDifference(**entry)).recipe == name
    ]


def read(name: str) -> dict[str, Any]:
    """A recipe's document, as written."""
    if name not in names():
        raise unknown("recipe", name, names())
    return tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))


def load(
    name: str,
    changes: list[str] | None = None,
    methods: str | None = None,
    seeds: int | None = None,
    stored: Mapping[str, Any] | None = None,
) -> Recipe:
    """A recipe with changes of the form `key=value`; a key is a path such as `grids.van.learning_rate` or its unambiguous end.

    With the recipe of a `stored` study, the changes are made to that one.
    """
    document = {**read(name), **with_types(_kept(stored or {}))}
    if methods is not None:
        chosen = [m.strip() for m in methods.split(",") if m.strip()]
        document["methods"] = (
            all_methods(document["stream"])
            if chosen == ["all"]
            else list(dict.fromkeys(method_name(m) for m in chosen))
        )
    if seeds is not None:
        document["seeds"] = seeds
    paths = _paths(document)
    for change in changes or []:
        key, found, value = change.partition("=")
        if not found:
            raise InputError(f"'{change}' does not set anything: write --set key=value")
        _assign(document, _resolve(key.strip(), paths), _parse(key.strip(), value.strip()))
    try:
        return Recipe(**document)
    except ValidationError as error:
        raise InputError(_sentence(error)) from None


def grown(stored: Recipe, asked: Recipe) -> Recipe:
    """The recipe of a study with what is asked for now. A grid that lacks what was tried already is refused: the choice would not be its own."""
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
    """What two studies have together: their methods, the larger number of seeds, all their grid points. The rest must be the same.

    Each brings the grids and options of its own methods.
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
    grids = {
        **other.grids,
        **{name: one.grids[name] for name in own},
        **{name: _joined(one.grids[name], other.grids[name]) for name in both},
    }
    options = {
        **{name: chosen for name, chosen in other.options.items() if name not in own},
        **{n: one.options[n] for n in own if n in one.options},
    }
    counts = {key: max(first[key], second[key]) for key in ("seeds", "cv_seeds")}
    methods = list(dict.fromkeys([*one.methods, *other.methods]))
    together = other.model_copy(
        update={"methods": methods, "grids": grids, "options": options, **counts}
    )
    together.check_size()
    return together


def _joined(
    one: Mapping[str, list[float]], other: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    keys = [*one, *(key for key in other if key not in one)]
    return {key: list(dict.fromkeys([*one.get(key, []), *other.get(key, [])])) for key in keys}


def from_stored(stored: Mapping[str, Any]) -> Recipe:
    """The recipe of a study, with what the paper says about it today."""
    document: dict[str, Any] = {"summary": "", "paper": {}}
    kept = _kept(stored)
    if kept.get("name") in names():
        document |= {key: value for key, value in read(kept["name"]).items() if key in document}
    try:
        return Recipe(**document | with_types(kept))
    except ValidationError as error:
        raise InputError(_sentence(error)) from None


def _kept(stored: Any) -> dict[str, Any]:
    """What a study says about its recipe. What the paper says is the package's alone: a study would else be verified against itself."""
    if not isinstance(stored, Mapping):
        raise InputError(f"a recipe has settings with names, and {shown(stored)} has none")
    return {key: value for key, value in stored.items() if key not in OF_THE_PACKAGE}


def all_methods(stream_name: str) -> list[str]:
    """Every method that makes sense for a stream."""
    return [
        name
        for name, found in METHODS.items()
        if stream(stream_name).own_classes or not found.learner.needs.own_classes
    ]


def method_name(name: str) -> str:
    method(name)
    return name


def _paths(document: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Everything that may be set, as dotted paths."""
    keys: list[tuple[str, ...]] = [(name,) for name in Recipe.model_fields if name not in FIXED]
    if document["stream"] in STREAMS:
        keys += [
            ("stream_options", f.name)
            for f in dataclasses.fields(STREAMS[document["stream"]].options)
        ]
    for name, found in METHODS.items():
        keys += [("grids", name, hyper) for hyper in found.hyperparameters]
        keys += [("options", name, f.name) for f in dataclasses.fields(found.learner.options)]
    return {".".join(path): path for path in keys}


def _resolve(key: str, paths: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if key in paths:
        return paths[key]
    if key in FIXED:
        raise InputError(
            f"'{key}' belongs to the recipe and cannot be set: choose another recipe, or its parts by --methods, --seeds and longer keys"
        )
    ends = [path for name, path in paths.items() if name.endswith("." + key)]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise InputError(
            f"'{key}' could be {' or '.join('.'.join(path) for path in ends)}: write the whole path"
        )
    raise unknown(
        "key",
        key,
        {
            *paths,
            *(path[-1] for path in paths.values() if path[0] in ("stream_options", "options")),
        },
    )


def _parse(key: str, value: str) -> Any:
    """A TOML value; anything that is not one is a string."""
    try:
        document = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    except (
        ValueError,
        RecursionError,
    ):  # more digits than Python reads, more brackets than it can follow
        raise InputError(
            f"{key}={shortened(value, 100)} is not valid: it has too many digits or brackets"
        ) from None
    return (
        document["value"] if len(document) == 1 else value
    )  # what follows on further lines would be lost


def _assign(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document.setdefault(key, {})
    document[path[-1]] = (
        [value] if path[0] == "grids" and not isinstance(value, list) else value
    )  # one value is a grid of one


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    if isinstance(first.get("ctx", {}).get("error"), InputError):
        return str(first["ctx"]["error"])
    where = ".".join(shortened(str(part), 100) for part in first["loc"])
    return f"{where or 'the recipe'}={shown(first['input'])} is not valid: {first['msg'][0].lower()}{first['msg'][1:]}"
