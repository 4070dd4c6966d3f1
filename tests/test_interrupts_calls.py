"""Ctrl-C in the middle of a call: the learner is as before the call or as after it, never in between."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from onepass.live.saving import packed
from tests.live.modules import CLASSES, stream
from tests.toys import FEATURES, Normed, small_net

Make = Callable[[nn.Module], OnePass]
TASKS = 6
OWN_CLASSES = {f"task {n}": range(2 * n, 2 * n + 2) for n in range(TASKS)}


class Call(NamedTuple):
    """A call of a learner."""

    observes: bool
    make: Callable[[OnePass], object]


class Count(NamedTuple):
    """How many interrupts struck inside a call, by what became of it."""

    undone: int
    done: int


_temporary = TemporaryDirectory()
FOLDER = Path(_temporary.name)
ON_DISK = Memory(examples=30, held_out=4, where="disk", folder=FOLDER)


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def adam(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    return OnePass(
        module, method, optimizer=torch.optim.Adam(module.parameters(), lr=0.01), **settings
    )


def sgd(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    return OnePass(module, method, learning_rate=0.1, **settings)


class Case(NamedTuple):
    """A learner, and the stream that it learns."""

    build: Callable[[], nn.Module]
    make: Make
    ends: bool = True  # by end_task()
    named: bool = False  # observe() is told the task
    again: bool = False  # the data are looked at a second time
    classes: Callable[[int], range] = lambda task: range(CLASSES)
    regression: bool = False


def small() -> nn.Module:
    return small_net(CLASSES)


def small_memory(module: nn.Module) -> OnePass:
    return sgd(module, "er", memory=Memory(per_task=7, examples=9))


def task_free(module: nn.Module) -> OnePass:
    return sgd(module, "er", task_free=True, memory=Memory(examples=20, recent=2))


def icarl(module: nn.Module) -> OnePass:
    return sgd(module, "icarl", tasks=OWN_CLASSES, exemplars=20)


def autosaved(module: nn.Module) -> OnePass:
    return sgd(module, autosave=FOLDER / "autosave")


def on_disk(module: nn.Module) -> OnePass:
    return sgd(module, "er", memory=ON_DISK)


def method(name: str) -> Make:
    return lambda module: sgd(module, name)


CASES = {
    "sgd": Case(small, sgd),
    "adam": Case(small, adam),
    "batch-norm": Case(Normed, sgd),
    "pi": Case(small, method("pi")),
    "er, small memory": Case(Normed, small_memory),
    "new classes, adam": Case(
        lambda: small_net(2),
        lambda module: adam(module, grow=True),
        classes=lambda task: range(2 + task % 3),
    ),
    "gem": Case(small, method("gem")),
    "task-free": Case(small, task_free, ends=False),
    "ewc, a second look": Case(Normed, method("ewc"), again=True),
    "mas, a second look": Case(small, lambda module: adam(module, "mas"), again=True),
    "own loss": Case(small, lambda module: sgd(module, loss=squared), regression=True),
    "tasks that end by themselves, autosave": Case(Normed, autosaved, ends=False, named=True),
    "held out, on disk": Case(small, on_disk),
    "icarl, a second look": Case(
        lambda: small_net(2 * TASKS),
        icarl,
        named=True,
        again=True,
        classes=lambda task: OWN_CLASSES[f"task {task}"],
    ),
    "rwalk": Case(small, method("rwalk")),
    "mega-2": Case(Normed, method("mega-2")),
}


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.sum(1) - y).square().mean()


def calls(case: Case) -> list[Call]:
    """A stream of small tasks: the calls that learn it."""
    made: list[Call] = []
    for task in range(TASKS):
        name = f"task {task}" if case.named else None
        batches = stream(batches=4, classes=case.classes(task), seed=task)
        for x, y in batches:
            target = y.float() if case.regression else y

            def observe(
                learner: OnePass, x: Tensor = x, y: Tensor = target, name: str | None = name
            ) -> object:
                return learner.observe(x, y, task=name)

            made.append(Call(True, observe))
        if case.ends:
            again = batches if case.again else None
            made.append(Call(False, lambda learner, again=again: learner.end_task(again=again)))
    return made


def module_state(learner: OnePass) -> tuple[object, ...]:
    """What a file does not hold."""
    return (
        [part.training for part in learner.module.modules()],
        [p.grad is None for p in learner.module.parameters()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


class Interrupter:
    """A thread that sends this process one SIGINT whenever it is asked to, after some time."""

    def __enter__(self) -> Interrupter:
        self._asked, self._end = threading.Semaphore(0), False
        self.sent = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def after(self, seconds: float) -> None:
        self._seconds = seconds
        self.sent.clear()
        self._asked.release()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._end:
                return
            until = time.perf_counter() + self._seconds
            while time.perf_counter() < until:  # a sleep would be too coarse
                time.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            self.sent.set()

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._asked.release()
        self._thread.join()


def storm(name: str, hits: int) -> dict[bool, Count]:
    """Interrupt calls until `hits` interrupts have struck inside `observe`.

    The key is whether it was `observe`.
    """
    case = CASES[name]
    start = case.build().state_dict()

    def fresh() -> OnePass:
        module = case.build()
        module.load_state_dict(start)
        torch.manual_seed(0)  # from here on torch's generator must stay as it is
        return case.make(module)

    undisturbed, states = fresh(), []
    states.append((packed(undisturbed), module_state(undisturbed)))
    steps = calls(case)
    took = []
    for step in steps:
        began = time.perf_counter()
        step.make(undisturbed)
        took.append(time.perf_counter() - began)
        states.append((packed(undisturbed), module_state(undisturbed)))
    counts = {True: Count(0, 0), False: Count(0, 0)}
    generator = random.Random(0)
    with Interrupter() as interrupter:
        while sum(counts[True]) < hits:
            learner, at = fresh(), 0
            while at < len(steps) and sum(counts[True]) < hits:
                inside = False
                try:
                    interrupter.after(generator.random() * 1.3 * took[at])
                    inside = True
                    steps[at].make(learner)
                    inside = False
                    interrupter.sent.wait(10)
                    time.sleep(0.001)  # it came after the call, and strikes here at the latest
                    raise AssertionError("an interrupt was lost")
                except KeyboardInterrupt:
                    interrupter.sent.wait(10)
                now, what = (packed(learner), module_state(learner)), steps[at].observes
                done = now != states[at]
                if done:
                    assert now == states[at + 1], f"between two states in call {at} of {name}"
                    at += 1
                undone, whole = counts[what]
                counts[what] = Count(undone + (inside and not done), whole + (inside and done))
    return counts


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
    assert fewer[-1]["loss"] == pytest.approx(
        (all_reports[-2]["loss"] + all_reports[-1]["loss"]) / 2
    ), "the next report is of all batches since the last"


def test_a_module_that_hangs_can_be_interrupted_and_the_batch_is_not_learnt() -> None:
    class Hanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head, self.hangs = (
                nn.BatchNorm1d(FEATURES),
                nn.Linear(FEATURES, CLASSES),
                False,
            )

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

    signal.signal(signal.SIGINT, mine)
    learner = sgd(
        small_net(CLASSES), watch=lambda _: os.kill(os.getpid(), signal.SIGINT), watch_every=1
    )
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
