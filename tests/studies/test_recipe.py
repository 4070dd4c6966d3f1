"""Recipes: those of the package, what they say of the paper, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from onepass.errors import InputError
from onepass.files import canonical
from onepass.learners import METHODS, ewc, mas, prognn, rwalk
from onepass.protocol import Setup
from onepass.streams import STREAMS
from onepass.studies import recipe
from onepass.studies.paper import Paper
from onepass.studies.results import cross_validation

# After how many steps the Fisher information is averaged: 10, but for these.
EVERY = {"split-cifar": 50, "split-cifar-quick": 5}
LEARNING_RATES = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001]


def test_there_are_recipes_for_every_shipped_stream() -> None:
    assert {"quickstart", *STREAMS} <= set(recipe.names())


@pytest.mark.parametrize("name", recipe.names())
def test_a_shipped_recipe_loads_under_its_own_name(name: str) -> None:
    assert recipe.load(name).name == name


@pytest.mark.parametrize("name", recipe.names())
def test_a_shipped_recipe_has_the_grids_of_the_paper(name: str) -> None:
    loaded = recipe.load(name)
    assert {"van", "ewc", "a-gem", "multi-task"} <= set(loaded.methods)
    if name == "split-cifar-quick":  # which has no time for them
        for method in loaded.methods:
            assert set(loaded.grids[method]["learning_rate"]) < set(LEARNING_RATES)
        return
    for method, grid in loaded.grids.items():
        assert set(grid) == set(METHODS[method].hyperparameters)
        assert grid["learning_rate"] == LEARNING_RATES
    strengths = {
        "ewc": [1, 10, 100, 1000, 10000],
        "pi": [0.001, 0.01, 0.1, 1, 10],
        "mas": [0.01, 0.1, 1, 10],
        "rwalk": [0.1, 1, 10, 100, 1000],
    }
    for method, strength in strengths.items():
        assert loaded.grids[method]["strength"] == strength
    assert {name for name, grid in loaded.grids.items() if "strength" in grid} == set(strengths)


def test_permuted_mnist_is_set_up_as_in_the_paper() -> None:
    loaded = recipe.load("permuted-mnist")
    assert loaded.setup() == Setup(hidden=(256, 256), batch_size=10, memory_per_task=250)
    assert loaded.seeds == 5
    assert loaded.method_options("a-gem").reference_batch == 256
    assert loaded.make_stream_options().train_images == 55_000


def test_permuted_mnist_carries_what_the_paper_chose_and_found() -> None:
    paper = recipe.load("permuted-mnist").paper
    assert paper.selected["van"] == {"learning_rate": 0.03}
    assert paper.selected["ewc"] == {"learning_rate": 0.03, "strength": 10}
    assert paper.selected["a-gem"] == {"learning_rate": 0.1}
    assert paper.published.keys() == set(METHODS) - {"icarl", "er", "mega-1", "mega-2"}
    assert paper.published["pi"] == "diverged"
    numbers = {name: found for name, found in paper.published.items() if not isinstance(found, str)}
    found = {
        name: (paper["A_T"][0], paper["F_T"][0] if "F_T" in paper else None)
        for name, paper in numbers.items()
    }
    assert found == {  # average accuracy and forgetting
        "van": (0.479, 0.51),
        "ewc": (0.683, 0.29),
        "mas": (0.696, 0.27),
        "rwalk": (0.857, 0.08),
        "prog-nn": (0.935, 0),
        "gem": (0.895, 0.06),
        "s-gem": (0.882, 0.08),
        "a-gem": (0.891, 0.06),
        "multi-task": (0.953, None),
    }


def names_of(loaded: recipe.Recipe, method: str) -> list[str]:
    return [unit.id for unit in cross_validation(loaded, method)]


def test_what_the_paper_says_is_no_part_of_a_study() -> None:
    loaded = recipe.load("permuted-mnist")
    without = loaded.model_copy(update={"paper": Paper()})
    assert loaded.paper.companions != without.paper.companions
    assert without.stored() == loaded.stored()
    assert without.changes() == []
    assert names_of(without, "a-gem") == names_of(loaded, "a-gem")
    # A study that was stored before is compared with what is known today.
    assert recipe.from_stored(without.stored()).paper == loaded.paper


@pytest.mark.parametrize(
    ("companions", "names"),
    [
        ({"seconds": {"agem": 5}}, "did you mean 'a-gem'?"),
        ({"seconds": {"a-gem": 0}}, "seconds"),
        ({"violations": {"gem": [0, -1]}}, "violations"),
        ({"violations": {"gem": [0.5]}}, "violations"),
        ({"state": {"van": {"P+B": 1}}}, "state"),
        ({"state": {"van": {"P*X": 1}}}, "state"),
        ({"state": {"van": {"P": 0}}}, "state"),
        ({"state": {"van": {}}}, "state"),
        ({"bytes": {"van": 1}}, "bytes"),
    ],
)
def test_side_tables_that_make_no_sense_are_refused(companions: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        Paper(companions=companions)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", recipe.names())
def test_a_shipped_recipe_uses_what_made_the_published_table(name: str) -> None:
    loaded, every = recipe.load(name), EVERY.get(name, 10)
    growing = {"growing_scores": True, "growing_squares": True}
    for method, options in {
        "ewc": ewc.Options(fisher="moving-average", normalise=True, fisher_every=every),
        "mas": mas.Options(per_batch=True, last_task_only=True),
        "rwalk": rwalk.Options(whole_distance=True, **growing, fisher_every=every),
        "prog-nn": prognn.Options(input_laterals=True, lateral_biases=True),
    }.items():
        assert loaded.method_options(method) == options


@pytest.mark.parametrize("name", recipe.names())
def test_a_stored_recipe_wants_the_same_units(name: str) -> None:
    """Also the number 0 of a method's own grid is written as it is read."""
    asked = recipe.load(name, methods="all")
    stored = recipe.from_stored(json.loads(canonical(asked.stored())))
    for method in asked.methods:
        assert names_of(stored, method) == names_of(asked, method)


def test_the_recipe_of_split_cifar_says_what_the_paper_does() -> None:
    loaded = recipe.load("split-cifar")
    whole_memory = 17 * loaded.memory_per_task
    assert loaded.method_options("a-gem").reference_batch >= whole_memory
    for method in ("a-gem", "gem"):
        total = sum(loaded.paper.companions.violations[method])
        assert loaded.paper.published[method]["violations"] == [total]  # type: ignore[index]
    assert {"ewc", "pi", "mas", "rwalk", "prog-nn"} < set(loaded.methods)
    assert {"gem", "s-gem", "a-gem", "icarl", "multi-task"} < set(loaded.methods)
    for method in ("ewc", "rwalk"):
        assert loaded.method_options(method).fisher_every == 50


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ({"stream": "permuted-digit"}, "'permuted-digits'"),
        ({"methods": ["vna"]}, "'van'"),
        ({"grids": {"van": {"strength": [1]}}}, "learning_rate"),
        ({"stream_options": {"train_exmples": 5}}, "'train_examples'"),
        ({"options": {"a-gem": {"referencebatch": 5}}}, "'reference_batch'"),
        ({"sedes": 5}, "sedes"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(part: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        recipe.Recipe(**{**recipe.read("quickstart"), "methods": ["van"], **part})


def test_a_residual_network_on_a_stream_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="resnet18 needs a stream of images"):
        recipe.load("permuted-digits", ["network=resnet18"])
    assert recipe.load("split-digits", ["network=resnet18-reduced"]).setup().convolutional
