"""Which settings belong to a unit of work, and so to its id."""

from __future__ import annotations

from dataclasses import fields

import pytest

from onepass.protocol import Setup
from onepass.studies import recipe
from onepass.studies.results import cross_validation


def ids(of: recipe.Recipe, method: str) -> list[str]:
    return [unit.id for unit in cross_validation(of, method)]


def test_a_recipe_has_the_settings_of_a_setup_in_their_order_between_its_own() -> None:
    settings = [field.name for field in fields(Setup)]
    before = ["name", "summary", "stream", "stream_options", "methods", "seeds", "cv_seeds"]
    assert list(recipe.Recipe.model_fields) == [*before, *settings, "grids", "options", "paper"]
    least = recipe.Recipe(name="n", summary="s", stream="permuted-digits", methods=["van"])
    assert least.setup() == Setup()


SHARED = {"hidden", "batch_size", "stream", "stream_options", "part", "method", "options"}
SHARED |= {"hyperparameters", "seed"}
OF_MEMORY = {field.name for field in fields(Setup) if field.name.startswith("memory")}


@pytest.mark.parametrize(
    ("method", "changes", "more"),
    [
        ("van", [], set()),
        ("van", ["gradients=looped", "memory_per_task=7", "union_softmax=false"], set()),
        ("a-gem", [], OF_MEMORY),
        ("multi-task", [], {"union_softmax"}),
        ("van", ["tf32=false", "batch_norm=authors"], {"tf32", "batch_norm"}),
    ],
)
def test_a_unit_has_the_settings_that_matter_to_it_and_later_ones_where_they_are_changed(
    method: str, changes: list[str], more: set[str]
) -> None:
    unit, *_ = cross_validation(recipe.load("permuted-mnist", changes), method)
    assert unit.configuration.keys() == SHARED | more
    assert "leaking" not in unit.configuration["stream_options"]


def test_later_options_are_in_a_unit_where_they_are_changed() -> None:
    changes = ["leaking=true", "lateral_biases=false"]
    unit, *_ = cross_validation(recipe.load("permuted-mnist", changes), "prog-nn")
    assert unit.configuration["stream_options"]["leaking"] is True
    assert "lateral_biases" not in unit.configuration["options"]


@pytest.mark.parametrize(
    ("name", "changes", "method", "expected"),
    [
        ("permuted-mnist", [], "van", "26dc44d4bb2d603e"),
        ("permuted-mnist", ["leaking=true"], "prog-nn", "db5430b3475c77ce"),
        ("permuted-mnist", ["tf32=false"], "a-gem", "995ec8b6f09a0987"),
        ("permuted-digits", [], "multi-task", "6977b4cee9585f7a"),
        ("split-cifar", [], "icarl", "d37c7ad5c1591595"),
        ("split-cifar", ["network=resnet18"], "gem", "25e8e5c45bf52551"),
    ],
)
def test_the_ids_of_units_never_change(
    name: str, changes: list[str], method: str, expected: str
) -> None:
    assert ids(recipe.load(name, changes, method), method)[0] == expected
