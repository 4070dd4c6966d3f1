"""Threads that ask while a learner learns: consistent predictions, and learning as if alone."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, LearntError, Memory, OnePass
from onepass.live.exclusive import Exclusive
from onepass.live.saving import packed
from tests.live.asking import asking, until
from tests.live.modules import CLASSES, equal
from tests.toys import FEATURES, Normed, small_net


class Noisy(nn.Module):
    """Batch-norm and dropout: everything that differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        self.layers = nn.Sequential(*body, nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def learn(
    learner: OnePass, batches: int, tasks: int, least: Callable[[], bool] = lambda: True
) -> None:
    """A stream whose examples are drawn from torch's own generator, as in many people's loops."""
    torch.manual_seed(1)
    for _ in range(tasks):
        for _ in range(batches):
            learner.observe(*a_batch())
        learner.end_task()
    until(least)


BUILDS = {"dropout": Noisy, "batch-norm": Normed, "plain": partial(small_net, CLASSES)}


def a_batch() -> tuple[Tensor, Tensor]:
    """From torch's own generator."""
    return torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))


@pytest.mark.parametrize("method", ["a-gem", "er", "pi", "gem"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_is_learnt_does_not_depend_on_being_asked(
    build: Callable[[], nn.Module], method: str
) -> None:
    asked, alone = build(), build()
    alone.load_state_dict(asked.state_dict())
    plan = Memory(per_task=20)
    learners = [OnePass(m, method, learning_rate=0.1, memory=plan) for m in (asked, alone)]
    x = torch.randn(5, FEATURES)
    first = a_batch()
    for learner in learners:
        learner.observe(*first)
    with asking(lambda: (learners[0].predict(x), learners[0].scores(x))) as counts:
        learn(learners[0], batches=15, tasks=2, least=lambda: min(counts) > 0)
    learn(learners[1], batches=15, tasks=2)
    assert packed(learners[0]) == packed(learners[1])


def test_what_is_learnt_does_not_depend_on_being_asked_while_new_classes_come() -> None:
    asked, alone = small_net(2), small_net(2)
    alone.load_state_dict(asked.state_dict())
    learners = [OnePass(module, "van", learning_rate=0.01, grow=True) for module in (asked, alone)]
    x = torch.randn(5, FEATURES)

    def grow(learner: OnePass) -> None:
        for label in range(2, 62):
            learner.observe(torch.randn(8, FEATURES), torch.full((8,), label))

    for learner in learners:
        torch.manual_seed(1)
        learner.observe(torch.randn(8, FEATURES), torch.randint(0, 2, (8,)))
        with asking(lambda: learners[0].predict(x), threads=3 if learner is learners[0] else 0):
            grow(learner)
    assert packed(learners[0]) == packed(learners[1])


def test_an_answer_is_that_of_some_moment_between_two_batches() -> None:
    module = Noisy()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(5, FEATURES)
    torch.manual_seed(1)
    data = [(torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))) for _ in range(40)]
    possible = []
    learner = OnePass(module, learning_rate=0.5)
    for pair in data:
        learner.observe(*pair)
        possible.append(learner.scores(x))
    again = Noisy()
    again.load_state_dict(start)
    learner = OnePass(again, learning_rate=0.5)
    learner.observe(*data[0])
    answers: list[Tensor] = []
    with asking(lambda: answers.append(learner.scores(x))) as counts:
        for pair in data[1:]:
            learner.observe(*pair)
        until(lambda: min(counts) >= 5)
    assert answers
    for answer in answers:
        assert any(torch.equal(answer, one) for one in possible)


def test_reports_files_and_exports_of_another_thread_are_whole(tmp_path: Path) -> None:
    module, twin, template = Noisy(), Noisy(), Noisy()
    twin.load_state_dict(module.state_dict())
    learner, alone = (OnePass(m, learning_rate=0.1) for m in (module, twin))

    def everything() -> None:
        name = tmp_path / str(threading.get_ident())
        learner.report()
        learner.save(name)
        assert OnePass.load(name, copy.deepcopy(template)).steps > 0
        assert learner.violations is not None

    first, *data = [a_batch() for _ in range(31)]
    learner.observe(*first)
    alone.observe(*first)
    with asking(everything, threads=2) as counts:
        for x, y in data:
            learner.observe(x, y)
        until(lambda: min(counts) >= 2)
    for x, y in data:
        alone.observe(x, y)
    assert equal(module, twin)


def the_second(report: dict[str, Any]) -> None:
    """It was made after the second batch, all of it."""
    assert report["step"] == 2


