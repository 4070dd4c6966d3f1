"""Ctrl-C in the middle of a call: the learner is as before the call or as after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import OnePass
from onepass.live.saving import packed
from tests.interrupting import CASES, Interrupter, sgd, storm
from tests.live.modules import CLASSES, stream
from tests.toys import FEATURES, small_net


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_call_is_done_or_not_begun(case: str) -> None:
    assert threading.current_thread() is threading.main_thread()
    storm(case, hits=15)


@pytest.mark.long
def test_a_thousand_interrupts_inside_observe_leave_no_state_in_between() -> None:
    found = {case: storm(case, hits=-(-1000 // len(CASES))) for case in CASES}
    for case, counts in found.items():
        print(f"{case}: observe {counts[True]}, end_task {counts[False]}")
    assert sum(sum(counts[True]) for counts in found.values()) >= 1000


def test_an_interrupt_in_a_report_loses_that_report_alone() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.left = nn.Linear(FEATURES, CLASSES), -1

        def forward(self, x: Tensor) -> Tensor:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            found: Tensor = self.head(x)
            return found

    def learnt(strikes: bool) -> tuple[OnePass, list[dict[str, Any]]]:
        torch.manual_seed(0)
        module, reports = Interrupted(), list[dict[str, Any]]()
        learner = sgd(module, "er", watch=reports.append, watch_every=2)
        for number, (x, y) in enumerate(stream(batches=8)):
            if number == 4:
                learner.end_task()
            if number == 5:
                # Three passes: is the batch known? the batch with what is rehearsed, the report.
                module.left = 3 if strikes else -1
            with pytest.raises(KeyboardInterrupt) if strikes and number == 5 else nullcontext():
                learner.observe(x, y)
            assert learner.steps == number + 1
        return learner, reports

    (whole, all_reports), (struck, fewer) = learnt(strikes=False), learnt(strikes=True)
    assert torch.equal(whole.fleet.theta, struck.fleet.theta)
    assert [report["step"] for report in all_reports] == [2, 4, 6, 8]
    assert [report["step"] for report in fewer] == [2, 4, 8]
    # The next report is of all batches since the last.
    loss = (all_reports[-2]["loss"] + all_reports[-1]["loss"]) / 2
    assert fewer[-1]["loss"] == pytest.approx(loss)


def test_a_module_that_hangs_can_be_interrupted_and_the_batch_is_not_learnt() -> None:
    class Hanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)
            self.hangs = False

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.norm(x))
            if self.hangs:
                time.sleep(30)
            return found

    module = Hanging()
    learner = sgd(module)
    (x, y), *_ = stream()
    learner.observe(x, y)
    before = packed(learner)
    module.hangs = True
    with Interrupter() as interrupter:
        interrupter.after(0.2)
        with pytest.raises(KeyboardInterrupt):
            learner.observe(x, y)
    assert packed(learner) == before


def test_a_handler_of_the_users_own_hears_an_interrupt_once_and_stays() -> None:
    heard: list[int] = []

    def mine(number: int, _: object) -> None:
        heard.append(number)

    def strike(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, mine)
    learner = sgd(small_net(CLASSES), watch=strike, watch_every=1)
    (x, y), *_ = stream()
    learner.observe(x, y)
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_an_interrupt_in_the_data_given_again_leaves_the_task_open() -> None:
    learner = sgd(small_net(CLASSES), "ewc")
    (x, y), *_ = stream()
    learner.observe(x, y)
    before = packed(learner)

    def again() -> Iterator[tuple[Tensor, Tensor]]:
        yield x, y
        os.kill(os.getpid(), signal.SIGINT)
        yield x, y

    with pytest.raises(KeyboardInterrupt):
        learner.end_task(again=again())
    assert packed(learner) == before
    learner.end_task(again=[(x, y)])
    assert learner.segment == 1
