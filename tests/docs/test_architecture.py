"""docs/architecture.md names what is there, and its picture is that of the imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["draw"] = made  # where dataclasses look for their module
    spec.loader.exec_module(made)
    return made


DRAW = script()
NAMED = [name for way in DRAW.ways(DRAW.PAGE.read_text(encoding="utf-8")) for name in way]


def test_the_picture_is_that_of_the_imports_and_of_the_page() -> None:
    assert DRAW.PICTURE.read_text(encoding="utf-8") == DRAW.picture()


def test_the_page_has_two_ways_through_the_rooms() -> None:
    assert len(DRAW.ways(DRAW.PAGE.read_text(encoding="utf-8"))) == 2
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_a_function_that_the_page_names_exists(name: str) -> None:
    parts = name.split(".")
    package = 1 + sum(part.islower() for part in parts[:-1])
    module = importlib.import_module(".".join(["onepass", *parts[: package - 1]]))
    assert callable(reduce(getattr, parts[package - 1 :], module))


def test_an_arrow_that_follows_from_others_is_not_drawn() -> None:
    below = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert DRAW.needed(below) == {("a", "b"), ("b", "c")}
