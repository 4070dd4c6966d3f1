"""TensorBoard and the live view show what is reported."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from onepass import InputError, LiveView, OnePass, TensorBoard
from tests.live.reports import CLASSES, KEYS, Report, stream
from tests.toys import small_net


def test_tensorboard_is_given_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports: list[Report] = []
    watches = [TensorBoard(tmp_path / "events"), reports.append]
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, watch=watches, watch_every=2)
    for task in range(2):
        for x, y in stream(seed=task):
            learner.observe(x, y)
        learner.end_task()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    single = set(KEYS) - {"step", "memory", "forgetting_by_task"}
    parts = {"memory/0", "memory/1", "forgetting_by_task/0"}
    assert set(events.Tags()["scalars"]) == single | parts
    for tag in ("task", "loss", "accuracy", "violations", "memory_bytes", "milliseconds"):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(report["step"], pytest.approx(report[tag])) for report in reports]
    for tag in ("cosine", "forgetting"):
        told = [report for report in reports if report[tag] is not None]
        known = [(report["step"], pytest.approx(report[tag])) for report in told]
        assert known
        assert [(event.step, event.value) for event in events.Scalars(tag)] == known
    of_task = [report["memory"][1] for report in reports if 1 in report["memory"]]
    assert [event.value for event in events.Scalars("memory/1")] == of_task


def test_tensorboard_without_its_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"tensorboard: install onepass\[track\]") as caught:
        TensorBoard(tmp_path)
    assert "\n" not in str(caught.value)


def test_tensorboard_writes_to_no_place_that_was_not_named() -> None:
    says = "the folder of events is empty: give the path of a folder"
    with pytest.raises(InputError, match=says):
        TensorBoard("")


def test_the_live_view_shows_the_last_reports_and_gives_the_screen_back() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150, height=40)
    reports: list[Report] = []
    with LiveView(console, rows=3) as view:
        watches = [view, reports.append]
        learner = OnePass(small_net(CLASSES), learning_rate=0.1, watch=watches, watch_every=2)
        for task in range(2):
            for x, y in stream(10, seed=task):
                learner.observe(x, y)
            learner.end_task()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[?25l" in shown  # the cursor goes,
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # and comes back
    last = shown[shown.rindex("┏") :]
    for name in KEYS:
        assert (name.replace("_", " ") in last) == (name != "forgetting_by_task")
    lines = [line for line in last.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == [str(report["step"]) for report in reports[-3:]]
    assert [row[2] for row in rows] == [f"{report['loss']:.3g}" for report in reports[-3:]]


def test_the_live_view_gives_the_screen_back_after_an_error() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def interrupted() -> None:
        with LiveView(console) as view:
            view({"step": 1, "loss": None, "accuracy": 0.25})
            raise RuntimeError("of the stream")

    with pytest.raises(RuntimeError, match="of the stream"):
        interrupted()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "–" in shown
    assert "0.25" in shown
