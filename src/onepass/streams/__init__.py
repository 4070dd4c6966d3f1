"""Streams of tasks, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onepass.errors import unknown
from onepass.streams import cifar, digits, mnist
from onepass.streams.base import Stream


@dataclass(frozen=True)
class Entry:
    """How a stream is made: `make(options, data)` with a folder that holds its data set (None: it brings its own)."""

    make: Callable[[Any, str | None], Stream]
    options: type
    data: str | None  # the data set it needs
    own_classes: bool  # does every class belong to one task only?
    summary: str
    inputs: int  # numbers of an example, which is as many bytes
    outputs: int  # of a network for `D^EV`; both are known here since a study can be looked at where its data set is not
    image: tuple[int, int, int] | None = (
        None  # its height, width and channels, where an example is an image
    )


STREAMS: dict[str, Entry] = {
    "permuted-digits": Entry(
        digits.PermutedDigits,
        digits.Options,
        None,
        False,
        "scikit-learn's 8×8 digits, pixels permuted anew by each of 20 tasks",
        64,
        10,
    ),
    "split-digits": Entry(
        digits.SplitDigits,
        digits.Options,
        None,
        True,
        "the same digits in four rotations: 40 classes, 20 tasks of 2, a head a task",
        64,
        34,
        (8, 8, 1),
    ),
    "permuted-mnist": Entry(
        mnist.PermutedMnist,
        mnist.Options,
        "mnist",
        False,
        "MNIST, pixels permuted anew by each of 20 tasks: the paper's first",
        784,
        10,
    ),
    "split-cifar": Entry(
        cifar.SplitCifar,
        cifar.Options,
        "cifar100",
        True,
        "CIFAR-100, 20 tasks of 5 classes, a head a task: the paper's second",
        3072,
        85,
        (32, 32, 3),
    ),
}


def stream(name: str) -> Entry:
    """The stream of that name."""
    if name not in STREAMS:
        raise unknown("stream", name, STREAMS)
    return STREAMS[name]
