"""Ctrl-C in the middle of a call: the learner is as before the call or as after it, never in between."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from live_wrapper import CLASSES, stream
from onepass import Memory, OnePass
from onepass.live.saving import packed
from toys import FEATURES, Normed, small_net

Make = Callable[[nn.Module], OnePass]


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def adam(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    return OnePass(module, method, optimizer=torch.optim.Adam(module.parameters(), lr=0.01), **settings)


def sgd(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    return OnePass(module, method, learning_rate=0.1, **settings)


CASES: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "sgd": (lambda: small_net(CLASSES), sgd),
    "adam": (lambda: small_net(CLASSES), adam),
    "batch-norm": (Normed, sgd),
    "pi": (lambda: small_net(CLASSES), lambda module: sgd(module, "pi")),
    "er, small memory": (Normed, lambda module: sgd(module, "er", memory=Memory(per_task=7, examples=9))),
    "new classes, adam": (lambda: small_net(2), lambda module: adam(module, grow=True)),
    "gem": (lambda: small_net(CLASSES), lambda module: sgd(module, "gem")),
    "task-free": (lambda: small_net(CLASSES), lambda module: sgd(module, "er", task_free=True, memory=Memory(examples=20, recent=2))),
    "ewc, a second look": (Normed, lambda module: sgd(module, "ewc")),
    "mas, a second look": (lambda: small_net(CLASSES), lambda module: adam(module, "mas")),
    "own loss": (lambda: small_net(CLASSES), lambda module: sgd(module, loss=squared)),
}


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.sum(1) - y).square().mean()


def calls(case: str, tasks: int) -> list[Callable[[OnePass], object]]:
    """A stream of small tasks, each one call a step."""
    made: list[Callable[[OnePass], object]] = []
    for task in range(tasks):
        classes = range(2 + task % 3) if "new classes" in case else range(CLASSES)
        batches = stream(batches=4, classes=classes, seed=task)
        for x, y in batches:
            label = y.float() if case == "own loss" else y
            made.append(lambda learner, x=x, y=label: learner.observe(x, y))
        if case != "task-free":
            again = batches if "second look" in case else None
            made.append(lambda learner, again=again: learner.end_task(again=again))
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


def storm(case: str, hits: int) -> tuple[int, int]:
    """Interrupt calls of a learner until `hits` interrupts have struck inside one: how many calls were undone, and how many were done."""
    build, make = CASES[case]
    start = build().state_dict()

    def fresh() -> OnePass:
        module = build()
        module.load_state_dict(start)
        torch.manual_seed(0)  # from here on torch's generator must stay as it is
        return make(module)

    tasks = 6
    undisturbed, states = fresh(), []
    states.append((packed(undisturbed), module_state(undisturbed)))
    steps = calls(case, tasks)
    took = []
    for step in steps:
        began = time.perf_counter()
        step(undisturbed)
        took.append(time.perf_counter() - began)
        states.append((packed(undisturbed), module_state(undisturbed)))
    undone = done = 0
    luck = random.Random(0)
    with Interrupter() as interrupter:
        while undone + done < hits:
            learner, at = fresh(), 0
            while at < len(steps) and undone + done < hits:
                inside = False
                try:
                    interrupter.after(luck.random() * 1.3 * took[at])
                    inside = True
                    steps[at](learner)
                    inside = False
                    interrupter.sent.wait(10)
                    time.sleep(0.001)  # the interrupt came after the call, and strikes here at the latest
                    raise AssertionError("an interrupt was lost")
                except KeyboardInterrupt:
                    interrupter.sent.wait(10)
                now = packed(learner), module_state(learner)
                if now == states[at]:
                    undone += inside
                else:
                    assert now == states[at + 1], f"between two states in call {at} of {case}"
                    done += inside
                    at += 1
    return undone, done


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_call_is_done_or_not_begun(case: str) -> None:
    assert threading.current_thread() is threading.main_thread()
    storm(case, hits=15)


@pytest.mark.long
def test_a_thousand_interrupts_leave_no_state_in_between() -> None:
    counts = {case: storm(case, hits=-(-1000 // len(CASES))) for case in CASES}
    print({case: f"{undone} undone, {done} done" for case, (undone, done) in counts.items()})
    assert sum(undone + done for undone, done in counts.values()) >= 1000


def test_a_module_that_hangs_can_be_interrupted_and_the_batch_is_not_learnt() -> None:
    class Hanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head, self.hangs = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES), False

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
    learner = sgd(small_net(CLASSES), watch=lambda _: os.kill(os.getpid(), signal.SIGINT), watch_every=1)
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
