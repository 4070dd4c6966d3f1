"""Interrupts at random moments, and learners that are interrupted."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from onepass.live.saving import packed
from tests.live.modules import CLASSES, stream
from tests.toys import Normed, small_net

Make = Callable[[nn.Module], OnePass]
TASKS = 6
OWN_CLASSES = {f"task {n}": range(2 * n, 2 * n + 2) for n in range(TASKS)}
_temporary = TemporaryDirectory()
FOLDER = Path(_temporary.name)
ON_DISK = Memory(examples=30, held_out=4, where="disk", folder=FOLDER)


class Call(NamedTuple):
    """A call of a learner."""

    observes: bool
    make: Callable[[OnePass], object]


class Count(NamedTuple):
    """How many interrupts struck inside a call, by what became of it."""

    undone: int
    done: int


def sgd(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    return OnePass(module, method, learning_rate=0.1, **settings)


class Case(NamedTuple):
    """A learner, and the stream that it learns."""

    build: Callable[[], nn.Module]
    make: Make
    ends: bool = True  # by end_task()
    named: bool = False  # observe() is told the task
    again: bool = False  # the data are given a second time
    classes: Callable[[int], range] = lambda task: range(CLASSES)
    regression: bool = False


def small() -> nn.Module:
    return small_net(CLASSES)


def adam(module: nn.Module, method: str = "a-gem", **settings: Any) -> OnePass:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return OnePass(module, method, optimizer=optimizer, **settings)


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


def own_classes(task: int) -> range:
    return OWN_CLASSES[f"task {task}"]


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.sum(1) - y).square().mean()


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
    "ewc, a second pass": Case(Normed, method("ewc"), again=True),
    "mas, a second pass": Case(small, lambda module: adam(module, "mas"), again=True),
    "own loss": Case(small, lambda module: sgd(module, loss=squared), regression=True),
    "tasks that end by themselves, autosave": Case(Normed, autosaved, ends=False, named=True),
    "held out, on disk": Case(small, on_disk),
    "icarl, a second pass": Case(
        lambda: small_net(2 * TASKS), icarl, named=True, again=True, classes=own_classes
    ),
    "rwalk": Case(small, method("rwalk")),
    "mega-2": Case(Normed, method("mega-2")),
}


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