CALLS: dict[str, Callable[[OnePass, Path], object]] = {
    "predict": lambda learner, _: learner.predict(torch.zeros(1, FEATURES)),
    "scores": lambda learner, _: learner.scores(torch.zeros(1, FEATURES)),
    "report": lambda learner, _: the_second(learner.report()),
    "violations": lambda learner, _: learner.violations,
    "save": lambda learner, folder: learner.save(folder / "saved"),
    "export": lambda learner, folder: learner.export(folder / "model.pt2"),
    "learning rate": lambda learner, _: setattr(learner, "learning_rate", 0.2),
    "end_task": lambda learner, _: learner.end_task(),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_another_thread_waits_for_the_batch(call: str, tmp_path: Path) -> None:
    class Waiting(nn.Linear):
        waits = False

        def forward(self, x: Tensor) -> Tensor:
            if self.waits and self.training:
                inside.set()
                assert further.wait(60)
            return super().forward(x)

    inside, further, answered = (threading.Event() for _ in range(3))
    module = Waiting(FEATURES, CLASSES)
    learner = OnePass(module, learning_rate=0.1)
    x, y = torch.randn(8, FEATURES), torch.arange(8) % CLASSES
    learner.observe(x, y)
    module.waits = True
    learning = threading.Thread(target=lambda: learner.observe(x, y))
    learning.start()
    assert inside.wait(60)
    module.waits = False
    asking = threading.Thread(target=lambda: (CALLS[call](learner, tmp_path), answered.set()))
    asking.start()
    assert not answered.wait(0.1)
    further.set()
    learning.join(60)
    asking.join(60)
    assert answered.is_set()


def test_those_who_wait_are_served_in_their_order() -> None:
    alone, order, inside = Exclusive(), list[int](), threading.Event()

    def enter(number: int) -> None:
        inside.set()
        with alone:
            order.append(number)

    threads = []
    with alone, alone:
        for number in range(5):
            inside.clear()
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            inside.wait()
            while len(alone._queue) <= number:
                time.sleep(0.001)
    with alone:  # at the end of the queue, though this thread asks at once
        order.append(5)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, 5]


def test_learning_goes_on_under_a_crowd_that_asks() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))
    learner.observe(x, y)
    with asking(lambda: learner.predict(x), threads=8) as counts:
        began = time.monotonic()
        for _ in range(50):
            learner.observe(x, y)
        assert time.monotonic() - began < 30
        until(lambda: min(counts) > 0)


def test_a_child_of_a_fork_between_two_calls_may_go_on() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))
    learner.observe(x, y)
    code = in_child(lambda: learner.predict(x))
    assert code == 0


def test_a_child_of_a_fork_during_a_call_of_another_thread_is_told() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    entered, leave = threading.Event(), threading.Event()

    def occupy() -> None:
        with learner._alone:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=occupy)
    thread.start()
    entered.wait(30)

    def ask() -> None:
        with pytest.raises(InputError, match="forked while another thread used the learner"):
            learner.predict(torch.randn(2, FEATURES))

    code = in_child(ask)
    leave.set()
    thread.join()
    assert code == 0


def in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # the threads of OpenMP are not there any more
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- the classifier


def test_two_learners_that_ask_each_other_do_not_wait_for_ever() -> None:
    gate = threading.Barrier(2)
    learners: list[OnePass] = []

    def asking_the(other: int) -> Callable[[object], None]:
        def ask(_: object) -> None:
            gate.wait(30)
            learners[other].predict(torch.randn(2, FEATURES))

        return ask

    def learn_once(learner: OnePass) -> None:
        try:
            learner.observe(torch.randn(5, FEATURES), torch.arange(5) % CLASSES)
        except LearntError as error:
            refusals.append(error)

    for other in (1, 0):
        watch: dict[str, Any] = {"watch": asking_the(other), "watch_every": 2}
        learners.append(OnePass(small_net(CLASSES), learning_rate=0.1, **watch))
        learn_once(learners[-1])
    refusals: list[LearntError] = []
    threads = [threading.Thread(target=learn_once, args=[one], daemon=True) for one in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(refusals) == 1
    assert "two learners wait for each other" in str(refusals[0])
    assert [learner.steps for learner in learners] == [2, 2]
    assert all(learner._alone._owner is None and not learner._alone._queue for learner in learners)


@pytest.mark.long
def test_a_million_answers_change_nothing_and_none_fails() -> None:
    asked, alone = Noisy(), Noisy()
    alone.load_state_dict(asked.state_dict())
    plan = Memory(per_task=50)
    learner, other = (OnePass(m, learning_rate=0.05, memory=plan) for m in (asked, alone))
    x = torch.randn(20, FEATURES)
    wanted, batches = 1_000_000 // len(x), 0
    torch.manual_seed(3)
    data = [(torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))) for _ in range(500)]

    def step(one: OnePass, number: int) -> None:
        one.observe(*data[number % len(data)])
        if number % 100 == 99:
            one.end_task()

    step(learner, 0)
    began = time.monotonic()
    with asking(lambda: learner.predict(x), threads=4) as counts:
        while sum(counts) < wanted:
            batches += 1
            step(learner, batches)
            assert time.monotonic() - began < 900, f"{sum(counts)} of {wanted} answers"
    seconds = time.monotonic() - began
    for number in range(batches + 1):
        step(other, number)
    assert packed(learner) == packed(other)
    calls = sum(counts)
    print(f"{calls * len(x)} predictions in {calls} calls, {batches} batches, {seconds:.0f} s")
