"""Operations of a captured step on parallel streams, by what they read and write.

A step at batch size 10 is some dozens of operations of a few microseconds. In a CUDA graph that was
captured on one stream each waits for the one before, whether it needs it or not: the gradients of
two batches for each other, a weight's gradient for a bias's. Here every operation waits only for
those whose results it reads or whose memory it writes over. Nothing else changes: the same
operations work on the same numbers.
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

WIDTH = 16  # streams at most: more make no step of ours shorter


class Region(NamedTuple):
    """Bytes of a storage, from `low` to `high`.

    Of those, it is `length` bytes from `begin` in every row of `stride` bytes, or all without one.
    """

    storage: int
    stride: int
    begin: int
    length: int
    low: int
    high: int

    def meets(self, other: Region) -> bool:
        """Whether they may share a byte.

        Parts of the rows of one matrix (a parameter's place in all gradients) are told apart.
        """
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.stride != other.stride:
            return True
        return self.begin < other.begin + other.length and other.begin < self.begin + self.length

    def covers(self, other: Region) -> bool:
        """Whether every region that meets the other one meets this one too."""
        return (
            self.low <= other.low
            and other.high <= self.high
            and self.stride == other.stride
            and self.begin <= other.begin
            and other.begin + other.length <= self.begin + self.length
        )


def region(tensor: Tensor) -> Region | None:
    """What a tensor covers; None for an empty one.

    >>> matrix = torch.zeros(2, 10)
    >>> left, right = region(matrix[:, :4]), region(matrix[:, 4:])
    >>> left.meets(right), left.meets(region(matrix[:, 3:5])), left.meets(region(matrix))
    (False, True, True)
    """
    if tensor.numel() == 0:
        return None
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    steps = sorted(((s * item, n) for s, n in dimensions if n > 1 and s > 0), reverse=True)
    storage = tensor.untyped_storage().data_ptr()
    if not steps:
        return Region(storage, 0, begin, item, begin, begin + item)
    (stride, rows), inner = steps[0], item + sum(s * (n - 1) for s, n in steps[1:])
    length = stride * (rows - 1) + inner
    if len(steps) > 1 and begin % stride + inner <= stride:
        return Region(storage, stride, begin % stride, inner, begin, begin + length)
    return Region(storage, 0, begin, length, begin, begin + length)


class _Operation(NamedTuple):
    stream: int
    event: torch.cuda.Event
    before: int  # the operations that it comes after, as bits


class ParallelStreams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `torch.cuda.graph`, puts operations on other streams than the current one.

    `join` them before the capture ends. Tensors that were made inside are kept until then: an
    allocator that knows of one stream would give away memory that another one still reads. If they
    are more than `room` bytes at the end of a step, later operations wait for all those so far.
    """

    def __init__(self, others: Sequence[torch.cuda.Stream], room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._main, self._streams, self._room = self.current(), others, room
        self.lane: int | None = None
        self._fork()

    def _fork(self) -> None:
        self._operations: list[_Operation] = []
        self._last: dict[int, int] = {}  # the last operation on each stream that is in use
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
        """Let the main stream wait for all others, and begin anew."""
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
        aliases = [value.alias_info for value in returns]
        if returns and all(alias is not None and not alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view: nothing is done
        reads, writes = _touched(func, args, kwargs)
        after = self._conflicts(reads, writes)
        before = 0
        for number in after:
            before |= self._operations[number].before | 1 << number
        if self.lane is None:
            chosen = self._choose(after, before)
        else:
            chosen = self.lane % len(self._streams)
        stream, event = self._streams[chosen], self.event()
        if chosen not in self._last:
            stream.wait_event(self._start)
        else:
            before |= self._operations[self._last[chosen]].before | 1 << self._last[chosen]
        for number in after:
            if self._operations[number].stream != chosen:
                stream.wait_event(self._operations[number].event)
        result = self.run(stream, lambda: func(*args, **kwargs))
        event.record(stream)
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        self._alive += made
        self._bytes += 0 if writes else sum(tensor.nbytes for tensor in made)
        self._note(_Operation(chosen, event, before), reads, [*writes, *_regions(made)])
        return result

    def _conflicts(self, reads: Sequence[Region], writes: Sequence[Region]) -> list[int]:
        """The operations to wait for, without those that others of them have waited for."""
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

    def _choose(self, after: Sequence[int], before: int) -> int:
        """The stream where an operation adds no wait, or else the one with the oldest wait.

        No wait is added behind an operation that it waits for anyway, and on a stream of its own.
        """
        for number in after:
            stream = self._operations[number].stream
            if self._last[stream] == number:
                return stream
        for stream in range(len(self._streams)):
            if stream not in self._last or before >> self._last[stream] & 1:
                return stream
        return min(self._last, key=lambda stream: self._last[stream])

    def _note(
        self, operation: _Operation, reads: Sequence[Region], writes: Sequence[Region]
    ) -> None:
        number = len(self._operations)
        self._operations.append(operation)
        self._last[operation.stream] = number
        # What later meets a part of a written region waits for us, and we waited for the others.
        for mine in writes:
            for table in (self._writers, self._readers):
                others = table.get(mine.storage, ())
                table[mine.storage] = [pair for pair in others if not mine.covers(pair[0])]
            self._writers[mine.storage].append((mine, number))
        for mine in reads:
            self._readers.setdefault(mine.storage, []).append((mine, number))


def _touched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Region], list[Region]]:
    """What an operation reads, and what it writes in place."""
    reads: list[Region] = []
    writes: list[Region] = []
    for place, argument in enumerate(func._schema.arguments):
        positional = place < len(args) and not argument.kwarg_only
        value = args[place] if positional else kwargs.get(argument.name)
        alias = argument.alias_info
        written = (alias is not None and alias.is_write) or _moves(func, argument.name)
        (writes if written else reads).extend(_regions(tree_leaves(value)))
    return reads, writes


def _moves(func: Any, argument: str) -> bool:
    """Whether it is running statistics, which batch-norm moves without saying so."""
    backward = func.__name__.partition(".")[0].endswith("backward")
    return argument in ("running_mean", "running_var") and not backward


def _regions(values: Iterable[Any]) -> list[Region]:
    found = [region(value) for value in values if isinstance(value, Tensor)]
    return [one for one in found if one is not None]


@contextmanager
def lane(number: int) -> Iterator[None]:
    """While operations are captured on parallel streams, all those inside go to one of them.

    What is long by itself and has others like it beside it (the gradient of one run) needs no
    parallel streams of its own, and every wait of one stream for another takes time.
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
    """Whether operations are being captured on parallel streams."""
    return isinstance(_get_current_dispatch_mode(), ParallelStreams)


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


def captured(device: torch.device, pool: Any, work: Sequence[Callable[[], None]]) -> Graph:
    """A CUDA graph of some pieces of work on parallel streams. Nothing is done yet."""
    graph = torch.cuda.CUDAGraph()
    room = torch.cuda.get_device_properties(device).total_memory // 32
    others, before = streams(device), torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    # A capture that fails leaves torch on the stream of the capture, but for the second of these.
    with (
        _without_collecting(),
        torch.cuda.stream(before),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ParallelStreams(others, room) as parallel,
    ):
        try:
            for step in work:
                step()
                parallel.end_step()
        finally:
            parallel.join()  # or an error of the work becomes one of the graph
    return graph


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Inside, no garbage is collected: it may hold another graph, which cannot be freed now."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The parallel streams of all graphs of a device, made outside any capture."""
    return _streams(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    """Each has multiplied once: the library for that allocates memory, which is not a graph's."""
    streams = [torch.cuda.Stream(device) for _ in range(WIDTH)]  # type: ignore[no-untyped-call]
    for stream in streams:
        with torch.cuda.stream(stream):
            one = torch.ones(2, 8, 8, device=device)
            torch.bmm(one, one)
            torch.mm(one[0], one[0])
    torch.cuda.synchronize(device)
    return streams
