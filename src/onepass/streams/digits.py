"""Streams of scikit-learn's digits: 1 797 images of 8×8 pixels that come inside its wheel, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from onepass.draws import Purpose, Source
from onepass.streams.base import PermutedStream, Pool, SplitStream

TEST_IMAGES = 360


@cache
def _images() -> tuple[Tensor, Tensor]:
    """Images `[1797, 8, 8]` as bytes from 0 to 16, and digits; shuffled once, for everybody in the same way, test images last."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = Source([0], Purpose.SPLIT).permutation(0, [len(digits.images)])[0]
    return torch.from_numpy(digits.images).to(torch.uint8)[order], torch.from_numpy(digits.target).long()[order]


@dataclass(frozen=True)
class Options:
    """How many examples of each task are used; all by default."""

    train_examples: int | None = None
    test_examples: int | None = None


class PermutedDigits(PermutedStream):
    """Ten digits whose pixels are reordered in a new way by each task: 1 437 training and 360 test examples a task."""

    def __init__(self, options: Options, data: str | None = None) -> None:
        images, classes = _images()
        pool = Pool(images.flatten(1), classes, len(images) - TEST_IMAGES, scale=1 / 16)
        super().__init__(pool, options.train_examples, options.test_examples)


class SplitDigits(SplitStream):
    """Ten digits in four rotations as 40 classes, two a task: about 290 training and 70 test examples a task.

    A test image is a test image in all four rotations.
    """

    def __init__(self, options: Options, data: str | None = None) -> None:
        images, digits = _images()
        training = len(images) - TEST_IMAGES
        parts = []
        for part in (slice(training), slice(training, None)):
            turned = torch.cat([images[part].rot90(turns, dims=(1, 2)) for turns in range(4)])
            parts.append((turned, torch.cat([digits[part] + 10 * turns for turns in range(4)])))
        x = torch.cat([turned for turned, _ in parts]).flatten(1)
        pool = Pool(x, torch.cat([classes for _, classes in parts]), 4 * training, scale=1 / 16)
        super().__init__(pool, 2, options.train_examples, options.test_examples)
