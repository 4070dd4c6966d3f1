"""Recipes: what is shipped, how it is changed, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields
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

# Steps after which the Fisher information is averaged.
EVERY = {"split-cifar": 50, "split-cifar-quick": 5}
LEARNING_RATES = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001]


def refusal(
    *changes: str, name: str = "quickstart", methods: str | None = None, seeds: int | None = None
) -> str:
    """The sentence with which a recipe is refused."""
    with pytest.raises(InputError) as refused:
        recipe.load(name, list(changes), methods, seeds)
    sentence = str(refused.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


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
    assert {n: grid["strength"] for n, grid in loaded.grids.items() if "strength" in grid} == {
        "ewc": [1, 10, 100, 1000, 10000],
        "pi": [0.001, 0.01, 0.1, 1, 10],
        "mas": [0.01, 0.1, 1, 10],
        "rwalk": [0.1, 1, 10, 100, 1000],
    }


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
    names = ["van", "ewc", "mas", "rwalk", "prog-nn", "gem", "s-gem", "a-gem"]
    accuracies = [0.479, 0.683, 0.696, 0.857, 0.935, 0.895, 0.882, 0.891]
    forgetting = [0.51, 0.29, 0.27, 0.08, 0, 0.06, 0.08, 0.06]
    assert numbers.keys() == {*names, "multi-task"}
    assert [numbers[name]["A_T"][0] for name in names] == accuracies
    assert [numbers[name]["F_T"][0] for name in names] == forgetting
    assert numbers["multi-task"]["A_T"][0] == 0.953
    assert "F_T" not in numbers["multi-task"]


def ids(of: recipe.Recipe, method: str) -> list[str]:
    return [unit.id for unit in cross_validation(of, method)]


def test_what_the_paper_says_is_no_part_of_a_study() -> None:
    loaded = recipe.load("permuted-mnist")
    without = loaded.model_copy(update={"paper": Paper()})
    assert loaded.paper.companions != without.paper.companions
    assert without.stored() == loaded.stored()
    assert without.changes() == []
    assert ids(without, "a-gem") == ids(loaded, "a-gem")
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
    loaded = recipe.load(name)
    every = EVERY.get(name, 10)
    assert loaded.method_options("ewc") == ewc.Options(
        fisher="moving-average", normalise=True, fisher_every=every
    )
    assert loaded.method_options("mas") == mas.Options(per_batch=True, last_task_only=True)
    assert loaded.method_options("rwalk") == rwalk.Options(
        whole_distance=True, growing_scores=True, growing_squares=True, fisher_every=every
    )
    assert loaded.method_options("prog-nn") == prognn.Options(
        input_laterals=True, lateral_biases=True
    )


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
        "options.ewc.fisher_every=true",
        "options.ewc.normalise=1",
        "options.rwalk.damping=true",
        "options.rwalk.damping='1'",
    ],
)
def test_an_option_of_another_type_is_refused_and_not_taken_for_a_number(change: str) -> None:
    line = refusal(change, name="permuted-digits")
    assert line.startswith(change.partition("=")[0].rpartition(".")[2] + "=")
    assert "is not valid: input should be a valid" in line


@pytest.mark.parametrize(
    "change",
    [
        "tf32=1",
        "union_softmax='yes'",
        "memory_with_replacement='off'",
        "memory_includes_current_task=0",
    ],
)
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
    stored = today.stored() | {
        "stream_options": {"train_examples": True},
        "options": today.options | {"ewc": {"fisher_every": "3"}},
    }
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


COUNTS = ["seeds", "cv_seeds", "batch_size", "memory_per_task", "reference_batch"]
COUNTS += ["fisher_every", "train_examples", "test_examples"]
RATES = ["0", "-0.1", "nan", "inf", "fast", "true", "[]", "[0.1, 0]"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in COUNTS for value in ("0", "-5", "2.5", "many", "")),
        *(("grids.van.learning_rate", value) for value in RATES),
        *(("hidden", value) for value in ("5", "[0]", "[16, -1]")),
        ("ewc.strength", "-1"),
        ("batch_size", "true"),
        ("union_softmax", "5"),
        ("flush", "often"),
        ("memory", "rnig"),
        ("gradients", "fast"),
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


@pytest.mark.parametrize("name", recipe.names())
def test_a_stored_recipe_wants_the_same_units(name: str) -> None:
    """Also the number 0 of a method's own grid is written as it is read."""
    asked = recipe.load(name, methods="all")
    stored = recipe.from_stored(json.loads(canonical(asked.stored())))
    for method in asked.methods:
        assert ids(stored, method) == ids(asked, method)


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


def test_a_residual_network_on_a_stream_without_images_is_refused() -> None:
    with pytest.raises(InputError, match="resnet18 needs a stream of images"):
        recipe.load("permuted-digits", ["network=resnet18"])
    assert recipe.load("split-digits", ["network=resnet18-reduced"]).setup().convolutional


def test_the_recipe_of_split_cifar_says_what_the_paper_does() -> None:
    loaded = recipe.load("split-cifar")
    paper = loaded.paper
    # The reference batch is always the whole memory.
    assert loaded.method_options("a-gem").reference_batch >= 17 * loaded.setup().memory_per_task
    for name in ("a-gem", "gem"):
        total = sum(paper.companions.violations[name])
        assert paper.published[name]["violations"] == [total]  # type: ignore[index]
    needed = "ewc pi mas rwalk prog-nn gem s-gem a-gem icarl multi-task"
    assert set(needed.split()) < set(loaded.methods)
    for name in ("ewc", "rwalk"):
        assert loaded.method_options(name).fisher_every == 50
