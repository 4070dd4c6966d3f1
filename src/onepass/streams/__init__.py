"""Streams of tasks, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onepass.errors import unknown
from onepass.streams import digits, mnist, split_cifar
from onepass.streams.base import Heads, Options, Part, Stream


@dataclass(frozen=True)
class Entry:
    """A stream of the registry. `kind(options, data)` makes it, with a folder that has its data."""

    kind: type[Stream]
    options: type
    data: str | None  # the data set it needs; None: it brings its own
    summary: str

    def make(self, options: Any, data: str | None) -> Stream:
        return self.kind(options, data)  # type: ignore[call-arg]

    def heads(self, part: Part, options: Any) -> Heads:
        """The heads of a part, known without the data. An option `classes_per_task` comes first."""
        width = getattr(options, "classes_per_task", self.kind.classes_per_task)
        return self.kind.layout(part, width)


STREAMS: dict[str, Entry] = {
    "permuted-digits": Entry(
        digits.PermutedDigits,
        Options,
        None,
        "scikit-learn's 8×8 digits, pixels permuted anew by each of 20 tasks",
    ),
    "split-digits": Entry(
        digits.SplitDigits,
        Options,
        None,
        "the same digits in four rotations: 40 classes, 20 tasks of 2, one head per task",
    ),
    "permuted-mnist": Entry(
        mnist.PermutedMnist,
        mnist.Options,
        "mnist",
        "MNIST, pixels permuted anew by each of 20 tasks: the paper's first",
    ),
    "split-cifar": Entry(
        split_cifar.SplitCifar,
        split_cifar.Options,
        "cifar100",
        "CIFAR-100, 20 tasks of 5 classes, one head per task: the paper's second",
    ),
}


def stream(name: str) -> Entry:
    """The stream of that name."""
    if name not in STREAMS:
        raise unknown("stream", name, STREAMS)
    return STREAMS[name]
