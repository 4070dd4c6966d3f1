"""Streams of scikit-learn's digits, 1 797 images of 8×8 pixels.

They come inside its wheel, so nothing is downloaded.
"""

from __future__ import annotations

import gzip
import zlib
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onepass.errors import InputError, first_line
from onepass.random_numbers import Purpose, RandomNumbers
from onepass.streams.base import Options, PermutedStream, Pool, SplitStream

TEST_IMAGES = 360
SHAPE = (1797, 65)
LARGEST = 2**20  # bytes of the table, which has a quarter of a million


@cache
def _images() -> tuple[Tensor, Tensor]:
    """Images `[1797, 8, 8]` as bytes from 0 to 16, and digits; test images last.

    They are shuffled by a fixed seed, the same for all streams and runs.
    """
    table = torch.from_numpy(read(_file()))
    order = RandomNumbers([0], Purpose.SPLIT).permutation(0, [len(table)])[0]
    return table[order, :-1].view(-1, 8, 8), table[order, -1].long()


def read(path: Path) -> NDArray[np.uint8]:
    """The table of digits `[1797, 65]`: pixels and a digit in each row."""
    try:
        with gzip.open(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        table = np.loadtxt(BytesIO(content), delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape != SHAPE or table[:, :-1].max() > 16 or table[:, -1].max() > 9:
            raise ValueError("its numbers are others")
    except (OSError, EOFError, ValueError, zlib.error) as reason:
        raise InputError(
            f"{path} does not hold the digits of scikit-learn ({first_line(reason)}):"
            " install scikit-learn anew"
        ) from None
    return table


def _file() -> Path:
    # Read as a file, since importing scikit-learn takes a second, in every process.
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise InputError("the digits of scikit-learn are not there: install scikit-learn")


class PermutedDigits(PermutedStream):
    """Ten digits with permuted pixels: 1 437 training and 360 test examples per task."""

    shape = (64,)
    classes_per_task = 10

    def __init__(self, options: Options, data: str | None = None) -> None:
        x, classes = _images()
        training = len(x) - TEST_IMAGES
        pool = Pool(x.flatten(1), classes, training, scale=1 / 16, shape=self.shape)
        super().__init__(pool, options.train_examples, options.test_examples)


class SplitDigits(SplitStream):
    """Ten digits in four rotations as 40 classes, two per task.

    A task has about 290 training and 70 test examples. A test image is one in all four rotations.
    """

    shape = (8, 8, 1)
    classes_per_task = 2

    def __init__(self, options: Options, data: str | None = None) -> None:
        images, digits = _images()
        training = len(images) - TEST_IMAGES
        x, classes = [], []
        for part in (slice(training), slice(training, None)):
            for turns in range(4):
                x.append(images[part].rot90(turns, dims=(1, 2)).flatten(1))
                classes.append(digits[part] + 10 * turns)
        pool = Pool(torch.cat(x), torch.cat(classes), 4 * training, scale=1 / 16, shape=self.shape)
        super().__init__(pool, self.classes_per_task, options.train_examples, options.test_examples)
