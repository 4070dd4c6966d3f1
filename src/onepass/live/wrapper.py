"""A-GEM, or another method, on a module and a stream of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.engine.module_fleet import ModuleFleet
from onepass.engine.slots import Slots
from onepass.errors import InputError, already
from onepass.interrupts import Opened
from onepass.learners.base import Learner
from onepass.live.advice import Advice
from onepass.live.batches import on_target, possible_classes, read_examples
from onepass.live.boundaries import check_name, end
from onepass.live.exclusive import Exclusive
from onepass.live.growth import read_head
from onepass.live.inputs import Examples, X
from onepass.live.learning import learn
from onepass.live.memory import StreamMemory
from onepass.live.optimisers import check_optimizer
from onepass.live.plan import Memory
from onepass.live.rollback import or_as_before
from onepass.live.settings import (
    PRECISIONS,
    Name,
    OwnLoss,
    Tasks,
    check_method,
    check_mode,
    check_module,
    check_whole,
    make_place,
    read_autosave,
    read_choice,
    read_flag,
    read_learning_rate,
    read_loss,
    read_method,
    read_path,
    read_plan,
    read_settings,
    read_tasks,
    refusing,
)
from onepass.live.watching import Callback, Watch


class OnePass:
    """Learns from a stream in a single pass, in the module you have, without forgetting.

    >>> module = nn.Linear(4, 3)
    >>> learner = OnePass(module, method="a-gem", learning_rate=0.1)
    >>> for task in range(2):
    ...     for _ in range(5):
    ...         _ = learner.observe(torch.randn(10, 4), torch.randint(0, 3, (10,)))
    ...     learner.end_task()
    >>> learner.predict(torch.randn(2, 4)).shape
    torch.Size([2])

    A-GEM (Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR 2019) steps along `g̃ = g − (gᵀ g_ref /
    g_refᵀ g_ref) g_ref` where `gᵀ g_ref < 0`, else along the gradient `g`. `g_ref` is the gradient
    on a random batch of the episodic memory. The module is trained in place: its `state_dict` stays
    its own. Bad input raises an `InputError`, a `ValueError` of one sentence, and changes nothing.
    Any thread may call any method while another one learns: it sees the learner before a batch or
    after it, and what is learnt does not depend on these calls.

    - `method`, and its hyper-parameters and options by name (`reference_batch=256`, `strength=10`).
      What is not given has its default, a hyper-parameter the middle of the values that studies
      try;
    - `learning_rate` of plain SGD, or an `optimizer` over the module's parameters, which is given
      the method's direction as gradient;
    - `loss`: the cross-entropy of class labels, or a function of (outputs, y) that gives one
      number;
    - `tasks`: the classes of each task, if every task has outputs of its own; only they compete.
      `task_free=True` for a stream without task boundaries;
    - `grow`: new classes may appear at any time and enlarge the last linear layer (or the one of
      that name);
    - `memory`: how much is kept, and where: see `Memory`;
    - `precision="bfloat16"` computes in mixed precision (autocast) with parameters and steps as
      they are;
    - `watch` is called with a dictionary every `watch_every` batches; `autosave` saves there after
      every `autosave_every` batches.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str = "a-gem",
        *,
        learning_rate: float | None = None,
        optimizer: Optimizer | None = None,
        loss: Literal["cross-entropy"] | OwnLoss = "cross-entropy",
        tasks: Tasks | None = None,
        task_free: bool = False,
        grow: bool | str = False,
        memory: Memory | None = None,
        precision: str = "float32",
        seed: int = 0,
        watch: Callback | Sequence[Callback] = (),
        watch_every: int = 100,
        autosave: str | Path | None = None,
        autosave_every: int = 1,
        **settings: Any,
    ) -> None:
        check_module(module)
        self.module, self.method = module, method
        self._rate = read_learning_rate(learning_rate, optimizer)
        learner_type = read_method(method)
        self._columns, self._options = read_settings(method, settings)
        self.classifies = read_loss(loss)
        self._precision = read_choice("precision", precision, PRECISIONS)
        self._tasks = read_tasks(tasks)
        check_whole(seed=seed, watch_every=watch_every, autosave_every=autosave_every)
        self.task_free, self._seed = read_flag("task_free", task_free), seed
        self.plan = read_plan(memory)
        check_method(method, self._options, self.plan, self.classifies, self.task_free, self._tasks)
        check_optimizer(optimizer, module)
        self.head = read_head(module, grow, self.classifies)
        self._watch = Watch(self, watch, watch_every)
        self._autosave, self._autosave_every = read_autosave(autosave), autosave_every
        self._alone = Exclusive()
        self._changing = False  # whether a batch is being learnt, or a task ended
        with self._alone:
            originals = [(p, p.data) for p in module.parameters()]
            try:
                self._assemble(learner_type, loss, optimizer)
                make_place(self._autosave)
            except BaseException:
                for parameter, data in originals:  # another learner may have wrapped it already
                    parameter.data = data
                raise

    def _assemble(
        self, learner_type: type[Learner], loss: str | OwnLoss, optimizer: Optimizer | None
    ) -> None:
        self.fleet = ModuleFleet(
            self.module,
            Slots(tuple(self._tasks.values()) or ((0,),)),
            self._rate,
            seed=self._seed,
            loss=None if self.classifies else on_target(cast(OwnLoss, loss)),
            optimizer=optimizer,
            autocast=PRECISIONS[self._precision],
            head=self.head,
        )
        self.examples: Examples | None = None  # what they look like, once there was one
        self.outputs: int | None = None  # of the module, if it classifies
        self.segment = 0  # how many tasks have ended
        self.batches = 0  # since then
        self.task: Name | None = None  # the name of the current task, if it has one
        self.memory: StreamMemory | None = None
        if learner_type.needs.memory:
            policy = self.plan.policy or ("class-balanced" if self.classifies else "reservoir")
            classes = partial(possible_classes, self)
            self.memory = StreamMemory(self.fleet, self.plan, policy, self.task_free, classes)
        like = self.fleet.theta[:, :1]
        columns = {name: torch.full_like(like, value) for name, value in self._columns.items()}
        self.learner = learner_type(self.fleet, columns, self._options, self.memory)
        self.advice = Advice(self)
        self._sample: list[Tensor] = []  # some inputs, to export with
        self.undo: Callable[[], None] | None = None  # takes growth back, while a batch is learnt

    # ---- learning

    def observe(self, x: X, y: object, task: Name | None = None) -> float:
        """Learn from one batch, once, and return its loss before the step.

        A new `task` ends the one before. An `InputError`, or an interrupt in the module, leaves
        everything as it was before the batch. Any other interrupt waits until the batch is learnt.
        A `LearntError` says that it was learnt and that `watch` or `autosave` failed after it.
        """
        with self._alone:
            began = time.perf_counter()
            check_mode()
            self._check_at_rest("observe()")
            self._changing = True
            try:
                labels = learn(self, x, y, task)
            finally:
                self._changing = False
            loss = self.fleet.loss_before
            with already("the batch was learnt"):
                try:
                    self._watch.after(len(labels), loss, time.perf_counter() - began)
                finally:
                    try:
                        self._advise(labels, loss)
                    finally:
                        if self._autosave and self.fleet.steps % self._autosave_every == 0:
                            self.save(self._autosave)
            return loss

    def _advise(self, labels: list[int], loss: float) -> None:
        """Log what the user should know; a handler of the log may raise."""
        if self.advice.wanted:
            self.advice.after(labels, loss)
        if self.memory is not None:
            self.memory.tell()

    def _check_at_rest(self, call: str) -> None:
        """Raise where the user's own code, inside a change of the learner, calls for another."""
        if self._changing:
            what = "the learner is in the middle of a batch, or of the end of a task"
            raise InputError(f"{what}: do not call {call} in its own module, loss or data")
        self.fleet.intact()

    def end_task(self, again: Iterable[tuple[X, object]] | None = None) -> None:
        """End the current task. Methods with a second pass are given its batches (x, y) `again`.

        After an error or an interrupt the task has not ended, unless it is a `LearntError`: then
        only `autosave` failed.
        """
        with self._alone:
            if self.task_free:
                raise InputError("this stream was declared task-free: there is no task to end")
            check_mode()
            self._check_at_rest("end_task()")
            if self.batches == 0:
                why = "no batch was observed since the last task ended"
                raise InputError(f"{why}: observe some before end_task()")
            self._changing = True
            try:
                with or_as_before(self):
                    end(self, again)
            finally:
                self._changing = False
            if self._autosave is not None:
                with already("the task has ended"):
                    self.save(self._autosave)

    # ---- predictions

    def predict(self, x: X, task: Name | None = None) -> Tensor:
        """The class of each example, one of its task's if that is given (see `scores`)."""
        with self._alone:
            scores = self.scores(x, task)
            if not self.classifies:
                return scores
            allowed = self._tasks.get(task) if task is not None else None
            classes = range(scores.shape[1]) if allowed is None else allowed
            chosen = torch.tensor(classes, device=scores.device)
            scores = scores[:, chosen]
            if bool(scores.isnan().all(1).any()):
                why = f"{self.method} has no answer before the task has ended"
                raise InputError(f"{why}: call end_task() first")
            return chosen[scores.nan_to_num(nan=-torch.inf).argmax(-1)]

    def scores(self, x: X, task: Name | None = None) -> Tensor:
        """One column per class, higher for likelier ones; the outputs with a loss of one's own."""
        with self._alone:
            self.fleet.intact()
            if task is not None:
                check_name(task, self._tasks)
            batch = read_examples(self, x, task)
            with refusing("the module refused the batch", "give it what it takes"):
                if self.classifies:
                    return self.learner.scores(batch)[0]
                return cast(Tensor, self.fleet.evaluate(batch))

    # ---- properties

    def __repr__(self) -> str:
        done = f"{self.steps} batches learnt, {self.segment} tasks ended"
        return f"OnePass({type(self.module).__name__}, '{self.method}'): {done}"

    @property
    def learning_rate(self) -> float | None:
        """Of plain SGD; it may be set at any time. An optimizer has its own."""
        return None if self.fleet.optimizer is not None else self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if self.fleet.optimizer is not None:
            raise InputError("the learning rate is the optimizer's: set it there")
        with self._alone:
            self.fleet.set_rate(read_learning_rate(rate, None))
            self._rate = float(rate)

    @property
    def steps(self) -> int:
        """Batches learnt so far."""
        return self.fleet.steps

    @property
    def violations(self) -> int | None:
        """Steps that had to be corrected, for methods that have a constraint."""
        with self._alone:
            return None if self.learner.violations is None else int(self.learner.violations[0])

    def report(self) -> dict[str, Any]:
        """How it is going: the dictionary that `watch` is called with."""
        with self._alone:
            return self._watch.report()

    # ---- files

    def save(self, path: str | Path) -> None:
        """Write all that is needed to go on: safetensors and a JSON header, whole or not at all."""
        from onepass.live.saving import save

        with self._alone:
            self._check_at_rest("save()")
            save(self, read_path(path, "the path"))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        what = "a learner cannot be copied or pickled"
        raise InputError(f"{what}: save it, and load the file with a copy of the module")

    @staticmethod
    def load(path: str | Path, module: nn.Module, **settings: Any) -> OnePass:
        """Go on from a saved file in a module of the same architecture.

        What a file cannot hold is given again: a loss of your own, an optimizer over this module's
        parameters, `watch`, `autosave`. Learning goes on bit-identically on the same CPU.

        The file may come from elsewhere: no code in it is run, and where to write is yours to say.
        A memory that was on disk needs a place, `where="disk"` and `folder=…`, or `where="cpu"` or
        `where="module"`; any other memory may be given one. Room for it is made as examples come. A
        file that is damaged or was altered raises an `InputError`, and the module and the optimizer
        are as before.
        """
        from onepass.live.saving import load

        check_module(module, "second")
        return load(read_path(path, "the path"), module, settings)

    def export(self, path: str | Path) -> None:
        """Write the current model in evaluation mode by `torch.export`; learning may go on.

        It is ONNX where the path ends in .onnx.
        """
        from onepass.live.exporting import export

        with self._alone, Opened():
            self.fleet.intact()
            if self.examples is None:
                what = "there is nothing to export yet"
                how = "observe a batch first, so that the shapes of the inputs are known"
                raise InputError(f"{what}: {how}")
            export(self.module, self._sample, self.examples.keywords, read_path(path, "the path"))
