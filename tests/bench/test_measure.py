"""`onepass bench`: a line for each method and number of runs, as a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onepass.bench import measure
from onepass.bench.floor import Rates, Work
from onepass.bench.measure import Plan, Report, Row
from onepass.bench.processes import Sizes
from tests.commands import printed, refusal

IMAGES, TASKS = 1000, 2


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(scope="module")
def report() -> Report:
    told: list[str] = []
    asked = Plan("cpu", ["van", "mas"], [1, 3], rounds=2, tasks=1, both=True)
    asked = replace(asked, seconds=0.01, images=1000, cores=1, sizes=Sizes(64, 1000))
    found = measure.run(asked, told.append)
    assert len(told) == len(found.rows)
    return found


def test_there_is_a_line_for_each_method_and_number_of_runs(report: Report) -> None:
    ways = ((1, "looped"), (3, "stacked"), (3, "looped"))
    expected = [(name, runs, way) for name in ("van", "mas") for runs, way in ways]
    assert [(row.method, row.runs, row.way) for row in report.rows] == expected


def test_the_numbers_of_a_line_fit_together(report: Report) -> None:
    for row in report.rows:
        assert row.eager is not None
        assert row.ratio is not None
        assert min(row.eager, row.ours, row.ratio) > 0
        assert report.floor(row) == 1e6 * row.work.seconds(report.rates)
    assert report.rates.flops > 0


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
    assert list(zip(*(column.cells for column in shown.columns), strict=True)) == [
        tuple(cells) for cells in body
    ]
    assert "241 GFLOP/s" in str(shown.caption)
    assert "21 GB/s" in str(shown.caption)
    (row,) = json.loads(json.dumps(measure.document(found)))["rows"]
    assert row.pop("work") == {"flops": 120_500, "bytes": 1.0}
    times = {"eager": 100, "ours": 12.345, "ratio": 8.1, "floor": 0.5, "share": 0.5 / 12.345}
    assert row == {"method": "van", "runs": 5, "way": "stacked"} | times


def test_a_method_that_nobody_wrote_by_hand_has_a_dash() -> None:
    assert cells(made(eager=None))[2][2:5] == ["–", "12.3", "–"]


def test_the_command_prints_the_table_and_writes_it_to_files(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plan] = []

    def run(plan: Plan, tell: Callable[[str], None]) -> Report:
        asked.append(plan)
        return report

    monkeypatch.setattr(measure, "run", run)
    files = ["--json", f"{tmp_path}/t.json", "--markdown", f"{tmp_path}/t.md"]
    text = printed("bench", "--device", "cpu", "--methods", "van,a-gem", "--runs", "1,3", *files)
    assert asked == [Plan("cpu", ["van", "a-gem"], [1, 3])]
    lines = [line.split() for line in text.splitlines()]
    for row in cells(report)[2:]:
        assert row in lines
    assert json.loads((tmp_path / "t.json").read_text()) == measure.document(report)
    assert (tmp_path / "t.md").read_text() == measure.markdown(report)
    assert "784-256-256-10, batch 10" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ("--methods agem", "did you mean 'a-gem'?"),
        ("--methods icarl", "classes of their own"),
        ("--methods=,", "at least one method"),
        ("--device gpu", "cpu, cuda or auto"),
        pytest.param("--device cuda", "--device cpu", marks=no_gpu),
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
    assert mentions in refusal(capsys, "bench", *options.format(tmp=tmp_path).split())
