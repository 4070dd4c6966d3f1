"""CUDA graphs on a CPU.

Operations are recorded as they are captured, and done again in any order that their waits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onepass.engine.cuda_streams import ParallelStreams
from onepass.engine.step_graphs import StepGraphs


class Event:
    """Done when some operations are."""

    def __init__(self) -> None:
        self.after: set[int] = set()

    def record(self, stream: Stream) -> None:
        self.after = set(stream.after)


class Stream:
    """What is put on it comes after some operations."""

    def __init__(self) -> None:
        self.after: set[int] = set()

    def wait_event(self, event: Event) -> None:
        self.after |= event.after


class Recording(ParallelStreams):
    """Does the operations, to know their results, and records them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.doing = graph, (lambda: None, (), {})
        super().__init__(
            cast(Any, [Stream() for _ in range(16)]), room=graph.generator.choice([0, 1 << 30])
        )

    def current(self) -> Any:
        return Stream()

    def event(self) -> Any:
        return Event()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.doing = (func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, stream: Any, work: Callable[[], Any]) -> Any:
        func, args, kwargs = self.doing
        self.graph.remember(tree_leaves((args, kwargs)))
        result = work()
        self.graph.operations.append((func, args, kwargs, result, frozenset(stream.after)))
        stream.after = {len(self.graph.operations) - 1}
        return result


class Graph:
    """Recorded operations. Each replay chooses another order."""

    def __init__(self, generator: Random) -> None:
        self.operations: list[tuple[Any, Any, Any, Any, frozenset[int]]] = []
        self.generator = generator
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: set[int] = set()

    def remember(self, values: Sequence[Any]) -> None:
        """What was there before the recording, to be put back after it: capturing does nothing."""
        for _, _, _, result, _ in self.operations[-1:]:
            self._made |= {
                t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, Tensor)
            }
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._before and storage.data_ptr() not in self._made:
                    self._before[storage.data_ptr()] = storage, storage.clone()

    def undo(self) -> None:
        for storage, copy in self._before.values():
            storage.copy_(copy)

    def replay(self) -> None:
        waiting, done = set(range(len(self.operations))), set[int]()
        ready = [number for number in waiting if not self.operations[number][4]]
        followers: dict[int, list[int]] = {}
        left = {number: len(self.operations[number][4]) for number in waiting}
        for number in waiting:
            for earlier in self.operations[number][4]:
                followers.setdefault(earlier, []).append(number)
        while ready:
            number = ready.pop(self.generator.randrange(len(ready)))
            func, args, kwargs, result, _ = self.operations[number]
            fresh = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
            done.add(number)
            for later in followers.get(number, ()):
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        assert len(done) == len(self.operations)


class Simulated(StepGraphs):
    """StepGraphs on a CPU."""

    device = "cpu"
    generator = Random(0)
    launched = 0

    def _record(self, work: Sequence[Callable[[], None]]) -> Graph:
        graph = Graph(self.generator)
        with Recording(graph) as branches:
            for step in work:
                step()
                branches.end_step()
            branches.join()
        graph.undo()
        return graph

    def _launch(self, *arguments: Any) -> None:
        Simulated.launched += 1
        super()._launch(*arguments)
