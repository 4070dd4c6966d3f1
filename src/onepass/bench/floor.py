"""How fast a run-step could be at best: its work, counted from shapes, by the measured machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from onepass.engine.architecture import Architecture
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.base import Learner

TRIES = 5


@dataclass(frozen=True)
class Rates:
    """What a machine can do per second, measured.

    `flops` in one large matrix product, and `bytes`, read and written, in one large copy. That is
    the speed of memory: what stays in a cache from step to step can be faster.
    """

    flops: float
    bytes: float

    def best(self, other: Rates) -> Rates:
        return Rates(max(self.flops, other.flops), max(self.bytes, other.bytes))


@dataclass(frozen=True)
class Work:
    """What a run-step has to do at least: `flops` of its products, `bytes` to and from memory."""

    flops: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        """The floor: products and copies at the machine's full rates, at the same time."""
        return max(self.flops / rates.flops, self.bytes / rates.bytes)


class WatchedFleet(Fleet):
    """A fleet that notes the batches whose gradients are taken."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.batches: list[Batch] = []

    def grad(self, batch: Batch, **more: Any) -> tuple[Tensor, Tensor]:
        self.batches.append(batch)
        return super().grad(batch, **more)


def work(fleet: WatchedFleet, learner: Learner, batches: Iterable[Batch]) -> Work:
    """What a run-step has to do, on average over `batches`, from which the fleet learns.

    Counted are the products of every gradient that the learner takes, each for its own batch size
    (see `flops_per_example`), and as bytes

    - the parameters, read once and, where they learn, written once per step, however many gradients
      are taken,
    - the examples and labels of every gradient, as they are stored,
    - the learner's state: of a step, each tensor once if it is read and once if it is written.

    Gradients and tensors are found by watching the steps, so no method is listed here. Activations,
    gradients and the algebra on them are not counted: a perfect machine would hold them where it
    computes. Neither are choosing and storing examples.
    """
    fleet.batches.clear()
    steps, state = 0, 0
    for batch in batches:
        sizes = {_place(tensor): tensor.nbytes for tensor in learner.state().values()}
        with _Watch(sizes) as watch:
            fleet.learn(learner, batch)
        state += watch.bytes
        steps += 1
    seen = fleet.batches
    examples = sum(batch.slots.numel() for batch in seen)
    stored = sum(batch.x.nbytes + batch.slots.nbytes for batch in seen)
    parameters = fleet.theta.nbytes + fleet.theta[:, fleet.trainable].nbytes
    flops = examples * flops_per_example(fleet.architecture, seen[0].x[0, :1])
    return Work(flops / steps / fleet.runs, ((stored + state) / steps + parameters) / fleet.runs)


def flops_per_example(architecture: Architecture, x: Tensor) -> int:
    """Operations of the matrix products forward and backward for one example `x [1, …]`.

    2 for each weight that it meets forward, 2 for the weight's gradient unless it is frozen, and 2
    for its input's gradient unless that is the network's input or nothing before it learns.
    """
    trained = [p for p in architecture.module.parameters() if p.requires_grad]
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(
            architecture.module(architecture.prepare(x)).sum(), trained, allow_unused=True
        )
    return int(counter.get_total_flops())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which of some tensors are read before they are written, and which are written.

    They are known by where they lie.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes
        self._read: set[int] = set()
        self._written: set[int] = set()

    @property
    def bytes(self) -> int:
        return sum(self._sizes[place] for places in (self._read, self._written) for place in places)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        returns, written = func._schema.returns, set[int]()
        view = returns and all(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )
        for number, argument in enumerate(() if view else func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            places = {
                _place(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
            } & self._sizes.keys()
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes:
                written |= places
            if not (
                writes and (argument.is_out or func is torch.ops.aten.copy_.default)
            ):  # those do not mind what was there
                self._read |= places - self._written
        self._written |= written
        return func(*args, **kwargs)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measured(device: torch.device, side: int | None = None, numbers: int | None = None) -> Rates:
    """The best of several products of square matrices, and of several copies.

    Products are computed as `onepass.engine.precision` says.
    """
    gpu = device.type == "cuda"
    side, numbers = (
        side or (8192 if gpu else 2048),
        numbers or (1 << 28 if gpu else 1 << 25),
    )  # far larger than any cache
    matrix, product = torch.randn(side, side, device=device), torch.empty(side, side, device=device)
    multiply = _best(lambda: torch.mm(matrix, matrix, out=product), device)
    source, target = (
        torch.zeros(numbers, device=device),
        torch.ones(numbers, device=device),
    )  # written once, so that they are really there
    copy = _best(lambda: target.copy_(source), device)
    return Rates(2 * side**3 / multiply, 2 * source.nbytes / copy)


def _best(do: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several tries."""
    found = []
    for _ in range(TRIES):
        wait(device)
        began = time.perf_counter()
        do()
        wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
