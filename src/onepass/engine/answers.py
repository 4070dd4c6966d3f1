"""Forward passes of one run, traced where the calls of a module's many parts take longer than what they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.architecture import Architecture
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
ENOUGH = 100  # passes of a kind, after which a program for the next ones pays


class Answers:
    """`architecture.call` in evaluation. With `traces`, a pass that comes again and again is a program, if that gives what the module does."""

    def __init__(self, architecture: Architecture, traces: bool) -> None:
        self._architecture, self._traces = architecture, traces
        self._programs: dict[Hashable, Callable[..., Pair] | None] = {}
        self._passes: dict[Hashable, int] = {}

    def __call__(self, parameters: list[Tensor], buffers: Mapping[str, Tensor], x: Tensor, descriptors: Tensor | None) -> Pair:
        names, arguments = list(buffers), [*parameters, *buffers.values(), x]

        def plain(*given: Tensor) -> Pair:
            cut = len(parameters)
            return self._architecture.call(list(given[:cut]), dict(zip(names, given[cut:-1], strict=True)), given[-1], descriptors)

        # A progressive network answers by the column that is shown.
        key = x.shape, x.dtype, getattr(self._architecture.module, "shown", None)
        if not self._traces or descriptors is not None or self._programs.get(key, plain) is None:
            return plain(*arguments)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return plain(*arguments)  # which is recorded, and not done again
        if key not in self._programs:
            self._passes[key] = self._passes.get(key, 0) + 1
            if self._passes[key] <= ENOUGH:
                return plain(*arguments)
            self._programs[key] = self._traced(plain, arguments)
        program = self._programs[key] or plain
        return program(*arguments)

    def _traced(self, plain: Callable[..., Pair], arguments: list[Tensor]) -> Callable[..., Pair] | None:
        try:
            program: Callable[..., Pair] = make_fx(plain)(*arguments).forward
            expected, found = plain(*arguments), program(*arguments)
            for one, other in zip(expected, found, strict=True):
                if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()), equal_nan=True):
                    raise ArithmeticError("it answers otherwise than the module")
        except Exception as reason:  # whatever the tracer could not follow
            if is_out_of_memory(reason):
                raise
            log.warning("forward passes are not traced: %s", first_line(reason))
            return None
        return program
