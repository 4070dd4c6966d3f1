"""Operations of a captured step on parallel branches, by what they read and write.

A step at batch size 10 is some dozens of operations of a few microseconds. In a CUDA graph that was captured on one stream each waits for the
one before, whether it needs it or not: the gradients of two batches for each other, a weight's gradient for a bias's. Here every operation
waits for those alone whose results it reads or whose memory it writes over. Nothing else changes: the same operations on the same numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

WIDTH = 16  # branches at most: more make no step of ours shorter


class Region(NamedTuple):
    """Bytes of a storage: from `low` to `high`, and of those `length` from `begin` in every row of `stride` bytes, or all if `stride` is 0."""

    storage: int
    stride: int
    begin: int
    length: int
    low: int
    high: int

    def meets(self, other: Region) -> bool:
        """Might they share a byte? Parts of the rows of one matrix (a parameter's place in all gradients) are told apart."""
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.stride != other.stride:
            return True
        return self.begin < other.begin + other.length and other.begin < self.begin + self.length

    def covers(self, other: Region) -> bool:
        """Does whatever meets the other one meet this one too?"""
        inside = self.low <= other.low and other.high <= self.high
        return (
            inside
            and self.stride == other.stride
            and self.begin <= other.begin
            and other.begin + other.length <= self.begin + self.length
        )


def region(tensor: Tensor) -> Region | None:
    """What a tensor covers; None of nothing.

    >>> matrix = torch.zeros(2, 10)
    >>> left, right = region(matrix[:, :4]), region(matrix[:, 4:])
    >>> left.meets(right), left.meets(region(matrix[:, 3:5])), left.meets(region(matrix))
    (False, True, True)
    """
    if tensor.numel() == 0:
        return None
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item
    steps = sorted(
        (
            (s * item, n)
            for s, n in zip(tensor.stride(), tensor.shape, strict=True)
            if n > 1 and s > 0
        ),
        reverse=True,
    )
    storage = tensor.untyped_storage().data_ptr()
    if not steps:
        return Region(storage, 0, begin, item, begin, begin + item)
    (stride, rows), inner = steps[0], item + sum(s * (n - 1) for s, n in steps[1:])
    length = stride * (rows - 1) + inner
    if len(steps) > 1 and begin % stride + inner <= stride:
        return Region(storage, stride, begin % stride, inner, begin, begin + length)
    return Region(storage, 0, begin, length, begin, begin + length)


class _Operation(NamedTuple):
    branch: int
    event: torch.cuda.Event
    before: int  # the operations that it comes after, as bits


class ParallelStreams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use it inside `torch.cuda.graph`: operations go to other streams than the current one. `join` them before the capture ends.

    Tensors that were made inside are kept until then, since an allocator that knows of one stream would give away memory that another one
    still reads. If they are more than `room` bytes at the end of a step, everything that comes later waits for everything so far.
    """

    def __init__(self, others: Sequence[torch.cuda.Stream], room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._main, self._streams, self._room = self.current(), others, room
        self.lane: int | None = None
        self._fork()

    def _fork(self) -> None:
        self._operations: list[_Operation] = []
        self._last: dict[int, int] = {}  # the last operation of each branch that is in use
        self._writers: dict[int, list[tuple[Region, int]]] = {}
        self._readers: dict[int, list[tuple[Region, int]]] = {}
        self._alive: list[Tensor] = []
        self._bytes = 0
        self._start = self.event()
        self._start.record(self._main)

    def end_step(self) -> None:
        if self._bytes > self._room:
            self.join()

    def join(self) -> None:
        """Let the main stream wait for all branches, and forget them."""
        for last in self._last.values():
            self._main.wait_event(self._operations[last].event)
        self._fork()

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> Any:
        """Do something on a stream."""
        with torch.cuda.stream(stream):
            return work()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        returns = func._schema.returns
        if returns and all(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        ):
            return func(*args, **kwargs)  # a view: nothing is done
        reads, writes = _touched(func, args, kwargs)
        after = self._conflicts(reads, writes)
        before = 0
        for number in after:
            before |= self._operations[number].before | 1 << number
        branch = (
            self._branch(after, before) if self.lane is None else self.lane % len(self._streams)
        )
        stream, event = self._streams[branch], self.event()
        if branch not in self._last:
            stream.wait_event(self._start)
        else:
            before |= self._operations[self._last[branch]].before | 1 << self._last[branch]
        for number in after:
            if self._operations[number].branch != branch:
                stream.wait_event(self._operations[number].event)
        result = self.run(stream, lambda: func(*args, **kwargs))
        event.record(stream)
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        self._alive += made
        self._bytes += 0 if writes else sum(tensor.nbytes for tensor in made)
        self._note(_Operation(branch, event, before), reads, [*writes, *_regions(made)])
        return result

    def _conflicts(self, reads: Sequence[Region], writes: Sequence[Region]) -> list[int]:
        """The operations that must come first, without those that come before others of them."""
        found: set[int] = set()
        for table, regions in ((self._writers, (*reads, *writes)), (self._readers, writes)):
            for mine in regions:
                found.update(
                    number for theirs, number in table.get(mine.storage, ()) if mine.meets(theirs)
                )
        return [
            number
            for number in sorted(found, reverse=True)
            if not any(self._operations[other].before >> number & 1 for other in found)
        ]

    def _branch(self, after: Sequence[int], before: int) -> int:
        """Where an operation adds no wait: behind one it waits for anyway, or on a branch of its own; else where the wait is oldest."""
        for number in after:
            branch = self._operations[number].branch
            if self._last[branch] == number:
                return branch
        for branch in range(len(self._streams)):
            if branch not in self._last or before >> self._last[branch] & 1:
                return branch
        return min(self._last, key=lambda branch: self._last[branch])

    def _note(
        self, operation: _Operation, reads: Sequence[Region], writes: Sequence[Region]
    ) -> None:
        number = len(self._operations)
        self._operations.append(operation)
        self._last[operation.branch] = number
        for mine in writes:  # whoever meets a part of this region later waits for us, and we have waited for the others
            self._writers[mine.storage] = [
                pair for pair in self._writers.get(mine.storage, ()) if not mine.covers(pair[0])
            ] + [(mine, number)]
            self._readers[mine.storage] = [
                pair for pair in self._readers.get(mine.storage, ()) if not mine.covers(pair[0])
            ]
        for mine in reads:
            self._readers.setdefault(mine.storage, []).append((mine, number))


def _touched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Region], list[Region]]:
    """What an operation reads, and what it writes in place."""
    reads: list[Region] = []
    writes: list[Region] = []
    for place, argument in enumerate(func._schema.arguments):
        value = (
            args[place]
            if place < len(args) and not argument.kwarg_only
            else kwargs.get(argument.name)
        )
        written = (argument.alias_info is not None and argument.alias_info.is_write) or _moves(
            func, argument.name
        )
        (writes if written else reads).extend(_regions(tree_leaves(value)))
    return reads, writes


def _moves(func: Any, argument: str) -> bool:
    """Batch-norm moves its running statistics, though its signature does not say so."""
    return argument in ("running_mean", "running_var") and not func.__name__.partition(".")[
        0
    ].endswith("backward")


def _regions(values: Iterable[Any]) -> list[Region]:
    found = [region(value) for value in values if isinstance(value, Tensor)]
    return [one for one in found if one is not None]


@contextmanager
def lane(number: int) -> Iterator[None]:
    """While operations are captured on branches, all of those inside go to one of them, which has this number.

    What is long by itself and has others like it beside it (the gradient of one run) needs no branches of its own, and every wait of one branch
    for another takes time.
    """
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, ParallelStreams):
        yield
        return
    mode.lane = number
    try:
        yield
    finally:
        mode.lane = None


def is_capturing() -> bool:
    """Are operations being captured on branches?"""
    return isinstance(_get_current_dispatch_mode(), ParallelStreams)


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


def captured(device: torch.device, pool: Any, work: Sequence[Callable[[], None]]) -> Graph:
    """A CUDA graph of some pieces of work on branches. Nothing is done yet."""
    graph, room = (
        torch.cuda.CUDAGraph(),
        torch.cuda.get_device_properties(device).total_memory // 32,
    )
    others, before = streams(device), torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    # A capture that fails leaves torch on the stream of the capture, but for the second of these.
    with (
        _without_collecting(),
        torch.cuda.stream(before),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ParallelStreams(others, room) as branches,
    ):
        try:
            for step in work:
                step()
                branches.end_step()
        finally:
            branches.join()  # or an error of the work becomes one of the graph
    return graph


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Without collecting garbage: another graph in it, of a fleet that nobody needs any more, cannot be let go of while one is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The branches of all graphs of a device, made outside any capture."""
    return _streams(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Each has multiplied once: the library for that takes memory then, which is not a graph's."""
    streams = [torch.cuda.Stream(device) for _ in range(WIDTH)]  # type: ignore[no-untyped-call]
    for stream in streams:
        with torch.cuda.stream(stream):
            one = torch.ones(2, 8, 8, device=device)
            torch.bmm(one, one)
            torch.mm(one[0], one[0])
    torch.cuda.synchronize(device)
    return streams
