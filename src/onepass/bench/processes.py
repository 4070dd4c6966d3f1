"""Steps of a method in the middle of a stream, timed in processes as `onepass run` has them."""

from __future__ import annotations

import gc
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.bench import by_hand
from onepass.bench.floor import Rates, measured, wait
from onepass.engine.cpu import keep_freed_memory
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.precision import products
from onepass.engine.step_graphs import StepGraphs
from onepass.errors import InputError
from onepass.feed import Feed
from onepass.learners import method
from onepass.learners.base import Learner
from onepass.protocol import Run, assemble
from onepass.stopping import abandon, is_stopped, kill_fork_server, wake_helpers, within
from onepass.streams.base import TASKS, PermutedStream, Pool
from onepass.streams.mnist import PermutedMnist
from onepass.studies.executors import default_workers
from onepass.studies.recipe import load

RECIPE = "permuted-mnist"
INPUTS, CLASSES = math.prod(PermutedMnist.shape), PermutedMnist.classes_per_task
RATE = 1e-5  # so small that thousands of steps do not change what a step does
FEW = 100  # batches that are enough to fill the memory of a task
GRACE = 2.0  # seconds in which a process that was asked to usually ends
LONGEST = 1800.0  # seconds that one measurement may take
WARM = 3  # times that a loop is gone into: traced, captured, replayed

Loop = Callable[[int], int]  # takes at least so many steps, and says how many


@cache
def _pool(images: int) -> Pool:
    """Made-up bytes: a fifth of the pixels belongs to a class, and some of the others are noise.

    They can be learnt, so that tasks conflict.
    """
    generator = torch.Generator().manual_seed(0)
    count = images + 1  # the stream wants one to test with
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    shapes = torch.rand(CLASSES, INPUTS, generator=generator) < 0.2
    x = torch.randint(0, 256, (count, INPUTS), dtype=torch.uint8, generator=generator)
    return Pool(x * (shapes[classes] | (x >= 240)), classes, images, 1 / 255)


@cache
def _taught(tasks: int, images: int) -> Tensor:
    """The parameters of a run that has learnt from all past tasks at once.

    One that knows nothing has no constraint to violate. At the end the gradients of these tasks
    almost cancel each other, so that after several tasks GEM is corrected in almost every step and
    A-GEM in every other one (in the paper's ninth task: 72 % and 31 % of the steps).
    """
    stream, run = PermutedStream(_pool(images), None, None), Run(0, {"learning_rate": 0.1})
    feed, fleet, learner = assemble(stream, "ev", method("van"), [run], load(RECIPE).setup())
    batches = chain.from_iterable(zip(*map(feed.batches, range(tasks)), strict=True))
    for rate, steps in ((0.1, 200), (0.01, 100)):
        fleet.learning_rate.fill_(rate)
        for batch in islice(batches, steps):
            fleet.learn(learner, batch)
    return fleet.theta


class Middle(NamedTuple):
    """Runs of a method in the middle of a stream: task `phase` begins."""

    feed: Feed
    fleet: Fleet
    learner: Learner
    phase: int


