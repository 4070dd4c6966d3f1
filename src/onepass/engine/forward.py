"""Forward passes in evaluation, without the overhead of calling a module's many parts.

A pass that comes again and again is traced (`TracedForward`, one run at a time). On a GPU the
traced passes of all runs are then captured as one CUDA graph (`ForwardGraphs`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.architecture import Architecture
from onepass.engine.cuda_streams import Graph, captured, is_capturing
from onepass.engine.gpu.fusing import fuse_forward
from onepass.engine.gpu.kernel_checks import usable
from onepass.engine.precision import products, untried
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]  # logits and features
Program = Callable[..., Pair]
ENOUGH = 20  # passes, after which a program for the next ones pays
LONG_ENOUGH = 200  # the same for one variant of a network, which is soon replaced by the next one
LARGEST = (
    2**23
)  # numbers in all runs' examples: beyond, the GPU is busy for longer than a launch takes
KEPT = 4  # graphs


class TracedForward:
    """`architecture.call` in evaluation; with `traces`, frequent passes become verified programs.

    A program for one number of examples serves other numbers too, if its outputs agree there.
    """

    def __init__(self, architecture: Architecture, traces: bool) -> None:
        self._architecture, self._traces = architecture, traces
        self._programs: dict[Hashable, dict[int, Program | None]] = {}  # by number of examples
        self._passes: dict[Hashable, int] = {}

    def __call__(
        self,
        parameters: list[Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        descriptors: Tensor | None,
        variant: Hashable = None,
    ) -> Pair:
        """Logits and features of one run; `variant` as for `Fleet.forward`."""
        names, arguments = list(buffers), [*parameters, *buffers.values(), x]

        def plain(*given: Tensor) -> Pair:
            cut = len(parameters)
            values = dict(zip(names, given[cut:-1], strict=True))
            return self._architecture.call(list(given[:cut]), values, given[-1], descriptors)

        with untried():
            return self._program(plain, arguments, descriptors, variant)(*arguments)

    def is_settled(self, x: Tensor, variant: Hashable = None) -> bool:
        """Whether there is a verified program for such examples."""
        return self._programs.get(self._form(x, variant), {}).get(len(x)) is not None

    def _form(self, x: Tensor, variant: Hashable) -> Hashable:
        return x.shape[1:], x.stride()[1:], x.dtype, variant

    def _program(
        self, plain: Program, arguments: list[Tensor], descriptors: Tensor | None, variant: Hashable
    ) -> Program:
        x = arguments[-1]
        if not self._traces or descriptors is not None:
            return plain
        form = self._form(x, variant)
        known = self._programs.setdefault(form, {})
        if None in known.values():
            return plain
        if is_capturing():  # nothing may be tried out inside a capture
            return known.get(len(x)) or plain
        self._passes[form] = self._passes.get(form, 0) + 1
        if self._passes[form] <= (ENOUGH if variant is None else LONG_ENOUGH):
            return plain
        if len(x) not in known:
            with products(x.device, tf32=False):  # TF32 errors are as large as what is looked for
                expected = plain(*arguments)
                if not all(part.isfinite().all() for part in expected):
                    return plain  # a diverged run cannot tell a right program from a wrong one
                known[len(x)] = self._found(plain, arguments, expected, list(known.values()))
        return known[len(x)] or plain

    def _found(
        self, plain: Program, arguments: list[Tensor], expected: Pair, known: list[Program | None]
    ) -> Program | None:
        """A program with the expected outputs; None if there is none."""
        for other in known:
            if other is not None and _fails(other, arguments, expected) is None:
                return other
        try:
            made = make_fx(plain)(*arguments)
            if usable(arguments[-1].device):
                fuse_forward(made.graph)
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
            return "the program computes something else than the module"
    return None


class _Captured(NamedTuple):
    x: Tensor
    graph: Graph
    logits: Tensor
    features: Tensor


class ForwardGraphs:
    """Logits and features of examples `[R, n, …]` by `forward(x)`, captured where that pays."""

    device = "cuda"

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Captured] = {}
        self._on = True

    def __call__(
        self, forward: Callable[[Tensor], Pair], x: Tensor, depends: Hashable, settled: bool
    ) -> Pair:
        """Return `forward(x)`, which must only read.

        `depends` is what decides the result besides the values of tensors. `settled` says that
        it is computed in the same way from now on.
        """
        key = x.shape, x.stride()[1:], x.dtype, depends
        suits = x.device.type == self.device and x.numel() <= LARGEST
        worth = self._on and suits and settled and not is_capturing()
        if worth and key not in self._graphs and len(self._graphs) < KEPT:
            self._capture(key, forward, x)
        found = self._graphs.get(key) if worth else None
        if found is None:
            return forward(x)
        found.x.copy_(x)
        found.graph.replay()
        return found.logits.clone(), found.features.clone()

    def _capture(self, key: Hashable, forward: Callable[[Tensor], Pair], x: Tensor) -> None:
        try:
            # Tensors made in inference mode could never be written to again.
            with torch.inference_mode(False), torch.no_grad():
                static, found = x.clone(), list[Tensor]()
                forward(static)  # so that everything it needs is allocated
                graph = self._record(x.device, lambda: found.extend(forward(static)))
        except Exception as reason:  # out of memory included: the result does not need a graph
            log.warning("forward passes are not captured: %s", first_line(reason))
            self._on = False
            return
        self._graphs[key] = _Captured(static, graph, found[0], found[1])

    def _record(self, device: torch.device, work: Callable[[], None]) -> Graph:
        return captured(device, None, [work])
