"""`onepass bench`: loops by hand that are the methods, work that is counted right, and a table of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.bench import measure, processes
from onepass.bench.by_hand import PLAIN, Alone, Examples
from onepass.bench.floor import Rates, Work
from onepass.bench.floor import work as floor_work
from onepass.bench.measure import Plan, Report, Row, least_work
from onepass.bench.processes import Case, Sizes, middle
from onepass.cli import main
from onepass.engine.batch import Batch
from onepass.engine.gradients import Mode
from onepass.errors import InputError
from onepass.learners import METHODS

IMAGES, TASKS = 1000, 2
WIDTHS = (784, 256, 256, 10)
WEIGHTS = [before * after for before, after in pairwise(WIDTHS)]
P = sum(WEIGHTS) + sum(WIDTHS[1:])
EXAMPLE = 784 + 8  # bytes of an image, and its label
FLOPS = (
    3 * 2 * sum(WEIGHTS) - 2 * WEIGHTS[0]
)  # of an example: forward, the weights' gradients, the inputs' but those of the first layer


def looked_at(batch: Batch) -> Examples:
    return batch.x[0].float() / 255, batch.slots[0]


def hand_in(learner: Any, name: str, number: int) -> list[Examples]:
    """What a step looks at of the past, given to the learner as well."""
    memory = learner.memory
    if memory is None:
        return []
    tasks = [memory.of([task]) for task in range(TASKS)]
    if name == "gem":
        return [looked_at(task) for task in tasks]
    everything, _ = memory.contents()
    chosen = torch.randperm(TASKS * 250, generator=torch.Generator().manual_seed(number))[
        : getattr(learner, "reference_batch", 0)
    ]
    one = (
        tasks[number % TASKS]
        if name == "s-gem"
        else Batch(everything.x[:, chosen], everything.slots[:, chosen])
    )
    memory.draw = memory.of_chosen = lambda _: one
    return [looked_at(one)]


def by_hand_as_ours(name: str, margin: float = 0.0) -> None:
    feed, fleet, learner, phase = middle(
        name, 1, TASKS, IMAGES, learning_rate=0.05, margin=margin, sensitivity=2.0
    )
    if "pull" in learner.keeps:  # so strong that it shows
        learner.state()["pull"].mul_(10 / learner.state()["pull"].max())
    run, start, steps = (
        Alone(learner),
        fleet.theta.clone(),
        12 if learner.violations is None else 40,
    )
    for number, batch in enumerate(islice(feed.batches(phase), steps)):
        past = hand_in(learner, name, number)
        PLAIN[name].step(run, looked_at(batch), past)
        fleet.learn(learner, batch)
    assert not fleet.diverged()[0]
    if learner.violations is not None:
        assert 0 < int(learner.violations) < steps, "some steps are corrected, and some are not"

    def same(mine: list[Any], theirs: Tensor, before: Tensor | float) -> None:
        moved = theirs - before
        assert moved.norm() > 0
        assert (
            torch.cat([part.detach().flatten() for part in mine]).sub(theirs[0]).norm()
            < 1e-3 * moved.norm()
        )

    same(run.parameters, fleet.theta, start)
    for key in {"squares", "fisher", "path", "fresh", "start"} & run.state.keys():
        same(run.state[key], learner.state()[key], start if key == "start" else 0.0)


@pytest.mark.parametrize("name", PLAIN)
def test_a_loop_written_by_hand_is_the_method(name: str) -> None:
    by_hand_as_ours(name)


def test_gem_by_hand_knows_the_margin() -> None:
    by_hand_as_ours("gem", margin=0.1)


def test_every_method_of_this_stream_but_the_one_that_grows_is_written_by_hand() -> None:
    assert {*PLAIN} == {
        name for name, found in METHODS.items() if not found.learner.needs_own_classes
    } - {"prog-nn"}


@pytest.mark.parametrize("name", ["a-gem", "gem", "s-gem"])
def test_a_loop_looks_at_as_much_of_the_past_as_the_method_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    monkeypatch.setitem(
        PLAIN,
        name,
        PLAIN[name]._replace(
            step=lambda _, batch, past: sizes.append([len(batch[1]), *(len(y) for _, y in past)])
        ),
    )
    assert Case(name, 1, None, TASKS, IMAGES).loop("cpu")(3) == 3
    assert sizes == 3 * [{"a-gem": [10, 256], "gem": [10, 250, 250], "s-gem": [10, 250]}[name]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("mode", ["stacked", "looped", None])
def test_a_gpu_is_measured_as_a_cpu_is(mode: Mode | None) -> None:
    assert Case("a-gem", 2 if mode else 1, mode, 1, IMAGES).loop("cuda")(50) >= 50


def test_constraints_are_violated_as_often_whatever_the_number_of_runs() -> None:
    for name, steps, low, high in (("gem", 8, 0.7, 1.0), ("a-gem", 30, 0.3, 0.7)):
        feed, fleet, learner, phase = middle(name, 2, 4, IMAGES)
        for batch in islice(feed.batches(phase), steps):
            fleet.learn(learner, batch)
        assert learner.violations is not None
        first, second = (int(n) / steps for n in learner.violations)
        assert first == second
        assert low <= first <= high


@pytest.mark.parametrize("mode", ["stacked", "looped"])
def test_a_fleet_takes_steps_pass_after_pass(mode: Mode) -> None:
    take = Case("er", 2, mode, 1, IMAGES).loop("cpu")
    assert [take(1), take(IMAGES // 10)] == [1, IMAGES // 10]


def test_a_fleet_in_the_middle_of_a_stream_has_a_full_memory_and_a_past_to_stay_close_to() -> None:
    memory = middle("a-gem", 2, TASKS, IMAGES).learner.memory
    assert memory is not None
    assert memory.sizes == [500, 500]
    _, _, learner, phase = middle("mas", 2, TASKS, IMAGES)
    assert phase == TASKS
    assert bool((learner.state()["pull"].amax(1) > 0).all())
    assert middle("multi-task", 2, TASKS, IMAGES).phase == 0


def test_the_floor_of_a_gem_counts_both_passes() -> None:
    found = least_work("a-gem", TASKS, IMAGES)
    assert found.flops == (10 + 256) * FLOPS
    assert found.bytes == 2 * 4 * P + (10 + 256) * EXAMPLE + 2 * 8  # violations are counted up


def test_the_floor_of_gem_grows_with_the_past() -> None:
    for tasks in (1, TASKS):
        assert least_work("gem", tasks, IMAGES).flops == (10 + 250 * tasks) * FLOPS


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("van", 0.0),
        ("mas", 2.0),  # the pull and the anchor are read
        ("ewc", 2 + 2 + 0.2),  # squares are added to, and every tenth step the Fisher information
        ("pi", 2 + 2),  # the path is added to
        (
            "rwalk",
            2 + 2 + 2 + 0.6,
        ),  # squares and path; every tenth step the scores, where they began, and the Fisher information
    ],
)
def test_the_floor_counts_what_a_step_reads_and_writes_of_the_state(name: str, kept: float) -> None:
    found = least_work(name, TASKS, IMAGES)
    assert found.flops == 10 * FLOPS
    assert found.bytes == pytest.approx((2 + kept) * 4 * P + 10 * EXAMPLE, abs=20)  # and a counter


def test_frozen_columns_are_passed_through_and_not_learnt() -> None:
    feed, fleet, learner, phase = middle("prog-nn", 1, 1, IMAGES)
    found = floor_work(fleet, learner, islice(feed.batches(phase), 2))
    trained = fleet.theta[:, fleet.trainable].shape[1]
    assert trained < fleet.theta.shape[1]
    assert found.bytes == 4 * (fleet.theta.shape[1] + trained) + 10 * EXAMPLE
    first, second = (
        sum(WEIGHTS[:-1]),
        2 * sum(WEIGHTS),
    )  # the old head does not answer; the new column has lateral connections everywhere
    assert found.flops == 10 * (2 * first + 2 * 2 * second + 2 * sum(WEIGHTS[1:]))


def test_the_slower_of_products_and_copies_is_the_floor() -> None:
    assert Work(6.0, 4.0).seconds(Rates(2.0, 1.0)) == 4.0
    assert Work(6.0, 4.0).seconds(Rates(1.0, 1.0)) == 6.0


@pytest.fixture(scope="module")
def report() -> Report:
    told: list[str] = []
    asked = Plan(
        "cpu",
        ["van", "mas"],
        [1, 3],
        rounds=2,
        tasks=1,
        both=True,
        seconds=0.01,
        images=IMAGES,
        cores=1,
        sizes=Sizes(64, 1000),
    )
    found = measure.run(asked, told.append)
    assert len(told) == len(found.rows)
    return found


def test_there_is_a_line_for_each_method_and_number_of_runs(report: Report) -> None:
    assert [(row.method, row.runs, row.way) for row in report.rows] == [
        (name, runs, way)
        for name in ("van", "mas")
        for runs, way in ((1, "looped"), (3, "stacked"), (3, "looped"))
    ]


def test_the_numbers_of_a_line_fit_together(report: Report) -> None:
    for row in report.rows:
        assert row.eager is not None
        assert row.ratio is not None
        assert min(row.eager, row.ours, row.ratio) > 0
        assert report.floor(row) == 1e6 * row.work.seconds(report.rates)
    assert report.rates.flops > 0


def test_an_error_in_a_process_is_raised_here() -> None:
    with processes.workers("cpu", cores=1) as started, pytest.raises(KeyError, match="prog-nn"):
        started.time(started.plain[:1], [Case("prog-nn", 1, None, 1, IMAGES)], 1)


@pytest.mark.parametrize("reason", [EOFError(), MemoryError("not enough")])
def test_what_does_not_fit_is_one_sentence(
    reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise reason

    monkeypatch.setattr(processes.Workers, "time", fail)
    with pytest.raises(
        InputError, match=r"there is no room for er with up to 900 runs .*: use fewer --runs"
    ):
        measure.run(Plan("cpu", ["er"], [1, 900], images=IMAGES, cores=1, sizes=Sizes(64, 1000)))


def made(eager: float | None = 100.0, both: bool = False) -> Report:
    rows = [Row("van", 5, "stacked", eager, 12.345, eager and 8.1, Work(120_500, 1.0))]
    return Report(Plan("cpu", ["van"], [5], both=both), "2 cores", "2.13", Rates(241e9, 21e9), rows)


def cells(found: Report) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in measure.markdown(found).splitlines()
        if line.startswith("| ")
    ]


@pytest.mark.parametrize("both", [False, True])
def test_table_markdown_and_json_say_the_same(both: bool) -> None:
    found = made(both=both)
    way = ["stacked"] if both else []
    assert cells(found)[2:] == [["van", "5", *way, "100", "12.3", "8.1", "0.5", "4.1%"]]
    shown = measure.table(found)
    headings, _, *body = cells(found)
    assert [str(column.header) for column in shown.columns] == headings
    assert [list(column.cells) for column in shown.columns] == [
        list(column) for column in zip(*body, strict=True)
    ]
    assert "241 GFLOP/s" in str(shown.caption)
    assert "21 GB/s" in str(shown.caption)
    (row,) = json.loads(json.dumps(measure.document(found)))["rows"]
    assert row.pop("work") == {"flops": 120_500, "bytes": 1.0}
    assert row == {
        "method": "van",
        "runs": 5,
        "way": "stacked",
        "eager": 100,
        "ours": 12.345,
        "ratio": 8.1,
        "floor": 0.5,
        "share": 0.5 / 12.345,
    }


def test_a_method_that_nobody_wrote_by_hand_has_a_dash() -> None:
    assert cells(made(eager=None))[2][2:5] == ["–", "12.3", "–"]


def test_the_command_prints_the_table_and_writes_it_to_files(
    report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Plan] = []

    def run(plan: Plan, tell: Callable[[str], None]) -> Report:
        asked.append(plan)
        return report

    monkeypatch.setattr(measure, "run", run)
    with pytest.raises(SystemExit) as stop:
        main(
            f"bench --device cpu --methods van,a-gem --runs 1,3 --json {tmp_path}/t.json --markdown {tmp_path}/t.md".split()
        )
    assert stop.value.code == 0
    assert asked == [Plan("cpu", ["van", "a-gem"], [1, 3])]
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    for row in cells(report)[2:]:
        assert row in lines
    assert json.loads((tmp_path / "t.json").read_text()) == measure.document(report)
    assert (tmp_path / "t.md").read_text() == measure.markdown(report)
    assert re.search(r"784-256-256-10, batch 10", printed.replace("\n", " "))


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ("--methods agem", "did you mean 'a-gem'?"),
        ("--methods icarl", "classes of their own"),
        ("--methods=,", "at least one method"),
        ("--device gpu", "cpu, cuda or auto"),
        pytest.param(
            "--device cuda",
            "--device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        ("--runs 0", "--runs '0'"),
        ("--runs 1,five", "--runs '1,five'"),
        ("--runs 1,-5", "--runs '1,-5'"),
        ("--runs=,", "such as 1,5,40"),
        ("--rounds 0", "--rounds 0"),
        ("--rounds many", "--rounds"),
        ("--tasks 0", "--tasks 0"),
        ("--tasks 17", "1 to 16"),
        ("--json {tmp}", "it is a folder"),
        ("--markdown {tmp}/file/table.md", "is not a folder"),
    ],
)
def test_bad_input_is_one_sentence(
    options: str, mentions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        main(["bench", *options.format(tmp=tmp_path).split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("onepass: ")
    assert mentions in line
