"""A fleet of one run around a user's module.

The module is called as it is, and plain autograd takes its gradients: whatever it does in
`forward`, in Python or in tensors, is right. Only where it is traceable, traced programs take over
for the sizes of batches that come again and again. Its parameters are views of `theta[0]`, so the
module *is* the run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onepass.engine.architecture import Architecture
from onepass.engine.batch import Batch
from onepass.engine.binding import Binding
from onepass.engine.finite import Reach, check_parameters, check_statistics, check_step, square
from onepass.engine.fleet import Fleet, Output, Steps
from onepass.engine.gradients import Gradients, Loss, Point
from onepass.engine.module_checks import check
from onepass.engine.module_passes import ModulePasses
from onepass.engine.slots import Slots
from onepass.engine.snapshots import OptimizerSnapshot
from onepass.engine.traceable import is_traceable
from onepass.errors import InputError
from onepass.random_numbers import Purpose, bits_at

# What `go_back` restores. Values of parameters and buffers are not among it: whatever is refused
# leaves them as they were.
BY_GROWTH = ("architecture", "theta", "gradients", "_binding", "_learning", "_reach", "_generation")
BY_STEPS = ("steps", "steps_in_task", "loss_before", "cosine")
MARKED = (*BY_GROWTH, *BY_STEPS, "slots", "competition", "traced_sizes")


@dataclass
class _Step:
    """The step that is being taken; a pass outside of one is a step of its own."""

    batch: Batch | None = None
    passes: int = 0
    gradients: list[Tensor] = field(default_factory=list)  # of its batch
    references: list[Tensor] = field(default_factory=list)  # on the episodic memory
    notes: list[tuple[bool, Tensor]] = field(default_factory=list)  # see `check_step`
    idle: set[int] = field(default_factory=set)  # trainable parameters that had no gradient yet
    traceable: bool | None = None  # if known
    cosines: list[float] = field(default_factory=list)  # between gradients and references


class ModuleFleet(Fleet):
    """R = 1: `theta [1, P]` is the memory of the module's parameters; its buffers stay its own.

    A step happens whole or not at all: where a loss or gradient is not finite, or the module
    refuses a batch, an error is raised before anything is written. Random layers draw from (seed,
    step). With an `optimizer` over the module's parameters, a direction becomes their gradient;
    without, `θ ← θ − α · direction`.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Slots,
        learning_rate: float,
        *,
        seed: int = 0,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        autocast: torch.dtype | None = None,
        head: str | None = None,
    ) -> None:
        device = check(module)
        self.seed, self.optimizer = seed, optimizer
        self._passes = ModulePasses(module, seed, device, autocast)
        super().__init__(lambda: module, [seed], slots, [learning_rate], device=device, head=head)
        self.loss: Loss = loss or self.cross_entropy
        self.learning_rate = self.learning_rate.to(self.theta.dtype)
        self.set_rate(learning_rate)
        self.least = 2 if self._passes.normed else 1  # examples that it can be trained on
        self.traced_sizes: set[int] = set()  # of batches that are worth a program
        self.loss_before = math.nan  # of the batch of the last step
        self.measures = False  # whether the cosine is wanted
        self.cosine = math.nan  # the smallest between gradient and reference gradient in that step
        self._step: _Step | None = None

    def _assemble(self, modules: list[nn.Module]) -> None:
        (module,) = modules
        self.architecture = Architecture(module, self._prepare, self._head)
        self.theta, self.gaps = self.architecture.flatten(module)[None], None
        self._learning = self.theta[:, self.trainable]
        self._binding = Binding(self.architecture, self.theta[0], self.optimizer)
        self._reach = Reach(self.theta)
        self._forget_programs()

    def _forget_programs(self) -> None:
        self.gradients = Gradients(self.architecture, "looped", 1)

    def intact(self) -> None:
        """Raise unless the module's parameters still are the views we made."""
        if self._binding.has_changed():
            self._passes.module_changed()
            self._forget_programs()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of plain SGD, from the next step on."""
        dtype = self.theta.dtype
        if rate > torch.finfo(dtype).max:
            raise InputError(
                f"the learning rate {rate} is more than {dtype} can hold: take a smaller one"
            )
        self.learning_rate.fill_(rate)
        self._rate = rate

    def compete(self, slots: Slots) -> None:
        """From now on these outputs compete."""
        self.slots, self.competition = slots, slots.on(self.device)

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer[None] for name, buffer in self.architecture.module.named_buffers()}

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names by which the module takes its inputs, if any."""
        return self._passes.keywords

    @keywords.setter
    def keywords(self, keywords: tuple[str, ...]) -> None:
        self._passes.keywords = keywords

    # ---- passes

    def grad(
        self,
        batch: Batch,
        *,
        loss: Loss | None = None,
        theta: Tensor | None = None,
        update_buffers: bool = True,
        training: bool = True,
        limit: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As a fleet's; what is not finite raises an error, inside a step at its end."""
        module, step = self.architecture.module, self._step or _Step()
        step.passes += 1
        if training and not module.training:
            module.train()
        if training and theta is None and loss is None and self._may_trace(batch, step):
            step.idle.clear()
            at = Point(self.theta, {}, None, self.seeds, self.step)
            row, value = self.gradients(at, batch, self.loss, update_buffers)
        else:
            with self._at(theta, None):
                row, value = self._by_autograd(
                    batch, step, loss or self.loss, update_buffers, training
                )
        if self._step is None:
            check_step([(True, value)], row)
            return row, value
        own = batch is step.batch
        step.notes.append((own, value))
        if not own:  # what is not finite in a reference gradient may not show in the direction
            step.notes.append((False, square(row)))
        if self.measures:
            others = step.references if own else step.gradients
            step.cosines += [_cosine(row[0], other[0]) for other in others]
        (step.gradients if own else step.references).append(row)
        return row, value

    def _may_trace(self, batch: Batch, step: _Step) -> bool:
        if (
            self._step is None
            or batch.slots.shape[1] not in self.traced_sizes
            or not self._passes.is_plain(batch)
            or self.loss != self.cross_entropy
            or len(self._binding.trained) < len(self._binding.trainable)
        ):
            return False
        if step.traceable is None:
            step.traceable = self.is_traceable()
        return step.traceable

    def is_traceable(self) -> bool:
        return is_traceable(self._binding.parts)

    def _by_autograd(
        self, batch: Batch, step: _Step, loss: Loss, update_buffers: bool, training: bool
    ) -> tuple[Tensor, Tensor]:
        trained = self._binding.trained
        found, value = self._passes.gradients(
            batch,
            loss,
            list(trained.values()),
            bits_at(self.seed, Purpose.LAYERS, self.steps, step.passes - 1),
            update_buffers=update_buffers,
            training=training,
        )
        used = {n: g for n, g in zip(trained, found, strict=True) if g is not None}
        step.idle.difference_update(used)
        row, (places,) = self.gradients.place(self.theta)
        places = places[self.architecture.frozen :]
        try:  # in one operation: there may be hundreds
            torch._foreach_copy_([places[number] for number in used], list(used.values()))
        except (RuntimeError, NotImplementedError):
            if any(gradient.layout != torch.strided for gradient in used.values()):
                raise InputError(
                    "a gradient is sparse, and a direction is dense: "
                    "look embeddings up with sparse=False"
                ) from None
            raise
        for number, place in enumerate(places):
            if number not in used:
                place.zero_()
        wide = self.theta.dtype if self.theta.element_size() >= 4 else torch.float32
        return row, value.to(wide).view(1)

    def evaluate(self, batch: Batch) -> Any:
        """What the module makes of a batch in evaluation; changes nothing."""
        return self._passes.evaluate(batch)

    def loss_on(self, batch: Batch) -> float:
        """The loss of a batch in evaluation; changes nothing."""
        return self._passes.loss_in_evaluation(batch, self.loss)

    def forward(
        self,
        batch: Batch,
        *,
        theta: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        variant: Hashable = None,
    ) -> Output:
        with self._at(theta, buffers), self.architecture.listening() as features:
            logits = self._passes.evaluate(batch)
        last = features[-1] if features else logits
        return Output(logits[None].to(self.theta.dtype), last[None].to(self.theta.dtype))

    @contextmanager
    def _at(self, theta: Tensor | None, buffers: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Inside, the module is at other parameters and buffers."""
        if theta is None and buffers is None:
            yield
            return
        before = self.theta.clone()
        with self._passes.without_trace():
            try:
                self.theta.copy_(before if theta is None else theta)
                for name, buffer in self.buffers.items():
                    if buffers is not None:
                        buffer.copy_(buffers[name])
                yield
            finally:
                self.theta.copy_(before)

    # ---- steps

    def learn(self, learner: Steps, batch: Batch) -> None:
        step = _Step(batch, idle=set(self._binding.trainable))
        self.in_step, self._step = True, step
        try:
            with self._passes.kept_if_refused(), self.gradients.step():
                direction = learner.direction(batch)
                loss, length = check_step(step.notes, direction)
                check_statistics(self._passes.normed)
                needs_before = learner.needs.delta or self.optimizer is not None
                if not needs_before:
                    needs_before = not self._reach.covers(self._rate * length)
                before = self.theta.clone() if needs_before else None
                self._take(direction, before)
                learner.accept()
                if learner.needs.delta and before is not None:
                    learner.after_step(self.theta - before)
        finally:
            self.in_step, self._step = False, None
        self.loss_before, self.cosine = loss, min(step.cosines, default=math.nan)
        self.count(1)
        self.step += 1

    def _take(self, direction: Tensor, before: Tensor | None) -> None:
        """Take the step, or none; `before` is theta now, where the step may have to be undone.

        An optimizer may do what it likes with the parameters.
        """
        optimizer = None if self.optimizer is None else OptimizerSnapshot(self.optimizer)
        try:
            self._apply(direction)
            if before is not None:
                check_parameters(self.theta)
        except BaseException:
            if before is not None:
                self.theta.copy_(before)
            if optimizer is not None:
                optimizer.restore()
            raise

    def _apply(self, direction: Tensor) -> None:
        if self.optimizer is not None:
            assert self._step is not None
            self._binding.step(direction[0], self._step.idle)
            return
        if self.architecture.frozen:
            direction = direction[:, self.trainable]
        self._learning.addcmul_(self.learning_rate, direction, value=-1)

    def marked(self) -> dict[str, Any]:
        """What `go_back` needs to undo what comes after this."""
        return {name: getattr(self, name) for name in MARKED}

    def go_back(self, mark: Mapping[str, Any]) -> None:
        vars(self).update(mark)
        self.step.fill_(self.steps)
        self._binding.bind()

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "number": self.steps}

    def continue_at(self, counters: Mapping[str, int]) -> None:
        """Go on from saved `counters()`, with parameters and buffers that are there already."""
        self._generation, self.steps = counters["generation"], counters["number"]
        self.step.fill_(self.steps)
        self._reach = Reach(self.theta)


def _cosine(g: Tensor, g_ref: Tensor) -> float:
    pairs = ((g, g_ref), (g, g), (g_ref, g_ref))
    product, own, other = (float(torch.dot(a, b)) for a, b in pairs)
    return product / math.sqrt(own * other) if own * other > 0 else 0.0
