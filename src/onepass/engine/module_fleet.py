"""A fleet of one run around a module that is somebody else's.

The module is called as it is, hooks and all, and plain autograd does the work: whatever it does in `forward`, in Python or in tensors, is
right. Only where it is `pure`, traced programs take over for the sizes of batches that come again and again. Its parameters are views of
`theta[0]`, so it *is* the run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from onepass.engine.architecture import Architecture
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet, Output, Steps
from onepass.engine.gradients import Gradients, Loss, Point
from onepass.engine.module_checks import (
    Buffers,
    apart,
    as_now,
    check,
    check_scalar,
    copied,
    driven,
    evaluating,
    in_groups,
    square,
)
from onepass.engine.slots import Slots
from onepass.engine.traceable import is_traceable
from onepass.errors import InputError
from onepass.interrupts import Opened
from onepass.random_numbers import Purpose, bits_at, states_of, torch_seeded

INPUT = "input "  # how the names of a batch's further inputs begin


class ModuleFleet(Fleet):
    """R = 1: `theta [1, P]` is the memory of the module's own parameters, its buffers stay its own.

    A step happens whole or not at all: where a loss or gradient is not finite, or the module refuses a batch, an error is raised before
    anything is written. Random layers draw from (seed, step), whatever the state of torch's generator. With an `optimizer` over the module's
    parameters, a direction becomes their gradient; without, `θ ← θ − α · direction`. Inputs are passed by the names in `keywords`, if any.
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
        self.seed, self.optimizer, self.autocast = seed, optimizer, autocast
        super().__init__(lambda: module, [seed], slots, [learning_rate], device=device, head=head)
        self.loss: Loss = loss or self.cross_entropy
        self.learning_rate = self.learning_rate.to(self.theta.dtype)
        self.set_rate(learning_rate)
        self.least = (
            2
            if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
            else 1
        )  # examples it can be trained on
        self.keywords: tuple[str, ...] = ()
        self.traced_sizes: set[int] = (
            set()
        )  # sizes of batches that are worth a program, if the module is pure
        self.loss_before = math.nan  # of the batch of the last step
        self.measures = False  # is the cosine between gradient and reference gradient wanted?
        self.cosine = math.nan
        self._passes = 0
        self._draws = True  # does it draw random numbers in evaluation? Not known yet

    def _assemble(self, modules: list[nn.Module]) -> None:
        (module,) = modules
        self.architecture = Architecture(module, self._prepare, self._head)
        self.theta, self.gaps = self.architecture.flatten(module)[None], None
        self._bind()
        self._learning = self.theta[:, self.architecture.trainable]
        self._traceable = False  # may this step be replayed?
        self._batch: Batch | None = None  # of the step
        self._own: list[Tensor] = []  # its gradient
        self._others: list[Tensor] = []  # and those on the episodic memory
        self._notes: list[tuple[bool, Tensor]] = []  # what must be finite: is it the batch's own?
        self._idle: set[int] = set()  # trainable parameters that had no gradient in any of them
        self._length = 0.0  # of the direction of the step

    def _bind(self) -> None:
        """Make the module's parameters views of theta."""
        own = dict(self.architecture.module.named_parameters())
        self._parameters = [own[name] for name in self.architecture.names]
        self._views = [apart(view) for view in self.architecture.views(self.theta[0])]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        self._reach = math.inf  # no parameter is larger, as far as is known
        self._remember()

    def _remember(self) -> None:
        """How the module and the optimizer look now, so that a glance tells whether the user has changed them."""
        groups = in_groups(self.optimizer)
        self._driven = driven(groups, self._parameters, self.architecture.frozen)
        self._groups = groups
        trained = dict(
            zip(
                map(id, self._parameters),
                (place >= self.architecture.frozen for place in range(len(self._parameters))),
                strict=True,
            )
        )
        self._parts = list(self.architecture.module.modules())
        self._normed = [
            part for part in self._parts if isinstance(part, nn.modules.batchnorm._BatchNorm)
        ]
        self._children = [list(part._modules.values()) for part in self._parts]
        self._owned = [
            (
                part._parameters,
                name,
                p,
                0 if p is None else p.data_ptr(),
                p is not None and trained[id(p)],
            )
            for part in self._parts
            for name, p in part._parameters.items()
        ]
        self.gradients = Gradients(self.architecture, "looped", 1)

    def set_rate(self, rate: float) -> None:
        """Of plain SGD, from the next step on."""
        if rate > torch.finfo(self.theta.dtype).max:
            raise InputError(
                f"the learning rate {rate} is more than {self.theta.dtype} can hold: take a smaller one"
            )
        self.learning_rate.fill_(rate)
        self._rate = rate

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer[None] for name, buffer in self.architecture.module.named_buffers()}

    def intact(self) -> None:
        """Raise unless the module's parameters still are the views we made."""
        same = all(
            list(part._modules.values()) == children
            for part, children in zip(self._parts, self._children, strict=True)
        )
        same = same and len(self._owned) == sum(len(part._parameters) for part in self._parts)
        if same and all(
            owner.get(name) is parameter
            and (
                parameter is None
                or (parameter.data_ptr() == place and parameter.requires_grad == trained)
            )
            for owner, name, parameter, place, trained in self._owned
        ):
            if in_groups(self.optimizer) != self._groups:
                self._remember()
            return
        wanted = zip(
            self.architecture.names,
            self._parameters,
            self.architecture.views(self.theta[0]),
            strict=True,
        )  # our own may have moved along
        found = dict(self.architecture.module.named_parameters())
        for place, (name, parameter, view) in enumerate(wanted):
            here = found.pop(name, None)
            if here is None:
                raise InputError(
                    f"parameter '{name}' is gone from the module: put it back, or wrap the module anew"
                )
            if here.device != view.device:
                raise InputError(
                    f"the module was moved from {view.device} to {here.device}: move it back, or save, and load with the moved module"
                )
            if (
                here is not parameter
                or here.data_ptr() != view.data_ptr()
                or here.shape != view.shape
                or here.dtype != view.dtype
            ):
                raise InputError(
                    f"parameter '{name}' was created anew since the module was wrapped: write into it in place, or wrap the module anew"
                )
            if here.requires_grad != (place >= self.architecture.frozen):
                raise InputError(
                    f"requires_grad of '{name}' was changed since the module was wrapped: change it back, or wrap the module anew"
                )
        if found:
            raise InputError(
                f"parameter '{next(iter(found))}' was added since the module was wrapped: wrap the module anew"
            )
        self._remember()  # something without parameters was changed: whatever was traced is out of date
        self._draws = True

    # ---- passes

    def call(self, batch: Batch) -> Any:
        """What the module makes of the inputs of a batch."""
        inputs = [
            batch.x[0],
            *(tensor[0] for name, tensor in batch.extra.items() if name.startswith(INPUT)),
        ]
        with self._casting(), Opened():
            if self.keywords:
                return self.architecture.module(**dict(zip(self.keywords, inputs, strict=True)))
            return self.architecture.module(*inputs)

    def _casting(self) -> AbstractContextManager[Any]:
        return (
            nullcontext()
            if self.autocast is None
            else torch.autocast(self.device.type, self.autocast)
        )

    def value(self, batch: Batch, loss: Loss) -> Tensor:
        """The loss of a batch."""
        outputs = self.call(batch)
        with self._casting():
            return loss(
                outputs, batch.slots[0], {name: tensor[0] for name, tensor in batch.extra.items()}
            )

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
        self._passes += 1
        module = self.architecture.module
        if training and not module.training:
            module.train()
        if training and theta is None and loss is None and self._may_trace(batch):
            self._idle = set()
            row, value = self.gradients(
                Point(self.theta, {}, None, self.seeds, self.step), batch, self.loss, update_buffers
            )
        else:
            row, value = self._by_autograd(
                batch, loss or self.loss, theta, update_buffers, training
            )
        own = batch is self._batch
        # What is not finite in a reference gradient may not show in the direction.
        self._notes += (
            [(own, value)] if own or not self.in_step else [(own, value), (own, square(row))]
        )
        if not self.in_step:
            self._refuse_what_is_not_finite(row)
            return row, value
        if self.measures:
            for other in self._others if own else self._own:
                self._measure(row[0], other[0])
        (self._own if own else self._others).append(row)
        return row, value

    def _may_trace(self, batch: Batch) -> bool:
        if (
            not self.in_step
            or batch.slots.shape[1] not in self.traced_sizes
            or batch.extra
            or self.keywords
            or self.autocast is not None
            or self.loss != self.cross_entropy
            or len(self._driven) < len(self._parameters) - self.architecture.frozen
        ):
            return False
        if self._passes == 1:
            self._traceable = self.is_traceable()
        return self._traceable

    def is_traceable(self) -> bool:
        return is_traceable(self._parts)

    def _measure(self, g: Tensor, g_ref: Tensor) -> None:
        product, own, other = (
            float(torch.dot(a, b)) for a, b in ((g, g_ref), (g, g), (g_ref, g_ref))
        )
        cosine = product / math.sqrt(own * other) if own * other > 0 else 0.0
        self.cosine = cosine if math.isnan(self.cosine) else min(cosine, self.cosine)

    def _by_autograd(
        self, batch: Batch, loss: Loss, theta: Tensor | None, update_buffers: bool, training: bool
    ) -> tuple[Tensor, Tensor]:
        module = self.architecture.module
        seeded = torch_seeded(
            bits_at(self.seed, Purpose.LAYERS, self.steps, self._passes - 1), self.device
        )
        with ExitStack() as around, seeded, torch.enable_grad():
            if theta is not None:
                around.enter_context(self._at(theta, None))
            if not training:
                around.enter_context(evaluating(module))
            if not (training and update_buffers):
                around.enter_context(self._undone())
            value = self.value(batch, loss)
            check_scalar(value)
            trained = [
                self._parameters[self.architecture.frozen + number] for number in self._driven
            ]
            gradients = (
                torch.autograd.grad(value, trained, allow_unused=True)
                if value.requires_grad
                else [None] * len(trained)
            )
            if all(gradient is None for gradient in gradients):
                where = "" if training else ", when the module is in evaluation mode,"
                raise InputError(
                    f"the loss{where} does not depend on the module's trainable parameters: compute it from the outputs, without detach()"
                )
        row, (places,) = self.gradients.place(self.theta)
        used = {
            number: gradient
            for number, gradient in zip(self._driven, gradients, strict=True)
            if gradient is not None
        }
        self._put(used, places[self.architecture.frozen :])
        self._idle -= used.keys()
        return row, value.detach().to(
            self.theta.dtype if self.theta.element_size() >= 4 else torch.float32
        ).view(1)

    def _put(self, gradients: Mapping[int, Tensor], places: Sequence[Tensor]) -> None:
        try:
            if gradients:
                torch._foreach_copy_(
                    [places[number] for number in gradients], list(gradients.values())
                )  # there may be hundreds
        except (RuntimeError, NotImplementedError):
            if any(gradient.layout != torch.strided for gradient in gradients.values()):
                raise InputError(
                    "a gradient is sparse, and a direction is dense: look embeddings up with sparse=False"
                ) from None
            raise
        for number, place in enumerate(places):
            if number not in gradients:
                place.zero_()

    def _refuse_what_is_not_finite(self, direction: Tensor) -> None:
        """Raise unless the losses of all passes and a direction are finite. This is the one question that a step asks the device."""
        # What is not finite in a gradient is not finite in the direction. One whose square overflows counts as infinite.
        notes = sorted(
            self._notes, key=lambda note: not note[0]
        )  # a method may look at the batch and at some of the memory in one pass
        *values, last = torch.cat([*(value for _, value in notes), square(direction)]).tolist()
        self._notes, self._passes, self.loss_before = [], 0, values[0]
        for number, found in enumerate(values):
            if not math.isfinite(found):
                what = (
                    f"or its gradient on the episodic memory is not finite ({found})"
                    if number
                    else f"of this batch is {found}"
                )
                raise InputError(
                    f"the loss {what}: look at the batch, or take smaller steps; nothing was learnt"
                )
        if not math.isfinite(last):
            raise InputError(
                "the gradient of this step is not finite: look at the batch, or take smaller steps; nothing was learnt"
            )
        self._length = math.sqrt(last)

    def _refuse_statistics(self) -> None:
        """Raise unless what batch-norm moved is finite: steps use a batch's own, but answers these."""
        moved = [part for part in self._normed if part.training and part.track_running_stats]
        found = [
            one
            for part in moved
            for one in (part.running_mean, part.running_var)
            if one is not None
        ]
        if found and not bool(torch.cat(found).isfinite().all()):
            what = "the running statistics of batch-norm are not finite after this batch"
            raise InputError(f"{what}: scale the data; nothing was learnt")

    def evaluate(self, batch: Batch) -> Any:
        """What the module makes of a batch in evaluation; changes nothing."""
        with self._evaluating():
            return self.call(copied(batch))

    def loss_on(self, batch: Batch) -> float:
        """The loss of a batch in evaluation; changes nothing."""
        with self._evaluating():
            return float(self.value(copied(batch), self.loss))

    def compete(self, slots: Slots) -> None:
        """From now on these outputs compete."""
        self.slots, self.competition = slots, slots.on(self.device)

    def forward(
        self,
        batch: Batch,
        *,
        theta: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        variant: Hashable = None,
    ) -> Output:
        with (
            self._at(theta, buffers),
            self._evaluating(),
            self.architecture.listening() as features,
        ):
            logits = self.call(copied(batch))
        return Output(
            logits[None].to(self.theta.dtype),
            (features[-1] if features else logits)[None].to(self.theta.dtype),
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The module in evaluation, without a trace. Random layers, if any draw here, start from the seed.

        Torch's generator belongs to the whole process: other threads draw from it, the data of the
        stream say. It is left alone once the module was seen not to use it in evaluation.
        """
        with torch.no_grad(), evaluating(self.architecture.module), self._undone():
            if not self._draws:
                yield
                return
            with torch_seeded(self.seed, self.device) as generators:
                before = states_of(generators)
                yield
                self._draws = not all(map(torch.equal, before, states_of(generators)))

    @contextmanager
    def _at(self, theta: Tensor | None, buffers: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The module at other parameters and buffers for a while."""
        if theta is None and buffers is None:
            yield
            return
        before = self.theta.clone()
        with self._undone():
            try:
                self.theta.copy_(before if theta is None else theta)
                for name, buffer in self.buffers.items():
                    if buffers is not None:
                        buffer.copy_(buffers[name])
                yield
            finally:
                self.theta.copy_(before)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Buffers are afterwards as they were before."""
        before = Buffers(self._parts)
        try:
            yield
        finally:
            before.restore()

    # ---- steps

    def marked(self) -> dict[str, Any]:
        """Everything but the values of parameters and buffers, to go back to with `go_back`."""
        return dict(vars(self))

    def go_back(self, mark: Mapping[str, Any]) -> None:
        vars(self).update(mark)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    @contextmanager
    def _kept_if_refused(self) -> Iterator[None]:
        """After an error, buffers, modes and what was measured are as they were before."""
        before, cosine = Buffers(self._parts), self.cosine
        modes = (
            []
            if self.architecture.module.training
            else [(part, part.training) for part in self._parts]
        )
        try:
            yield
        except BaseException:
            before.restore()
            self.cosine = cosine
            for part, mode in modes:
                part.training = mode
            raise

    def learn(self, learner: Steps, batch: Batch) -> None:
        self.in_step, self._batch, self._passes = True, batch, 0
        self._notes, self._own, self._others = [], [], []
        self._idle = set(range(len(self._parameters) - self.architecture.frozen))
        try:
            with self._kept_if_refused(), self.gradients.step():
                self.cosine = math.nan
                direction = learner.direction(batch)
                self._refuse_what_is_not_finite(direction)
                self._refuse_statistics()
                needs_before = learner.needs.delta or self.optimizer is not None
                before = self.theta.clone() if needs_before else None
                self._take(direction, before)
                learner.accept()
                if learner.needs.delta and before is not None:
                    learner.after_step(self.theta - before)
        finally:
            self.in_step, self._batch, self._passes = False, None, 0
            # New lists: `go_back` may need the old ones.
            self._notes, self._own, self._others = [], [], []
        self.count(1)
        self.step += 1

    def _take(self, direction: Tensor, before: Tensor | None) -> None:
        """Take the step, or none: an optimizer may do what it likes with the parameters."""
        if before is None and not self._stays_finite():
            before = self.theta.clone()
        back = None if self.optimizer is None else as_now(self.optimizer)
        try:
            self._apply(direction)
            if (
                before is not None
                and not math.isfinite(float(square(self.theta)))
                and not bool(self.theta.isfinite().all())
            ):
                raise InputError(
                    "this step leads to parameters that are not finite: take smaller steps; nothing was learnt"
                )
        except BaseException:
            if before is not None:
                self.theta.copy_(before)
            if back is not None:
                back()
            raise

    def _stays_finite(self) -> bool:
        """Whether the numbers certainly suffice for a step of plain SGD: no parameter moves by more than the whole step is long."""
        step, most = (
            self._rate * self._length,
            torch.finfo(self.theta.dtype).max / 2,
        )  # half of it is room for rounding
        for _ in range(2):
            if self._reach + step < most:
                self._reach += step
                return True
            self._reach = float(
                self.theta.abs().max()
            )  # this asks the device, once in a long while
        self._reach = math.inf
        return False

    def _apply(self, direction: Tensor) -> None:
        if self.optimizer is None:
            self._learning.addcmul_(
                self.learning_rate,
                direction[:, self.trainable] if self.architecture.frozen else direction,
                value=-1,
            )
            return
        places = self.architecture.views(direction[0])
        for number in self._driven:
            # As in a plain loop, an optimizer passes over what had no gradient, unless the method pulls at it.
            place = places[self.architecture.frozen + number]
            self._parameters[self.architecture.frozen + number].grad = (
                place if number not in self._idle or bool(place.any()) else None
            )
        try:
            self.optimizer.step()
        finally:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.grad = None
                if (
                    parameter.data_ptr() != view.data_ptr()
                ):  # some optimizers put new tensors in place of the old ones
                    view.copy_(parameter.data)
                    parameter.data = view

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "number": self.steps}

    def continue_at(self, counters: Mapping[str, int]) -> None:
        """Go on from saved `counters()`, with parameters and buffers that are there already."""
        self._generation, self.steps = counters["generation"], counters["number"]
        self.step.fill_(self.steps)
        self._reach = math.inf