def middle(
    name: str,
    runs: int,
    tasks: int,
    images: int,
    *,
    device: str = "cpu",
    mode: Mode = "auto",
    fleet_type: type[Fleet] = Fleet,
    **hyperparameters: float,
) -> Middle:
    """Runs as `onepass run permuted-mnist` assembles them, after `tasks` of `images` examples each.

    These tasks have been learnt from, the memory is full, and importances come from a step of the
    last one. A method that sees all tasks at once begins its only pass. All runs are the same run,
    so that constraints are violated as often whatever their number: GEM solves a program only then.
    """
    found, recipe = method(name), load(RECIPE)
    stream = PermutedStream(_pool(images), images // TASKS["ev"] if found.joined else None, None)
    values = {hyper: grid[0] for hyper, grid in found.learner.hyperparameters.items()}
    values |= {"learning_rate": RATE} | hyperparameters
    feed, fleet, learner = assemble(
        stream,
        "ev",
        found,
        [Run(0, values)] * runs,
        replace(recipe.setup(), gradients=mode),
        recipe.method_options(name),
        device=device,
        fleet_type=fleet_type,
    )
    taught = _taught(tasks, images)
    fleet.theta[:, : taught.shape[1]] = taught.to(fleet.device)
    past = range(0 if found.joined else tasks)
    for task in past if learner.memory is not None else past[-1:]:
        learner.begin_task(task)
        many, _ = next(feed.stretches(task, 0, lambda _, left: min(left, FEW)))
        if learner.memory is not None:
            learner.memory.observe(many)
        else:
            some = many.piece(0, feed.batch_size)
            fleet.learn(learner, some)
            if learner.needs.second_pass:
                learner.review([some])
        learner.end_task()
    learner.begin_task(len(past))
    return Middle(feed, fleet, learner, len(past))


class Case(NamedTuple):
    """Steps that a process can take: of a method by hand (`mode` None) or as a fleet.

    They come after `tasks` tasks of `images` examples.
    """

    method: str
    runs: int
    mode: Mode | None
    tasks: int
    images: int

    def loop(self, device: str) -> Loop:
        feed, fleet, learner, phase = middle(
            self.method, self.runs, self.tasks, self.images, device=device, mode=self.mode or "auto"
        )
        if self.mode is None:
            return by_hand.loop(self.method, feed, learner, phase)
        learn = StepGraphs(fleet, learner)

        def stretches() -> Iterator[int]:  # as `protocol.train` does it, pass after pass
            while True:
                for batches, steps in feed.stretches(phase, 0, lambda _, left: learn.stretch(left)):
                    learn(batches, steps)
                    yield steps

        source = stretches()

        def take(count: int) -> int:
            done = 0
            while done < count:
                done += next(source)
            return done

        return take


@dataclass(frozen=True)
class Sizes:
    """The sizes of the matrix and the copy that measure the machine; None: as large as it takes."""

    side: int | None = None
    numbers: int | None = None


def _serve(pipe: Connection, threads: int, device: str, tuned: bool) -> None:
    """Serve one process: it measures what it is sent.

    `Sizes` give the rates of the machine, a case and a count give seconds and steps, None frees
    everything.
    """
    torch.set_num_threads(threads)
    if tuned:
        keep_freed_memory()
    place, loops = torch.device(device), dict[Case, Loop]()

    def answer(question: Sizes | Case | None, count: int) -> Rates | tuple[float, int] | None:
        if isinstance(question, Sizes):
            return measured(place, question.side, question.numbers)
        if question is None:
            loops.clear()
            gc.collect()
            return None
        if question not in loops:
            loops[question] = question.loop(device)
            for _ in range(WARM):
                loops[question](1)
        wait(place)
        began = time.perf_counter()
        steps = loops[question](count)
        wait(place)
        return time.perf_counter() - began, steps

    with products(place, tf32=True), suppress(EOFError, BrokenPipeError):  # who asked is gone
        while True:
            question, count = pipe.recv()
            try:
                said: Any = answer(question, count)
            except Exception as reason:
                said = reason
            pipe.send(said)


class Workers:
    """Processes as `onepass run` has them: `each` with one thread, one per core.

    A single run is tried `alone` with one thread and with all. So are the `plain` loops that are
    written by hand, in processes that are not tuned. On a GPU all of them are one process.
    """

    def __init__(self, device: str, cores: int | None = None) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [__name__, "torch._dynamo"]
        )  # once for all; tracing imports the latter
        self._device = device
        self._processes: list[Any] = []
        self.cores = cores or default_workers("cpu")
        try:  # in a thread: a stopped fork server would be waited for, and Ctrl-C not heard
            within(LONGEST, self._start_all)
        except BaseException as reason:
            abandon()
            if isinstance(reason, TimeoutError):
                raise InputError(
                    f"processes have not started for {LONGEST / 60:.0f} minutes:"
                    " measure when the machine is idle"
                ) from None
            raise

    def _start_all(self) -> None:
        resource_tracker.ensure_running()  # now: whoever starts it is open to interrupts again
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # of this thread: Ctrl-C is for the driving process alone
        self.each = [
            self._start(1, True) for _ in range(1 if self._device == "cuda" else self.cores)
        ]
        self.alone = self.plain = self.each
        if self._device == "cpu":
            many = [] if self.cores == 1 else [self.cores]
            self.alone = [self.each[0], *(self._start(threads, True) for threads in many)]
            self.plain = [self._start(threads, False) for threads in (1, *many)]

    def _start(self, threads: int, tuned: bool) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, threads, self._device, tuned), daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def rates(self, sizes: Sizes) -> Rates:
        """What the whole machine can do."""
        found: Rates = self._ask(self.alone[-1:], [sizes])[0]
        return found

    def time(self, pipes: Sequence[Connection], cases: Sequence[Case], count: int) -> float:
        """Seconds per step of cases that run at the same time, until all are done."""
        self._ask(pipes, cases)  # nobody shall wait for another one's preparations
        found: list[tuple[float, int]] = self._ask(pipes, cases, count)
        return max(seconds / steps for seconds, steps in found)

    def forget(self) -> None:
        """Free what cases hold."""
        everybody = list(dict.fromkeys([*self.each, *self.alone, *self.plain]))
        self._ask(everybody, [None] * len(everybody))

    def _ask(
        self, pipes: Sequence[Connection], questions: Sequence[Sizes | Case | None], count: int = 0
    ) -> list[Any]:
        for pipe, question in zip(pipes, questions, strict=True):
            pipe.send((question, count))
        for pipe in pipes:
            if not pipe.poll(LONGEST):
                raise InputError(
                    f"a process has not answered for {LONGEST / 60:.0f} minutes:"
                    " measure fewer runs, or when the machine is idle"
                )
        answers = [pipe.recv() for pipe in pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for process in self._processes:
            if is_stopped(process.pid):
                process.kill()  # while the fork server lives: it tells that processes have ended
            else:
                process.terminate()
        wake_helpers()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        left = [process for process in self._processes if process.is_alive()]
        for process in left:
            process.kill()
        if left:
            kill_fork_server()  # one that is just being stopped seems alive, and reports no end
        for process in left:
            process.join(GRACE)


@contextmanager
def workers(device: str, cores: int | None = None) -> Iterator[Workers]:
    """The processes, for as long as they are needed; None: for all cores."""
    made = Workers(device, cores)
    try:
        yield made
    finally:
        made.close()
