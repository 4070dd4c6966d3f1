"""Gradients of every run of a fleet: looped (run by run) or stacked (in one batched program).

Looped is always right. A traced program (see `tracing`), of one run or of the stack, is used only
after its gradient has been compared with plain autograd on the real model. Where tracing or `vmap`
cannot follow the model, the reason is logged and plain autograd does the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx import GraphModule

from onepass.engine.architecture import Architecture
from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import is_capturing, lane
from onepass.engine.precision import products
from onepass.engine.tracing import DrawsRandomNumbersError, Program, trace
from onepass.engine.verification import rows_of, verify_trace
from onepass.errors import first_line, is_out_of_memory
from onepass.random_numbers import Purpose, bits_at, torch_seeded

log = logging.getLogger(__name__)

# (logits [B, S], slots [B], extra) -> scalar
Loss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
Mode = Literal["auto", "looped", "stacked"]


@dataclass(frozen=True)
class Point:
    """Where gradients are taken: parameters `[R, P]`, buffers `[R, …]`, descriptors `[R, S, A]`.

    `seeds` and `step` `[R]` are those of the runs.
    """

    theta: Tensor
    buffers: dict[str, Tensor]
    descriptors: Tensor | None
    seeds: Tensor
    step: Tensor


@dataclass(frozen=True)
class _Row:
    """The gradient of one run as a function of a flat list of tensors.

    These are parameters, buffers, x, slots, descriptors, extras.
    """

    architecture: Architecture
    loss: Loss
    buffers: tuple[str, ...]
    described: bool
    extra: tuple[str, ...]

    def value(self, trained: Sequence[Tensor], rest: Sequence[Tensor]) -> Tensor:
        frozen = self.architecture.frozen
        cut = frozen + len(self.buffers)
        x, slots, *more = rest[cut:]
        descriptors = more.pop(0) if self.described else None
        buffers = dict(zip(self.buffers, rest[frozen:cut], strict=True))
        logits, _ = self.architecture.call([*rest[:frozen], *trained], buffers, x, descriptors)
        return self.loss(logits, slots, dict(zip(self.extra, more, strict=True)))

    def __call__(self, *arguments: Tensor) -> tuple[list[Tensor], Tensor]:
        frozen, end = self.architecture.frozen, len(self.architecture.names)
        trained, rest = list(arguments[frozen:end]), [*arguments[:frozen], *arguments[end:]]
        gradients, value = grad_and_value(self.value)(trained, rest)
        return gradients, value

    def autograd(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The same by plain autograd: the truth that programs are checked against."""
        frozen, end = self.architecture.frozen, len(self.architecture.names)
        with torch.enable_grad():
            trained = [p.detach().requires_grad_() for p in arguments[frozen:end]]
            value = self.value(trained, [*arguments[:frozen], *arguments[end:]])
        gradients = torch.autograd.grad(value, trained, allow_unused=True, materialize_grads=True)
        return list(gradients), value.detach()

    def safe(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The arguments with copied buffers, for a trial that must leave no trace."""
        start = len(self.architecture.names)
        end = start + len(self.buffers)
        return [*arguments[:start], *(_copy(b) for b in arguments[start:end]), *arguments[end:]]


class _Views:
    """The parameters inside a tensor `[R, P]` as views, stacked and run by run.

    They are made once: views cost as much as a small product.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._whole: Tensor | None = None

    def of(self, whole: Tensor) -> _Views:
        if whole is not self._whole:
            self._whole = whole
            self.stack = self._architecture.views(whole)
            self.rows = rows_of(self.stack)
        return self

    @property
    def whole(self) -> Tensor:
        assert self._whole is not None
        return self._whole


@dataclass(frozen=True)
class _Unverified:
    """A program that was compared on diverged runs only, and how many more comparisons there are.

    If all runs have diverged, any program will do.
    """

    program: GraphModule
    left: int


class Gradients:
    """Computes `(g [R, P], loss [R])`; one instance lives as long as its architecture does."""

    def __init__(self, architecture: Architecture, mode: Mode, rows: int) -> None:
        self.architecture = architecture
        # Stacking saves dispatches, so it wins wherever there are several runs (`onepass bench
        # --both` prints both). But under vmap a convolution becomes a grouped one, which is several
        # times slower on large batches.
        auto = rows > 1 and not architecture.convolutional
        self.stacked = mode == "stacked" or (mode == "auto" and auto)
        self._rows = rows
        self._programs: dict[Hashable, Program | None] = {}
        self._unverified: dict[Hashable, _Unverified] = {}
        self._random: bool | None = None  # whether the model's layers draw random numbers, if known
        self._parameters = _Views(architecture)
        self._workspaces: list[_Views] = []
        self._in_use: int | None = None  # workspaces of this step
        self._passes = 0  # gradients taken in this step: each has its own dropout

    def __call__(
        self, at: Point, batch: Batch, loss: Loss, update_buffers: bool
    ) -> tuple[Tensor, Tensor]:
        self._passes = 1 if self._in_use is None else self._passes + 1
        described = at.descriptors is not None
        row = _Row(self.architecture, loss, tuple(at.buffers), described, tuple(batch.extra))
        buffers = list(at.buffers.values())
        if not update_buffers:
            buffers = [_copy(buffer) for buffer in buffers]
        inputs = (batch.x, batch.slots, at.descriptors, *batch.extra.values())
        given = [x for x in inputs if x is not None]
        if batch.sizes is None:
            space = self._workspace(at.theta)
            return space.whole, self._all(row, at, [*buffers, *given], space)
        g, losses = torch.zeros_like(at.theta), at.theta.new_zeros(len(batch.sizes))
        # Rows of unequal size are rare (the last batch of a task): not worth a program each. Every
        # row is cut to its true size, so that no padding enters a loss or a batch-norm.
        theta, space = self._parameters.of(at.theta), _Views(self.architecture).of(g)
        for r, size in enumerate(batch.sizes):
            if size:
                cut = [x[r] if x is at.descriptors else x[r, :size] for x in given]
                arguments = [*theta.rows[r], *(b[r] for b in buffers), *cut]
                losses[r] = self._by_autograd(row, at, r, arguments, space.rows[r])
        return g, losses

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside a step, gradients are written into workspaces that the next step uses again."""
        self._in_use = self._passes = 0
        try:
            yield
        finally:
            self._in_use = None

    def place(self, theta: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Room for one more gradient of a step, `[R, P]`, zero in frozen columns.

        The second value are the parameters' places in it, run by run.
        """
        space = self._workspace(theta)
        return space.whole, space.rows

    def _workspace(self, theta: Tensor) -> _Views:
        if self._in_use is None or self._in_use == len(self._workspaces):
            fresh = _Views(self.architecture).of(torch.zeros_like(theta))
            if self._in_use is None:
                return fresh
            self._workspaces.append(fresh)
        self._in_use += 1
        return self._workspaces[self._in_use - 1]

    def _all(self, row: _Row, at: Point, given: list[Tensor], g: _Views) -> Tensor:
        """Fill `g` and return the losses where all rows have batches of one size."""
        theta = self._parameters.of(at.theta)
        frozen = self.architecture.frozen
        if self.stacked and not self._random:
            program = self._program(row, [*theta.stack, *given], g.stack[frozen:], stacked=True)
            if program is not None:
                return program(*theta.stack, *given, *g.stack[frozen:])
        values = []
        rows = zip(theta.rows, rows_of(given), g.rows, strict=True)
        for r, (parameters, inputs, places) in enumerate(rows):
            arguments, program = (*parameters, *inputs), None
            if not self._random:
                program = self._program(row, arguments, places[frozen:], stacked=False)
            if program is None:
                values.append(self._by_autograd(row, at, r, arguments, places))
                continue
            with lane(len(theta.rows) * self._passes + r):
                values.append(program(*arguments, *places[frozen:]))
        return torch.stack(values) if len(values) > 1 else values[0][None]

    def _by_autograd(
        self, row: _Row, at: Point, r: int, arguments: Sequence[Tensor], places: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of run `r` by plain autograd.

        Random layers draw from the run's seed and step.
        """
        seeded: AbstractContextManager[object] = nullcontext()
        if self._random is not False:
            seed, step = int(at.seeds[r]), int(at.step[r])
            bits = bits_at(seed, Purpose.LAYERS, step, self._passes - 1)
            seeded = torch_seeded(bits, at.theta.device)
        with seeded:
            gradients, value = row.autograd(arguments)
        for gradient, place in zip(gradients, places[self.architecture.frozen :], strict=True):
            place.copy_(gradient)
        return value

    def _program(
        self, row: _Row, arguments: Sequence[Tensor], outputs: Sequence[Tensor], stacked: bool
    ) -> Program | None:
        inputs = arguments[len(self.architecture.names) + len(row.buffers) :]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        key = (stacked, self.architecture.module.training, row.loss, row.extra, shapes)
        if is_capturing():  # nothing may be tried out inside a capture
            return self._programs.get(key)
        if key not in self._programs or key in self._unverified:
            self._build(key, row, arguments, outputs, stacked)
        return None if key in self._unverified else self._programs[key]

    def _build(
        self,
        key: Hashable,
        row: _Row,
        arguments: Sequence[Tensor],
        outputs: Sequence[Tensor],
        stacked: bool,
    ) -> None:
        """Store the program of a key; None if there is none that can be used.

        A diverged run cannot tell right from wrong, so then the comparison is made again later.
        """
        way = "stacked" if stacked else "traced"
        try:
            if key not in self._unverified:
                with torch_seeded(0, arguments[0].device):  # tracing runs the model once
                    function = vmap(row) if stacked else row
                    made = trace(function, row.safe(arguments), list(outputs))
                self._unverified[key] = _Unverified(made, 8 if stacked else 8 + 2 * self._rows)
            one = self._unverified[key]
            with products(arguments[0].device, tf32=False):  # TF32 errors would hide what is wrong
                verified = verify_trace(row, one.program, arguments, outputs, stacked)
            self._programs[key] = one.program.forward
            if self.architecture.module.training:  # in evaluation, dropout draws nothing
                self._random = False
            if not verified and one.left > 1:
                self._unverified[key] = replace(one, left=one.left - 1)
                return
        except DrawsRandomNumbersError as reason:
            self._random = True
            self._programs[key] = None
            log.warning("gradients are computed by plain autograd, run by run: %s", reason)
        except Exception as reason:  # the model's own errors come up again in plain autograd
            if is_out_of_memory(reason):
                raise
            log.warning(
                "gradients are not %s but computed by plain autograd, run by run: %s",
                way,
                first_line(reason),
            )
            self._programs[key] = None
        self._unverified.pop(key, None)


def _copy(buffer: Tensor) -> Tensor:
    """A copy with the same strides: kernels want rows at certain addresses."""
    fresh = torch.empty_strided(
        buffer.shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device
    )
    return fresh.copy_(buffer)
