"""Passes through a user's module: its inputs, its precision, its random numbers, and no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.finite import BatchNorm
from onepass.engine.gradients import Loss
from onepass.engine.module_checks import check_scalar
from onepass.engine.snapshots import BufferSnapshot, evaluating
from onepass.errors import InputError
from onepass.interrupts import Opened
from onepass.random_numbers import states_of, torch_seeded

INPUT = "input "  # how the names of a batch's further inputs begin


class ModulePasses:
    """Calls a module as it is, hooks and all. Inputs are passed by the names in `keywords`, if any.

    Random layers draw from the given seeds, whatever the state of torch's generator.
    """

    def __init__(
        self, module: nn.Module, seed: int, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        self._module, self._seed = module, seed
        self._device, self._autocast = device, autocast
        self.keywords: tuple[str, ...] = ()
        self.module_changed()

    def module_changed(self) -> None:
        """Forget what is known of the module."""
        self.parts = list(self._module.modules())
        self.normed = [part for part in self.parts if isinstance(part, BatchNorm)]
        self._draws = True  # random numbers in evaluation, as far as is known

    def is_plain(self, batch: Batch) -> bool:
        """Whether the module takes one input, by position, in its own precision."""
        return not (batch.extra or self.keywords or self._autocast)

    def outputs(self, batch: Batch) -> Any:
        """What the module makes of the inputs of a batch."""
        more = [tensor for name, tensor in batch.extra.items() if name.startswith(INPUT)]
        inputs = [tensor[0] for tensor in (batch.x, *more)]
        with self._casting(), Opened():
            if self.keywords:
                return self._module(**dict(zip(self.keywords, inputs, strict=True)))
            return self._module(*inputs)

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        outputs = self.outputs(batch)
        extra = {name: tensor[0] for name, tensor in batch.extra.items()}
        with self._casting():
            return loss(outputs, batch.slots[0], extra)

    def _casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast)

    def gradients(
        self,
        batch: Batch,
        loss: Loss,
        parameters: Sequence[nn.Parameter],
        seed: int,
        *,
        update_buffers: bool,
        training: bool,
    ) -> tuple[list[Tensor | None], Tensor]:
        """Gradients by plain autograd, None for a parameter that was not used, and the loss."""
        with ExitStack() as around, torch_seeded(seed, self._device), torch.enable_grad():
            if not training:
                around.enter_context(evaluating(self._module))
            if not (training and update_buffers):
                around.enter_context(self.without_trace())
            value = self.loss(batch, loss)
            check_scalar(value)
            found: list[Tensor | None] = [None] * len(parameters)
            if value.requires_grad:
                found = list(torch.autograd.grad(value, parameters, allow_unused=True))
            if all(gradient is None for gradient in found):
                where = "" if training else ", when the module is in evaluation mode,"
                raise InputError(
                    f"the loss{where} does not depend on the module's trainable parameters: "
                    "compute it from the outputs, without detach()"
                )
        return found, value.detach()

    def evaluate(self, batch: Batch) -> Any:
        """The outputs in evaluation; changes nothing."""
        with self._evaluating():
            return self.outputs(_copied(batch))

    def loss_in_evaluation(self, batch: Batch, loss: Loss) -> float:
        """The loss in evaluation; changes nothing."""
        with self._evaluating():
            return float(self.loss(_copied(batch), loss))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The module in evaluation, without a trace. Random layers, if any draw here, are seeded.

        Torch's generator belongs to the whole process: other threads draw from it, the data of the
        stream for example. It is left alone once the module was seen not to use it in evaluation.
        """
        with torch.no_grad(), evaluating(self._module), self.without_trace():
            if not self._draws:
                yield
                return
            with torch_seeded(self._seed, self._device) as generators:
                before = states_of(generators)
                yield
                self._draws = not all(map(torch.equal, before, states_of(generators)))

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Buffers are afterwards as they were before."""
        before = BufferSnapshot(self.parts)
        try:
            yield
        finally:
            before.restore()

    @contextmanager
    def kept_if_refused(self) -> Iterator[None]:
        """After an error, buffers and modes are as they were before."""
        before = BufferSnapshot(self.parts)
        modes = [] if self._module.training else [(part, part.training) for part in self.parts]
        try:
            yield
        except BaseException:
            before.restore()
            for part, mode in modes:
                part.training = mode
            raise


def _copied(batch: Batch) -> Batch:
    """A batch of its own for a pass without a trace: a module may write into its inputs."""
    extra = {name: tensor.clone() for name, tensor in batch.extra.items()}
    return replace(batch, x=batch.x.clone(), extra=extra)
