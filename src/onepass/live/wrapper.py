"""A-GEM, or another method, on a module and a stream of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.engine.batch import Batch
from onepass.engine.gradients import Loss
from onepass.engine.module_fleet import ModuleFleet
from onepass.engine.module_passes import INPUT
from onepass.engine.slots import Slots
from onepass.errors import InputError, already
from onepass.interrupts import Opened
from onepass.learners.base import Learner
from onepass.live.advice import Advice
from onepass.live.boundaries import check_name, which
from onepass.live.exclusive import Exclusive
from onepass.live.growth import check_growth, check_head, grow
from onepass.live.inputs import (
    Examples,
    X,
    check_labels,
    count_outputs,
    kind_of,
    read_inputs,
    read_labels,
    read_target,
)
from onepass.live.memory import LiveMemory, Memory
from onepass.live.optimisers import check_optimizer
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
    read_settings,
    read_tasks,
    refusing,
)
from onepass.live.watching import Callback, Watch
from onepass.memory import EpisodicMemory

TARGET = "target"


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

    A-GEM (Chaudhry, Ranzato, Rohrbach, Elhoseiny, ICLR 2019) steps along `g̃ = g − (gᵀ g_ref / g_refᵀ g_ref) g_ref` where `gᵀ g_ref < 0`, else
    along the gradient `g` itself, with `g_ref` the gradient on a random batch of the episodic memory. The module is trained in place: its
    `state_dict` stays its own. Bad input raises an `InputError`, a `ValueError` of one sentence, and changes nothing. Any thread may ask while
    another one learns: a call sees the learner before a batch or after it, and what is learnt does not depend on being asked.

    - `method`, and its hyper-parameters and options by name (`reference_batch=256`, `strength=10`; what is not given has its default, a
      hyper-parameter the middle of the values that studies try);
    - `learning_rate` of plain SGD, or an `optimizer` over the module's parameters, which is given the method's direction as gradient;
    - `loss`: the cross-entropy of class labels, or a function of (outputs, y) that gives one number;
    - `tasks`: the classes of each task, if every task has outputs of its own; only they compete. `task_free=True` for a stream without task
      boundaries;
    - `grow`: new classes may appear at any time and enlarge the last linear layer (or the one of that name);
    - `memory`: how much is kept, and where: see `Memory`;
    - `precision="bfloat16"` computes in mixed precision (autocast) with parameters and steps as they are;
    - `watch` is told a dictionary every `watch_every` batches; `autosave` saves there after every `autosave_every` batches.
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
        self.plan = Memory() if memory is None else memory
        if not isinstance(self.plan, Memory):
            raise InputError(
                f"the memory must be described by onepass.Memory, got {type(memory).__name__}"
            )
        check_method(method, self._options, self.plan, self.classifies, self.task_free, self._tasks)
        check_optimizer(optimizer, module)
        self.head = check_head(module, grow) if grow is not False else None
        if self.head is not None and not self.classifies:
            raise InputError(
                "only classes can grow the head: leave grow out with a loss of your own"
            )
        self._watch = Watch(self, watch, watch_every)
        self._autosave, self._autosave_every = read_autosave(autosave), autosave_every
        self._alone = Exclusive()
        self._changing = False  # is a batch being learnt, or a task ended?
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
            loss=None if self.classifies else _own(cast(OwnLoss, loss)),
            optimizer=optimizer,
            autocast=PRECISIONS[self._precision],
            head=self.head,
        )
        self.examples: Examples | None = None  # what they look like, once there was one
        self.outputs: int | None = None  # of the module, if it classifies
        self.segment = 0  # how many tasks have ended
        self.batches = 0  # since then
        self.task: Name | None = None  # the name of the current task, if it has one
        columns = {
            name: torch.full_like(self.fleet.theta[:, :1], value)
            for name, value in self._columns.items()
        }
        self.memory: LiveMemory | None = None
        if learner_type.needs.memory:
            policy = self.plan.policy or ("class-balanced" if self.classifies else "reservoir")
            self.memory = LiveMemory(
                self.fleet, self.plan, policy, self.task_free, self._classes_now
            )
        # It has all that learners ask of an episodic memory, if not what the benchmark's protocol does.
        self.learner = learner_type(
            self.fleet, columns, self._options, cast(EpisodicMemory | None, self.memory)
        )
        self.advice = Advice(self)
        self._sample: list[Tensor] = []  # some inputs, to export with
        self.undo: Callable[[], None] | None = (
            None  # what takes growth back, while a batch is learnt
        )

    # ---- learning

    def observe(self, x: X, y: object, task: Name | None = None) -> float:
        """Learn from one batch, once; returns its loss before the step. A new `task` ends the one before.

        An `InputError`, or an interrupt in the module, leaves everything as it was before the batch. Any other interrupt waits until the batch
        is learnt. A `LearntError` says that it was learnt and that `watch` or `autosave` failed after it.
        """
        with self._alone:
            began = time.perf_counter()
            check_mode()
            self._check_at_rest("observe()")
            self._changing = True
            try:
                labels = self._observe(x, y, task)
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
                        if (
                            self._autosave is not None
                            and self.fleet.steps % self._autosave_every == 0
                        ):
                            self.save(self._autosave)
            return loss

    def _observe(self, x: X, y: object, task: Name | None) -> list[int]:
        batch, labels, kind = self._read(x, y)
        name, crossing = which(self, task)
        self._check_labels(labels, name)
        growing = self.outputs is not None and self.classifies and max(labels) >= self.outputs
        if crossing or growing or self.batches == 0:
            with or_as_before(self):
                self._begin(batch, labels, name, crossing)
                self._learn(batch, labels)
        else:
            self._learn(batch, labels)
        if self.examples is None:
            self.examples, self._sample = (
                kind,
                [torch.cat([tensor, tensor])[:2].clone() for tensor in self._inputs(batch)],
            )
        self.batches += 1
        return labels

    def _advise(self, labels: list[int], loss: float) -> None:
        """Log what the user should know; a handler of the log may raise."""
        if self.advice.wanted:
            self.advice.after(labels, loss)
        if self.memory is not None:
            self.memory.tell()

    def _check_at_rest(self, call: str) -> None:
        """Raise where the user's own code, inside a change of the learner, calls for another one."""
        if self._changing:
            where = "in the middle of a batch, or of the end of a task"
            raise InputError(
                f"the learner is {where}: do not call {call} in its own module, loss or data"
            )
        self.fleet.intact()

    def _begin(self, batch: Batch, labels: list[int], task: Name | None, crossing: bool) -> None:
        """What comes before a batch of a new task, or with new classes, or before the very first one."""
        if crossing:
            self._end(None)
        self.task = task
        if self.classifies and self.outputs is None:
            with refusing("the module refused the batch", "nothing was learnt from it"):
                found = self.fleet.evaluate(batch)
            self.outputs = count_outputs(found, len(labels))
            if not self._tasks:
                self.fleet.compete(Slots((tuple(range(self.outputs)),)))
                self._check_labels(labels, task)
        if self.classifies:
            needed = max(max(labels) + 1, self.fleet.slots.count if self._tasks else 0)
            if self.outputs is not None and needed > self.outputs:
                self._grow(needed)
        if self.batches == 0:
            self.learner.begin_task(self.segment)
        if self.examples is None:
            self.fleet.traced_sizes = self._common_sizes(len(labels))

    def _common_sizes(self, batch: int) -> set[int]:
        """Of the batches that will be seen again and again, if the first one is like the others. A head that grows would make programs void."""
        if self.head is not None:
            return set()
        reference = getattr(self._options, "reference_batch", 0)
        return {batch, reference, batch + reference, self.plan.per_task}

    def _learn(self, batch: Batch, labels: list[int]) -> None:
        counted = None if self.learner.violations is None else self.learner.violations.clone()
        if self.memory is not None:
            self.memory.prepare(batch)
        try:
            with refusing("the module or the loss refused the batch", "nothing was learnt from it"):
                self._watch.before(batch)
                self.fleet.learn(self.learner, batch)
        except BaseException:
            self._watch.discard()
            raise
        else:
            if self.memory is not None:
                self.memory.commit(labels)
            counted = self.learner.violations
        finally:
            self.learner.violations = counted
            if self.memory is not None:
                self.memory.discard()

    def end_task(self, again: Iterable[tuple[X, object]] | None = None) -> None:
        """The current task is over. Methods that look at its data a second time are given its batches (x, y) `again`.

        After an error or an interrupt the task has not ended, unless it is a `LearntError`: then only `autosave` failed.
        """
        with self._alone:
            if self.task_free:
                raise InputError("this stream was declared task-free: there is no task to end")
            check_mode()
            self._check_at_rest("end_task()")
            if self.batches == 0:
                raise InputError(
                    "no batch was observed since the last task ended: observe some before end_task()"
                )
            self._changing = True
            try:
                with or_as_before(self):
                    self._end(again)
            finally:
                self._changing = False
            if self._autosave is not None:
                with already("the task has ended"):
                    self.save(self._autosave)

    def _end(self, again: Iterable[tuple[X, object]] | None) -> None:
        if self.learner.needs.second_pass:
            if again is None:
                instead = self.learner.needs.single_pass_by
                other = f" or choose {instead}" if instead else ""
                raise InputError(
                    f"{self.method} looks at a task's data a second time: call end_task(again=batches) before the next task{other}"
                )
            self._review(again)
        self.learner.end_task()
        # Importances are squares and quotients of gradients: in half precision they soon overflow.
        if not all(bool(kept.isfinite().all()) for kept in self.learner.state().values()):
            what = f"what {self.method} keeps of this task is not finite"
            raise InputError(
                f"{what}: scale the data, take smaller steps, or use a module in float32; the task has not ended"
            )
        self._watch.ended()
        self.segment, self.batches, self.task = self.segment + 1, 0, None

    def _review(self, again: Iterable[tuple[X, object]]) -> None:
        batches = []
        with (
            Opened(),
            refusing("the data to look at again cannot be read", "the task has not ended"),
        ):
            given = list(again) if isinstance(again, Iterable) else [again]
        for pair in given:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InputError(
                    "the data to look at again must be batches (x, y): end_task(again=batches)"
                )
            batch, labels, _ = self._read(*pair)
            self._check_labels(labels, self.task)
            batches.append(batch)
        if not batches:
            raise InputError(
                f"{self.method} was given no data to look at again: end_task(again=batches) needs the task's batches"
            )
        with refusing(
            "the module or the loss refused the data given again", "the task has not ended"
        ):
            self.learner.review(batches)

    def _grow(self, outputs: int) -> None:
        """Enlarge the head."""
        optimizer = self.fleet.optimizer
        head = check_growth(self.module, self.head, self.outputs, outputs, optimizer)
        carry, self.undo = grow(self.fleet, head, outputs)
        self.learner.resize(carry)
        self.outputs = outputs
        if not self._tasks:
            self.fleet.compete(Slots((tuple(range(outputs)),)))

    # ---- answers

    def predict(self, x: X, task: Name | None = None) -> Tensor:
        """The class of each example, among those of its task if one is given; for a loss of one's own, the module's outputs."""
        with self._alone:
            scores = self.scores(x, task)
            if not self.classifies:
                return scores
            allowed = self._tasks.get(task) if task is not None else None
            chosen = torch.tensor(
                range(scores.shape[1]) if allowed is None else allowed, device=scores.device
            )
            scores = scores[:, chosen]
            if bool(scores.isnan().all(1).any()):
                raise InputError(
                    f"{self.method} has no answer before the task has ended: call end_task() first"
                )
            return chosen[scores.nan_to_num(nan=-torch.inf).argmax(-1)]

    def scores(self, x: X, task: Name | None = None) -> Tensor:
        """What the method answers with: an output a class, higher for likelier ones (or the module's outputs); changes nothing."""
        with self._alone:
            self.fleet.intact()
            if task is not None:
                check_name(task, self._tasks)
            tensors, keywords = read_inputs(x, self.examples)
            self.fleet.keywords = keywords
            slot = self._tasks[task][0] if task is not None and self._tasks else 0
            batch = self._batch(tensors, torch.full((len(tensors[0]),), slot), None)
            with refusing("the module refused the batch", "give it what it takes"):
                return (
                    self.learner.scores(batch)[0]
                    if self.classifies
                    else cast(Tensor, self.fleet.evaluate(batch))
                )

    # ---- looking

    def __repr__(self) -> str:
        return f"OnePass({type(self.module).__name__}, '{self.method}'): {self.steps} batches learnt, {self.segment} tasks ended"

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
        """How it is going: the dictionary that `watch` is told."""
        with self._alone:
            return self._watch.report()

    # ---- keeping

    def save(self, path: str | Path) -> None:
        """Everything that is needed to go on, as one safetensors file with a JSON header; written whole or not at all."""
        from onepass.live.saving import save

        with self._alone:
            self._check_at_rest("save()")
            save(self, read_path(path, "the path"))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "a learner cannot be copied or pickled: save it, and load the file with a copy of the module"
        )

    @staticmethod
    def load(path: str | Path, module: nn.Module, **settings: Any) -> OnePass:
        """Go on from a saved file in a module of the same architecture; what a file cannot hold (a loss of your own, an optimizer over this
        module's parameters, `watch`, `autosave`) is given again. Learning goes on bit-identically on the same CPU.

        The file may come from elsewhere: no code in it is run, and where to write is yours to say. A memory that was on disk needs a place,
        `where="disk"` and `folder=…`, or `where="cpu"` or `where="module"`; any other memory may be given one. Room for it is made as examples
        come. A file that is damaged or was altered raises an `InputError`, and the module and the optimizer are as before."""
        from onepass.live.saving import load

        check_module(module, "second")
        return load(read_path(path, "the path"), module, settings)

    def export(self, path: str | Path) -> None:
        """The current model in evaluation mode by `torch.export` (ONNX where the path ends in .onnx); learning may go on."""
        from onepass.live.exporting import export

        with self._alone, Opened():
            self.fleet.intact()
            if self.examples is None:
                raise InputError(
                    "there is nothing to export yet: observe a batch first, so that the shapes of the inputs are known"
                )
            export(self.module, self._sample, self.examples.keywords, read_path(path, "the path"))

    # ---- reading

    def _classes_now(self) -> Sequence[int]:
        """The classes that the current task can have."""
        return (
            self._tasks[self.task]
            if self._tasks and self.task is not None
            else range(self.fleet.slots.count)
        )

    def _inputs(self, batch: Batch) -> list[Tensor]:
        return [
            batch.x[0],
            *(tensor[0] for name, tensor in batch.extra.items() if name.startswith(INPUT)),
        ]

    def _batch(self, tensors: list[Tensor], slots: Tensor, target: Tensor | None) -> Batch:
        device = self.fleet.device
        extra = {
            f"{INPUT}{i:03d}": tensor.to(device)[None]
            for i, tensor in enumerate(tensors[1:], start=1)
        }
        if target is not None:
            extra[TARGET] = target.to(device)[None]
        return Batch(
            tensors[0].to(device)[None], slots.to(device)[None], extra=extra, task=self.segment
        )

    def _read(self, x: X, y: object) -> tuple[Batch, list[int], Examples]:
        tensors, keywords = read_inputs(x, self.examples)
        if self.learner.needs.own_examples and len(tensors) > 1:
            raise InputError(
                f"{self.method} keeps examples of one input, and x has {len(tensors)}: join them into one tensor"
            )
        count = len(tensors[0])
        if self.classifies:
            (labels, slots), target = read_labels(y, count), None
        else:
            labels, target = [0] * count, read_target(y, count, self.examples)
            slots = torch.zeros(count, dtype=torch.int64)
        self.fleet.keywords = keywords
        kind = Examples(
            tuple(kind_of(t) for t in tensors),
            keywords,
            kind_of(slots if target is None else target),
        )
        return self._batch(tensors, slots, target), labels, kind

    def _check_labels(self, labels: list[int], task: Name | None) -> None:
        if self.classifies:
            classes = self._tasks[cast(Name, task)] if self._tasks else None
            check_labels(labels, task, classes, self.outputs, self.head is not None)


def _own(loss: OwnLoss) -> Loss:
    def asked(outputs: Any, _: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        with Opened():
            return loss(outputs, extra[TARGET])

    return asked
