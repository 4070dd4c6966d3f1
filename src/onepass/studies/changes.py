"""Changes of a recipe by `key=value`; a key is a dotted path, or its unambiguous end."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from onepass.errors import InputError, shortened, unknown
from onepass.learners import METHODS
from onepass.streams import STREAMS

Keys = tuple[str, ...]  # a dotted path, taken apart
# Fields of a recipe that no change sets as a whole.
FIXED = {"name", "summary", "methods", "stream", "stream_options", "grids", "options", "paper"}


def apply_changes(changes: Iterable[str], document: dict[str, Any], names: Iterable[str]) -> None:
    """Set values in a recipe's document, where a recipe has fields of these names."""
    paths = _paths(document["stream"], names)
    for change in changes:
        key, found, text = change.partition("=")
        if not found:
            raise InputError(f"'{change}' does not set anything: write --set key=value")
        path = _resolve(key.strip(), paths)
        value = _parse(key.strip(), text.strip())
        if path[0] == "grids" and not isinstance(value, list):
            value = [value]  # one value is a grid of one
        inner = document
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value


def _paths(stream: str, names: Iterable[str]) -> dict[str, Keys]:
    """Everything that may be set, by its dotted path."""
    paths: list[Keys] = [(name,) for name in names if name not in FIXED]
    if stream in STREAMS:
        paths += [("stream_options", f.name) for f in fields(STREAMS[stream].options)]
    for name, found in METHODS.items():
        paths += [("grids", name, hyper) for hyper in found.hyperparameters]
        paths += [("options", name, f.name) for f in fields(found.learner.options)]
    return {".".join(path): path for path in paths}


def _resolve(key: str, paths: Mapping[str, Keys]) -> Keys:
    if key in paths:
        return paths[key]
    if key in FIXED:
        raise InputError(
            f"'{key}' belongs to the recipe and cannot be set:"
            " choose another recipe, or its parts by --methods, --seeds and longer keys"
        )
    ends = [path for name, path in paths.items() if name.endswith("." + key)]
    if len(ends) == 1:
        return ends[0]
    if ends:
        could_be = " or ".join(".".join(path) for path in ends)
        raise InputError(f"'{key}' could be {could_be}: write the whole path")
    options = {path[-1] for path in paths.values() if path[0] in ("stream_options", "options")}
    raise unknown("key", key, {*paths, *options})


def _parse(key: str, text: str) -> Any:
    """A TOML value; anything that is not one is a string."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):  # from the limits of Python's reader
        short = shortened(text, 100)
        raise InputError(
            f"{key}={short} is not valid: it has too many digits or brackets"
        ) from None
    if len(document) > 1:  # what follows on further lines would be lost
        return text
    return document["value"]
