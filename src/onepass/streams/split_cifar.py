"""Split CIFAR: CIFAR-100 in disjoint sets of classes, the paper's second stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.errors import InputError, unknown
from onepass.streams import base
from onepass.streams.base import TASKS, Part, Pool, SplitStream
from onepass.streams.cifar import CLASSES, SIDE, read

Mean = Literal["image", "channel"]
ClassOrder = Literal["seed", "authors"]


@dataclass(frozen=True)
class Options(base.Options):
    """What is subtracted from images, and which classes the tasks have.

    What is subtracted is the mean of the training images: an `image`, as in the authors' code, or
    one number per `channel`. With `class_order = "authors"` the tasks of seed `n` have the classes
    of the authors' run `n`. Some orders are easier than others, so the same five compare better.
    """

    mean: Mean = "image"
    class_order: ClassOrder = "seed"
    classes_per_task: int = 5


class SplitCifar(SplitStream):
    """A hundred classes of 32×32 pixels in colour, five per task.

    A task has 2 500 training and 500 test examples.
    """

    shape = (SIDE, SIDE, 3)
    classes_per_task = Options.classes_per_task

    def __init__(self, options: Options, data: str | None) -> None:
        if options.mean not in get_args(Mean):
            raise unknown("mean", options.mean, get_args(Mean))
        if options.class_order not in get_args(ClassOrder):
            raise unknown("class order", options.class_order, get_args(ClassOrder))
        if not 0 < options.classes_per_task <= CLASSES // sum(TASKS.values()):
            raise InputError(
                f"classes_per_task={options.classes_per_task} is not possible:"
                " 20 tasks have between 1 and 5 of CIFAR's 100 classes each"
            )
        if data is None:
            raise InputError(
                "CIFAR-100 is nowhere:"
                " fetch it with 'onepass data get cifar100', and name its folder"
            )
        x, classes, training = read(Path(data))
        pool = Pool(
            torch.from_numpy(x),
            torch.from_numpy(classes),
            training,
            scale=1 / 255,
            offset=torch.from_numpy(-mean(x[:training], options.mean)),
            shape=self.shape,
        )
        super().__init__(
            pool, options.classes_per_task, options.train_examples, options.test_examples
        )
        self.class_order = options.class_order

    def order(self, part: Part, seed: int) -> Tensor:
        if self.class_order == "seed":
            return super().order(part, seed)
        classes = np.arange(*self.classes_of(part))
        np.random.RandomState(1234 + seed).shuffle(classes)  # as their scripts do
        return torch.from_numpy(classes)


def mean(x: NDArray[np.uint8], kind: Mean) -> NDArray[np.float32]:
    """The mean `[D]` of images that are divided by 255: of every pixel, or of every channel."""
    sums, count = x.sum(0, dtype=np.int64).reshape(-1, 3), 255 * len(x)
    if kind == "channel":
        count *= len(sums)
        sums = np.broadcast_to(sums.sum(0), sums.shape)
    found: NDArray[np.float32] = (sums / count).astype(np.float32).reshape(-1)
    return found
