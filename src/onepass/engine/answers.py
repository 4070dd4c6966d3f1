"""Forward passes of one run, traced where the calls of a module's many parts take longer than what they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.architecture import Architecture
from onepass.engine.branches import is_branching
from onepass.engine.gpu.fusing import fuse_answers, usable
from onepass.engine.precision import products, untried
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
Program = Callable[..., Pair]
ENOUGH = 20  # passes, after which a program for the next ones pays
LONG_ENOUGH = 200  # the same for a progressive network, which is another one soon


class Answers:
    """`architecture.call` in evaluation. With `traces`, a pass that comes again and again is a program, if that gives what the module does.

    A program for one number of examples serves others too, if it turns out to."""

    def __init__(self, architecture: Architecture, traces: bool) -> None:
        self._architecture, self._traces = architecture, traces
        self._programs: dict[Hashable, dict[int, Program | None]] = {}  # by the number of examples
        self._passes: dict[Hashable, int] = {}

    def __call__(self, parameters: list[Tensor], buffers: Mapping[str, Tensor], x: Tensor, descriptors: Tensor | None) -> Pair:
        names, arguments = list(buffers), [*parameters, *buffers.values(), x]

        def plain(*given: Tensor) -> Pair:
            cut = len(parameters)
            return self._architecture.call(list(given[:cut]), dict(zip(names, given[cut:-1], strict=True)), given[-1], descriptors)

        with untried():
            return self._program(plain, arguments, descriptors)(*arguments)

    def settled(self, x: Tensor) -> bool:
        """Is there a program that answers such examples?"""
        return self._programs.get(self._form(x), {}).get(len(x)) is not None

    def _form(self, x: Tensor) -> Hashable:
        return (
            x.shape[1:],
            x.stride()[1:],
            x.dtype,
            getattr(self._architecture.module, "shown", None),
        )  # the column by which a progressive one answers

    def _program(self, plain: Program, arguments: list[Tensor], descriptors: Tensor | None) -> Program:
        x = arguments[-1]
        if not self._traces or descriptors is not None:
            return plain
        form = self._form(x)
        known = self._programs.setdefault(form, {})
        if None in known.values():
            return plain
        if is_branching():  # a pass that is captured is not done again
            return known.get(len(x)) or plain
        self._passes[form] = self._passes.get(form, 0) + 1
        if self._passes[form] <= (LONG_ENOUGH if hasattr(self._architecture.module, "shown") else ENOUGH):
            return plain
        if len(x) not in known:
            with products(x.device, tf32=False):  # TF32 is about as far off as what is looked for
                expected = plain(*arguments)
                if not all(part.isfinite().all() for part in expected):
                    return plain  # a run that has diverged cannot tell a right program from a wrong one
                known[len(x)] = self._found(plain, arguments, expected, list(known.values()))
        return known[len(x)] or plain

    def _found(self, plain: Program, arguments: list[Tensor], expected: Pair, known: list[Program | None]) -> Program | None:
        """A program that answers as expected; None if there is none."""
        for other in known:
            if other is not None and _fails(other, arguments, expected) is None:
                return other
        try:
            made = make_fx(plain)(*arguments)
            if usable(arguments[-1].device):
                fuse_answers(made.graph)
                made.graph.eliminate_dead_code()
                made.recompile()
            program: Program = made.forward
            reason = _fails(program, arguments, expected)
        except Exception as failure:  # whatever the tracer could not follow
            if is_out_of_memory(failure):
                raise
            reason = first_line(failure)
        if reason is not None:
            log.warning("forward passes are not traced: %s", reason)
            return None
        return program


def _fails(program: Program, arguments: list[Tensor], expected: Pair) -> str | None:
    """Why a program is not the right one; None if it is."""
    try:
        found = program(*arguments)
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        return first_line(failure)
    for one, other in zip(expected, found, strict=True):
        scale = float(one.abs().max()) if one.numel() else 0.0
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * scale):
            return "the program answers otherwise than the module"
    return None
