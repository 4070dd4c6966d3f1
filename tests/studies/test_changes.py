"""How a recipe is changed, and which changes are refused."""

from __future__ import annotations

from typing import Any

import pytest

from onepass.learners import METHODS
from onepass.studies import recipe
from tests.sentences import refusal_of


def refusal(
    *changes: str, name: str = "quickstart", methods: str | None = None, seeds: int | None = None
) -> str:
    """The sentence with which a recipe is refused."""
    return refusal_of(lambda: recipe.load(name, list(changes), methods, seeds))


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        ("seeds=2", ("seeds",), 2),
        (" seeds = 2 ", ("seeds",), 2),
        ("hidden=[32, 16]", ("hidden",), [32, 16]),
        ("memory=ring", ("memory",), "ring"),
        ("union_softmax=false", ("union_softmax",), False),
        ("train_examples=60", ("stream_options", "train_examples"), 60),
        ("stream_options.train_examples=60", ("stream_options", "train_examples"), 60),
        ("a-gem.reference_batch=64", ("options", "a-gem", "reference_batch"), 64),
        ("options.a-gem.reference_batch=64", ("options", "a-gem", "reference_batch"), 64),
        ("grids.van.learning_rate=0.1", ("grids", "van", "learning_rate"), [0.1]),
        ("grids.van.learning_rate=[0.1, 1]", ("grids", "van", "learning_rate"), [0.1, 1.0]),
        ("van.learning_rate=0.1", ("grids", "van", "learning_rate"), [0.1]),
        ("ewc.strength=10", ("grids", "ewc", "strength"), [10.0]),
    ],
)
def test_a_change_finds_its_key_by_path_or_by_its_end(
    change: str, path: tuple[str, ...], expected: Any
) -> None:
    found: Any = recipe.load("quickstart", [change]).model_dump()
    for key in path:
        found = found[key]
    assert found == expected


def test_a_change_leaves_everything_else_alone() -> None:
    before = recipe.load("quickstart")
    after = recipe.load("quickstart", ["grids.van.learning_rate=0.1"])
    assert before.grids["van"] != after.grids["van"]
    assert after.model_copy(update={"grids": after.grids | {"van": before.grids["van"]}}) == before


def test_the_last_of_several_changes_wins() -> None:
    assert recipe.load("quickstart", ["seeds=2", "seeds=3"]).seeds == 3


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("van", ["van"]),
        (" a-gem , van,", ["a-gem", "van"]),
        ("van,van", ["van"]),
        ("all", [name for name in METHODS if name != "icarl"]),
    ],
)
def test_methods_are_chosen_by_name(methods: str, expected: list[str]) -> None:
    assert recipe.load("quickstart", methods=methods).methods == expected


def test_all_methods_are_those_that_make_sense_for_the_stream() -> None:
    assert recipe.load("split-digits", methods="all").methods == list(METHODS)
    assert "classes of their own" in refusal(methods="icarl")


@pytest.mark.parametrize(
    "change",
    [
        *(f"stream_options.train_examples={value}" for value in ("true", "false", "3.0", "'60'")),
        *("options.ewc.fisher_every=true", "options.ewc.normalise=1"),
        *("options.rwalk.damping=true", "options.rwalk.damping='1'"),
    ],
)
def test_an_option_of_another_type_is_refused_and_not_taken_for_a_number(change: str) -> None:
    line = refusal(change, name="permuted-digits")
    assert line.startswith(change.partition("=")[0].rpartition(".")[2] + "=")
    assert "is not valid: input should be a valid" in line


SWITCHES = ["tf32=1", "union_softmax='yes'", "memory_with_replacement='off'"]


@pytest.mark.parametrize("change", [*SWITCHES, "memory_includes_current_task=0"])
def test_a_switch_is_true_or_false(change: str) -> None:
    assert "should be a valid boolean" in refusal(change)


def test_a_grid_holds_each_value_once() -> None:
    loaded = recipe.load("quickstart", ["grids.van.learning_rate=[0.1,0.03,0.1]"])
    assert loaded.grids["van"]["learning_rate"] == [0.1, 0.03]


def test_a_whole_number_is_a_number() -> None:
    loaded = recipe.load("permuted-digits", ["options.rwalk.damping=1"])
    damping = loaded.method_options("rwalk").damping
    assert (damping, type(damping)) == (1.0, float)


def test_what_an_earlier_version_stored_of_options_of_another_type_is_still_read() -> None:
    today = recipe.load("permuted-digits", ["train_examples=1", "options.ewc.fisher_every=3"])
    stored = today.stored() | {"stream_options": {"train_examples": True}}
    stored |= {"options": today.options | {"ewc": {"fisher_every": "3"}}}
    for read in (recipe.from_stored(stored), recipe.load("permuted-digits", stored=stored)):
        assert read.stream_options == {"train_examples": 1}
        assert read.options["ewc"] == {"fisher_every": 3}


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"name": "quikstart"}, "'quickstart'"),
        ({"name": "permuted_mnist"}, "'permuted-mnist'"),
        ({"methods": "agem"}, "'a-gem'"),
        ({"methods": "van,ewcc"}, "'ewc'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given: dict[str, Any], nearest: str) -> None:
    assert f"did you mean {nearest}?" in refusal(**given)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("memory_per_tsk", "memory_per_task"),
        ("train_example", "train_examples"),
        ("referencebatch", "reference_batch"),
        ("grids.agem.learning_rate", "grids.a-gem.learning_rate"),
        ("ewc.fisher_evry", "fisher_every"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key: str, nearest: str) -> None:
    sentence = refusal(f"{key}=1")
    assert f"unknown key '{key}'" in sentence
    assert nearest in sentence.partition("?")[0]


def test_an_ambiguous_key_is_answered_with_what_it_could_be() -> None:
    sentence = refusal("learning_rate=0.1")
    assert all(f"grids.{name}.learning_rate" in sentence for name in METHODS)


@pytest.mark.parametrize("change", ["seeds", "", "grids.van.learning_rate"])
def test_a_change_without_a_value_is_refused(change: str) -> None:
    assert "key=value" in refusal(change)


@pytest.mark.parametrize("key", ["name", "summary", "stream", "methods", "paper", "grids"])
def test_what_a_recipe_is_cannot_be_changed(key: str) -> None:
    assert f"'{key}' belongs to the recipe" in refusal(f"{key}=1")


COUNTS = [
    *("seeds", "cv_seeds", "batch_size", "memory_per_task"),
    *("reference_batch", "fisher_every", "train_examples", "test_examples"),
]
NO_RATES = ["0", "-0.1", "nan", "inf", "fast", "true", "[]", "[0.1, 0]"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in COUNTS for value in ("0", "-5", "2.5", "many", "")],
        *[("grids.van.learning_rate", value) for value in NO_RATES],
        *[("hidden", value) for value in ("5", "[0]", "[16, -1]")],
        *[("ewc.strength", "-1"), ("batch_size", "true"), ("union_softmax", "5")],
        *[("flush", "often"), ("memory", "rnig"), ("gradients", "fast")],
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_key(key: str, value: str) -> None:
    assert key in refusal(f"{key}={value}").partition("=")[0]


@pytest.mark.parametrize("seeds", [0, -1])
def test_no_seeds_are_refused(seeds: int) -> None:
    assert f"seeds={seeds}" in refusal(seeds=seeds)


@pytest.mark.parametrize("methods", ["", " , "])
def test_no_methods_are_refused(methods: str) -> None:
    assert "at least one method" in refusal(methods=methods)
