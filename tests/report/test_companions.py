"""The paper's side tables: from the raw record, beside the published numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass.learners import METHODS
from onepass.metrics import Record
from onepass.report.companions import (
    Companion,
    Companions,
    Sizes,
    collect,
    document,
    formula,
    sizes,
)
from onepass.studies.recipe import Recipe, load
from onepass.studies.results import cross_validation, evaluation
from onepass.studies.store import Provenance, Store
from tests.commands import printed, setting

NAN = np.nan
TEST = np.array([[0.9, 0.1, 0.1], [0.7, 0.8, 0.1], [0.5, 0.75, 0.6]])  # forgets 0.4 and 0.05
MEMORY = np.array([[1.0, NAN, NAN], [0.96, 0.98, NAN], [0.92, 0.94, 0.9]])  # and 0.08 and 0.04
VIOLATIONS = [0, *range(100, 1700, 100)]
P = 269_322
TIME = "seconds of training"

Make = Callable[[Record], Record]


def recipe(
    methods: str, changes: list[str] | None = None, name: str = "permuted-mnist", seeds: int = 2
) -> Recipe:
    one = [f"grids.{method}.learning_rate=0.1" for method in methods.split(",")]
    one += ["grids.pi.strength=1", "grids.gem.margin=0", *(changes or [])]
    return load(name, one, methods, seeds)


def made(
    folder: Path, asked: Recipe, make: dict[str, Make] | None = None, rows: int = 2, leave: int = 0
) -> Path:
    """A study with the same record everywhere but for what `make` makes of it.

    The last `leave` runs are missing.
    """
    with Store.write_to(folder, create={"recipe": asked.stored()}) as store:
        for name in asked.methods:
            tried = cross_validation(asked, name)
            runs = evaluation(asked, name, tried[0].hyperparameters)
            fleets = [tried, *(runs[i : i + rows] for i in range(0, len(runs), rows))]
            store.plan(fleets)
            for units in fleets:
                if leave and units is fleets[-1]:
                    units = units[:-leave]
                records = {u.id: record(name, u.seed, u.hyperparameters) for u in units}
                if make and name in make:
                    records = {unit: make[name](found) for unit, found in records.items()}
                if records:
                    store.add(records, Provenance("a processor", {}, ""))
    return folder


def record(name: str, seed: int, hyperparameters: dict[str, float]) -> Record:
    remembers, counts = METHODS[name].learner.needs.memory, name in ("gem", "s-gem", "a-gem")
    return Record(
        seed=seed,
        hyperparameters=hyperparameters,
        accuracy=np.clip(TEST - 0.1 * seed, 0, 1),
        initial=TEST[0],
        curve=TEST,
        memory_accuracy=MEMORY if remembers else None,
        violations=[count + 3 * seed for count in VIOLATIONS] if counts else None,
        seconds=10.0 + seed,
        state_bytes=4 * P + (4250 * 784 + 70_000 if remembers else 0),
        diverged=False,
        state_by_task=[4 * P] * 17,
    )


def of(found: Companions, name: str) -> Companion:
    return next(companion for companion in found.methods if companion.method == name)


def shown(folder: Path, *options: str) -> str:
    return printed("companions", str(folder), *options)


def rows(text: str, title: str) -> list[list[str]]:
    """The rows of the table below a title, cell by cell."""
    lines = [line.split() for line in text[text.index(title) :].splitlines()]
    return lines[2 : lines.index([])] if [] in lines else lines[2:]


def row_of(name: str, text: str, title: str) -> list[str]:
    return next(row for row in rows(text, title) if row[0] == name)


def test_forgetting_is_that_of_the_worst_task_on_test_sets_and_on_the_memory(
    tmp_path: Path,
) -> None:
    found = of(collect(made(tmp_path, recipe("a-gem"))), "a-gem").ours
    assert found["A_T"].mean == pytest.approx((0.5 + 0.75 + 0.6) / 3 - 0.05)
    assert found["F_T"].mean == pytest.approx((0.4 + 0.05) / 2)
    assert found["worst_forgetting"].mean == pytest.approx(0.4)
    assert found["memory_accuracy"].mean == pytest.approx(0.92)
    assert found["memory_worst_forgetting"].mean == pytest.approx(0.08)


def test_published_numbers_stand_below_ours(tmp_path: Path) -> None:
    text = shown(made(tmp_path, recipe("van,gem,s-gem,a-gem")))
    assert rows(text, "worst-case forgetting") == [
        ["van", "56.7", "0.40", "–", "–"],
        ["paper", "47.9", "0.78"],
        ["gem", "56.7", "0.40", "92.0", "0.080"],
        ["paper", "89.5", "0.10", "99.5", "0.000"],
        ["s-gem", "56.7", "0.40", "92.0", "0.080"],
        ["paper", "88.2"],
        ["a-gem", "56.7", "0.40", "92.0", "0.080"],
        ["paper", "89.1", "0.13", "99.3", "0.008"],
    ]
    assert rows(text, "GEM, S-GEM and A-GEM") == [
        ["gem", "56.7±5.0", "0.225±0.000"],
        ["paper", "89.5±0.5", "0.060±0.004"],
        ["s-gem", "56.7±5.0", "0.225±0.000"],
        ["paper", "88.2", "0.080"],
        ["a-gem", "56.7±5.0", "0.225±0.000"],
        ["paper", "89.1±0.1", "0.060±0.001"],
    ]


def test_violations_have_a_column_a_task_and_a_total(tmp_path: Path) -> None:
    table = rows(shown(made(tmp_path, recipe("van,gem,s-gem,a-gem"))), "violations")
    assert [row[0] for row in table] == ["gem", "paper", "s-gem", "a-gem", "paper"]
    ours = [count + 1.5 for count in VIOLATIONS]
    assert table[0][1:] == [f"{count:.0f}" for count in [*ours, sum(ours)]]
    assert table[1][1:4] + table[1][-2:] == ["0", "1038", "1664", "5096", "59305"]
    assert table[4][1:4] + table[4][-2:] == ["0", "1105", "1316", "1924", "26042"]


def test_the_published_violations_a_task_add_up_to_the_published_total() -> None:
    paper = load("permuted-mnist").paper
    for name, counts in paper.companions.violations.items():
        numbers = paper.published[name]
        assert not isinstance(numbers, str)
        assert [sum(counts)] == numbers["violations"]
        assert len(counts) == 17


def test_seconds_say_how_many_runs_shared_a_fleet(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", recipe("gem", seeds=3))
    found = of(collect(folder), "gem")
    assert found.fleets == [1, 2]
    assert found.ours["seconds"].mean == pytest.approx(11)
    assert found.fleet_seconds == pytest.approx((2 * 10 + 2 * 11 + 12) / 3)
    assert found.faster == pytest.approx(3442 / 11)
    text = shown(folder)
    assert rows(text, "seconds of training")[0] == ["gem", "11.0", "1–2", "18.0", "3442", "313"]
    assert "ours on a processor" in text
    assert "share" in text
    alone = made(tmp_path / "b", recipe("gem"), rows=1)
    assert of(collect(alone), "gem").fleets == [1]
    assert "share" not in shown(alone)


def test_the_letters_of_the_formulas_are_those_of_the_papers_network() -> None:
    assert sizes(load("permuted-mnist")) == Sizes(
        P=P, B=10, H=512, M=250, M_all=17 * 250, T=17, example=784
    )
    assert sizes(load("split-digits", ["hidden=[32]"])).P == 64 * 32 + 32 + 32 * 34 + 34


@pytest.mark.parametrize(
    ("name", "text", "parameters", "activations", "with_whole_memory"),
    [
        ("van", "P + B*H", P, 10 * 512, 10 * 512),
        ("ewc", "4*P + B*H", 4 * P, 10 * 512, 10 * 512),
        ("prog-nn", "2*P*T + B*H*T", 2 * P * 17, 10 * 512 * 17, 10 * 512 * 17),
        ("gem", "P*T + B*H + M*H", P * 17, (10 + 250) * 512, (10 + 4250) * 512),
        ("a-gem", "2*P + B*H + M*H", 2 * P, (10 + 250) * 512, (10 + 4250) * 512),
    ],
)
def test_the_papers_formulas_are_evaluated_in_bytes(
    name: str, text: str, parameters: int, activations: int, with_whole_memory: int
) -> None:
    loaded = load("permuted-mnist")
    found = formula(loaded.paper.companions.state[name], sizes(loaded))
    assert found.text == text
    assert found.terms_in_P == 4 * parameters
    assert found.all_terms == 4 * (parameters + activations)
    assert found.all_terms_M_all == 4 * (parameters + with_whole_memory)


def test_state_is_shown_in_parts_beside_the_formula(tmp_path: Path) -> None:
    folder = made(tmp_path, recipe("van,a-gem"))
    state = of(collect(folder), "a-gem").state
    assert state is not None
    assert (state.parameters, state.examples, state.rest) == (4 * P, 4250 * 784, 70_000)
    van, agem = rows(shown(folder), "bytes of state")[:2]
    assert van[:6] == ["van", "1.08MB", "–", "–", "1.08MB", "1.08MB"]
    assert van[6:] == ["P", "+", "B*H", "1.08MB", "1.10MB", "1.10MB"]
    assert agem[1:6] == ["1.08MB", "3.33MB", "70.0kB", "4.48MB", "1.08MB"]
    assert agem[6:] == ["2*P", "+", "B*H", "+", "M*H", "2.15MB", "2.69MB", "10.88MB"]


def test_a_recipe_without_published_numbers_prints_ours_alone(tmp_path: Path) -> None:
    folder = made(tmp_path, recipe("van,a-gem", name="quickstart"))
    text = shown(folder)
    assert "paper" not in text
    assert "formula" not in text
    assert rows(text, "worst-case forgetting") == [
        ["van", "56.7", "0.40", "–", "–"],
        ["a-gem", "56.7", "0.40", "92.0", "0.080"],
    ]
    assert of(collect(folder), "a-gem").paper.state is None


def test_a_study_without_a_memory_says_what_it_has_not(tmp_path: Path) -> None:
    text = shown(made(tmp_path, recipe("van,multi-task")))
    assert "GEM, S-GEM and A-GEM: none of them is in this study" in text
    assert "violations per task: no method here has counted any" in text


@pytest.mark.parametrize("how", ["a run", "every grid point"])
def test_a_method_that_diverged_says_so_in_every_table(how: str, tmp_path: Path) -> None:
    def lost(one: Record) -> Record:
        return replace(one, diverged=bool(one.seed) or how != "a run")

    folder = made(tmp_path, recipe("van,gem,pi"), {"gem": lost, "pi": lost})
    text = shown(folder)
    titles = ("worst-case forgetting", "GEM, S-GEM and A-GEM", "violations", TIME, "bytes of state")
    for title in titles:
        assert row_of("gem", text, title)[:2] == ["gem", "diverged"]
    assert f"gem diverged: {'1 of 2 runs' if how == 'a run' else how}" in text
    # pi diverged in the paper, too.
    assert ["paper", "diverged"] in rows(text, "worst-case forgetting")
    json.dumps(document(collect(folder)), allow_nan=False)


def test_what_is_not_done_yet_is_said(tmp_path: Path) -> None:
    asked = recipe("van,a-gem")
    part = shown(made(tmp_path / "part", asked, leave=1))
    assert "van: 1 of 2 seeds" in part
    with Store.write_to(tmp_path / "new", create={"recipe": asked.stored()}):
        pass
    text = shown(tmp_path / "new")
    assert rows(text, "worst-case forgetting")[0] == ["van", "to", "do"]
    assert "van to do: 3 units" in text


def test_the_papers_seconds_are_not_compared_with_those_of_another_study(tmp_path: Path) -> None:
    folder = made(tmp_path, recipe("van", ["train_examples=1000"]))
    assert of(collect(folder), "van").faster is None
    text = shown(folder)
    assert "with train_examples=1000" in text
    assert "not for these changes" in text


def test_json_has_what_the_tables_show(tmp_path: Path) -> None:
    target = tmp_path / "companions.json"
    text = shown(made(tmp_path / "study", recipe("van,gem,a-gem")), "--json", str(target))
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["recipe"] == "permuted-mnist"
    assert found["sizes"]["P"] == P
    for name, mine in found["methods"].items():
        ours, paper, state = mine["ours"], mine["paper"], mine["state"]
        accuracy, worst = ours["A_T"]["mean"], ours["worst_forgetting"]["mean"]
        found_worst = row_of(name, text, "worst-case forgetting")
        assert found_worst[1:3] == [f"{100 * accuracy:.1f}", f"{worst:.2f}"]
        seconds, in_a_fleet = ours["seconds"]["mean"], mine["fleet_seconds"]
        of_paper = [f"{paper['seconds']:.0f}", f"{mine['faster']:.3g}"]
        time = row_of(name, text, TIME)
        assert time[1:] == [f"{seconds:.1f}", "2", f"{in_a_fleet:.1f}", *of_paper]
        memory = row_of(name, text, "bytes of state")
        assert memory[1] == f"{state['parameters'] / 1e6:.2f}MB"
        terms = [paper["state"][key] for key in ("terms_in_P", "all_terms", "all_terms_M_all")]
        assert memory[-3:] == [f"{term / 1e6:.2f}MB" for term in terms]
        assert state["by_task"] == [4 * P] * 17
    gem = found["methods"]["gem"]
    violations = rows(text, "violations")
    assert violations[0][1:-1] == [f"{count:.0f}" for count in gem["violations_by_task"]]
    assert violations[1][1:-1] == [str(count) for count in gem["paper"]["violations_by_task"]]
    assert gem["paper"]["metrics"]["memory_accuracy"] == [0.995]


def test_parts_of_the_state_of_real_runs_are_what_they_are_called(tmp_path: Path) -> None:
    grids = [f"grids.{name}.learning_rate=0.01" for name in ("van", "ewc", "a-gem")]
    sizes = ["train_examples=20", "test_examples=10", "hidden=[8]", "memory_per_task=10"]
    changes = setting(*grids, "grids.ewc.strength=1", *sizes)
    command = ["run", "quickstart", "--methods", "van,ewc,a-gem", "--seeds", "1", "--workers", "1"]
    printed(*command, *changes, "--out", str(tmp_path))
    found = collect(tmp_path)
    parts = {companion.method: companion.state for companion in found.methods}
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert {state.parameters for state in parts.values() if state} == {4 * parameters}
    van, ewc, agem = (parts[name] for name in ("van", "ewc", "a-gem"))
    assert van is not None
    assert ewc is not None
    assert agem is not None
    assert (van.examples, van.rest) == (0, 0)
    # Pull, anchor, Fisher information and squares; how many steps.
    assert (ewc.examples, ewc.rest) == (0, 4 * 4 * parameters + 8)
    places = 170 + 1  # one is for what is thrown away
    reservoirs = 8 * (10 + 10 * 2 + 1)  # how many each class has seen, and where they lie
    assert agem.examples == 170 * 64
    # Where a task begins, how much it has, and violations.
    assert agem.rest == 64 + 16 * places + reservoirs + 8 * 3
    assert agem.by_task == [agem.total] * 17
