"""Handlers of the user's own, several signals at once, and children.

Every signal is handled once, and its handler sees a consistent learner.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from onepass import OnePass, interrupts
from onepass.interrupts import Held, Opened
from onepass.live.saving import packed
from tests.live.modules import CLASSES, stream
from tests.processes import told_by
from tests.toys import FEATURES, small_net


class TooLateError(Exception):
    """What a handler of the user's own raises."""


def out_of_time(number: int, _: object) -> None:
    raise TooLateError(signal.Signals(number).name)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """The tests set handlers of their own, and no call may replace them for good."""
    own = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = [signal.getsignal(number) for number in interrupts.SIGNALS]
    for number, handler in own.items():
        signal.signal(number, handler)
    assert not any(isinstance(handler, interrupts._StandIn) for handler in left)
    assert (interrupts._depth, interrupts._open, interrupts._pending) == (0, False, [])


class Calling(nn.Module):
    """Batch-norm, whose buffers change in the forward pass, and something that is called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)
        self.then: Callable[[], object] = bool

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x))
        self.then()
        return found


def test_two_signals_that_wait_for_the_same_moment_are_both_heard() -> None:
    signal.signal(signal.SIGTERM, out_of_time)

    def both() -> None:
        with Held():
            send(signal.SIGTERM, signal.SIGINT)
            with Opened():
                pytest.fail("nothing was raised")

    with pytest.raises(TooLateError) as caught:
        both()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_ctrl_c_strikes_after_an_inner_call_and_other_signals_at_the_end() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def both() -> None:
        with Held(), Opened():
            with Held():
                send(signal.SIGINT, signal.SIGTERM)
            pytest.fail("nothing was raised")

    with pytest.raises(KeyboardInterrupt):
        both()
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("call", ["observe", "predict"])
def test_a_handler_of_the_users_own_is_called_after_the_batch(call: str) -> None:
    signal.signal(signal.SIGALRM, out_of_time)
    module = Calling()
    learner = OnePass(module, learning_rate=0.1)
    (x, y), *_ = stream()
    learner.observe(x, y)
    before = packed(learner)
    module.then = lambda: send(signal.SIGALRM)
    with pytest.raises(TooLateError):
        learner.observe(x, y) if call == "observe" else learner.predict(x)
    assert learner.steps == (2 if call == "observe" else 1)
    assert (packed(learner) == before) == (call == "predict")


def test_what_a_handler_raises_inside_watch_arrives_as_it_is() -> None:
    signal.signal(signal.SIGALRM, out_of_time)
    watch: dict[str, Any] = {"watch": lambda _: send(signal.SIGALRM), "watch_every": 1}
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, **watch)
    with pytest.raises(TooLateError):
        learner.observe(*stream()[0])
    assert learner.steps == 1


def test_what_a_handler_saves_is_a_learner_before_a_batch_or_after_it(tmp_path: Path) -> None:
    module, twin, heard = Calling(), Calling(), list[int]()
    twin.load_state_dict(module.state_dict())
    learner, undisturbed = (OnePass(m, learning_rate=0.1) for m in (module, twin))
    first, second, *_ = stream()
    learner.observe(*first)
    undisturbed.observe(*first)
    undisturbed.observe(*second)
    after = packed(undisturbed)

    def save(number: int, _: object) -> None:
        learner.save(tmp_path / "saved")
        heard.append(number)

    signal.signal(signal.SIGTERM, save)
    module.then = lambda: send(signal.SIGTERM)
    learner.observe(*second)
    assert heard == [signal.SIGTERM]
    assert (tmp_path / "saved").read_bytes() == after
    assert packed(learner) == after


@pytest.mark.parametrize("struck", [False, True], ids=["set inside", "after a struck end"])
def test_a_handler_may_call_the_one_that_it_found(
    struck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if struck:  # before the handlers were put back
        monkeypatch.setattr(interrupts, "_uninstall", bool)
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with Held():
        found = signal.getsignal(signal.SIGTERM)
        assert callable(found)
        if not struck:
            signal.signal(signal.SIGTERM, lambda number, frame: found(number, frame))
    monkeypatch.undo()
    if struck:
        found = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: found(number, frame))  # type: ignore[operator]
    for _ in range(3):
        with Held():
            send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 6


@pytest.mark.parametrize("kind", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_what_a_cluster_sends_before_its_time_is_up_is_heard_after_the_batch(
    kind: signal.Signals,
) -> None:
    signal.signal(kind, out_of_time)
    module = Calling()
    learner = OnePass(module, learning_rate=0.1)
    module.then = lambda: send(kind)
    with pytest.raises(TooLateError):
        learner.observe(*stream()[0])
    assert learner.steps == 1


def test_a_pipe_that_nobody_reads_can_be_interrupted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    learner.observe(*stream()[0])
    timer = threading.Timer(0.3, send, [signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        learner.save(tmp_path / "pipe")
    assert time.monotonic() - began < 20
    timer.join()


def test_a_handler_may_ask_while_the_main_thread_waits_for_its_turn() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = stream()[0]
    learner.observe(x, y)
    inside, leave, answers = threading.Event(), threading.Event(), list[Tensor]()

    def occupy() -> None:
        with learner._alone:
            inside.set()
            leave.wait(30)

    def disturb() -> None:
        while not learner._alone._queue:
            time.sleep(0.001)
        send(signal.SIGTERM)
        time.sleep(0.1)
        leave.set()

    def ask(*_: object) -> None:
        answers.append(learner.predict(x))

    def give_up(*_: object) -> None:
        raise TooLateError("it waits for ever")

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGALRM, give_up)
    threads = [threading.Thread(target=target) for target in (occupy, disturb)]
    threads[0].start()
    inside.wait(30)
    threads[1].start()
    signal.alarm(10)
    try:
        learner.observe(x, y)
    finally:
        signal.alarm(0)
        leave.set()
        for thread in threads:
            thread.join()
    assert len(answers) == 1
    assert learner.steps == 2


# In a process of its own: what other tests have loaded may hold locks that a fork copies.
FORKED = """
import os, signal, threading, time
from onepass.interrupts import Held

signal.signal(signal.SIGINT, signal.default_int_handler)

def fork():
    pid = os.fork()
    if pid == 0:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # it strikes at once
            os._exit(1)
        except KeyboardInterrupt:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

thread = threading.Thread(target=fork)
with Held():
    thread.start()
    thread.join()
"""


def test_a_child_that_another_thread_forks_inside_a_call_can_be_interrupted() -> None:
    told = told_by(FORKED)
    assert (told.stdout, told.stderr) == ("0\n", "")
