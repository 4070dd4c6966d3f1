"""Split CIFAR: what is subtracted, and which classes are in which task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.streams import STREAMS, cifar
from onepass.streams.base import Part
from onepass.streams.split_cifar import Mean, Options, SplitCifar, mean

PARTS: list[Part] = ["cv", "ev"]


def test_the_mean_image_of_the_training_images_is_subtracted(folder: str) -> None:
    pool = SplitCifar(Options(), folder).pool
    prepared = pool.prepare(pool.x)
    assert prepared.dtype is torch.float32
    expected = pool.x.double() / 255 - (pool.x[: pool.training].double() / 255).mean(0)
    torch.testing.assert_close(prepared.double(), expected, rtol=0, atol=1e-6)
    assert prepared[: pool.training].mean(0).abs().max() < 1e-6


def test_the_mean_of_every_channel_may_be_subtracted_instead(folder: str) -> None:
    pool = SplitCifar(Options(mean="channel"), folder).pool
    means = (pool.x[: pool.training].double().view(-1, 3) / 255).mean(0)
    expected = (pool.x.double().view(-1, 3) / 255 - means).view(-1, 3072)
    torch.testing.assert_close(pool.prepare(pool.x).double(), expected, rtol=0, atol=1e-6)


def test_the_mean_is_exact() -> None:
    # Sums are beyond 2²⁴, where single precision leaves out whole numbers.
    bright = np.full((66_000, 12), 255, np.uint8)
    bright[0] = 254
    expected = float(np.float32(1 - 1 / (255 * 66_000)))
    for kind in get_args(Mean):
        assert set(mean(bright, kind).tolist()) == {expected}


def test_another_mean_is_refused_with_a_sentence(folder: str) -> None:
    with pytest.raises(InputError, match="did you mean 'image'"):
        SplitCifar(Options(mean="imgae"), folder)  # type: ignore[arg-type]


def classes_of(stream: SplitCifar, part: Part, seed: int) -> list[set[int]]:
    return [
        set((task.slot_of_class >= 0).nonzero().flatten().tolist())
        for task in stream.tasks(part, seed)
    ]


def test_the_first_fifteen_classes_are_for_cross_validation_and_seeds_shuffle_the_others(
    folder: str,
) -> None:
    stream = SplitCifar(Options(), folder)
    found = {part: [classes_of(stream, part, seed) for seed in range(5)] for part in PARTS}
    assert [len(tasks) for part in PARTS for tasks in found[part]] == [3] * 5 + [17] * 5
    assert {len(classes) for part in PARTS for tasks in found[part] for classes in tasks} == {5}
    assert all(set.union(*tasks) == set(range(15)) for tasks in found["cv"])
    assert all(set.union(*tasks) == set(range(15, 100)) for tasks in found["ev"])
    assert len({str(tasks) for tasks in found["ev"]}) == 5


def test_a_task_has_the_examples_of_its_classes_and_a_head_of_its_own(folder: str) -> None:
    stream = SplitCifar(Options(), folder)
    for part in PARTS:
        for k, task in enumerate(stream.tasks(part, 1)):
            assert (len(task.train), len(task.test)) == (10, 5)
            assert task.train.max() < stream.pool.training <= task.test.min()
            for index in (task.train, task.test):
                slots = task.slot_of_class[stream.pool.classes[index]]
                assert set(slots.tolist()) == set(range(5 * k, 5 * k + 5))
            assert task.permutation is None


def test_fewer_examples_a_task_may_be_used_and_more_are_refused(folder: str) -> None:
    tasks = SplitCifar(Options(4, 3), folder).tasks("ev", 0)
    assert {(len(task.train), len(task.test)) for task in tasks} == {(4, 3)}
    with pytest.raises(InputError, match="train_examples=11"):
        SplitCifar(Options(11), folder).tasks("ev", 0)


def test_the_size_of_a_network_for_split_cifar_is_known_without_its_data(folder: str) -> None:
    entry = STREAMS["split-cifar"]
    for options in (entry.options(), entry.options(classes_per_task=2)):
        stream = entry.make(options, folder)
        assert entry.kind.shape == stream.pool.shape == (32, 32, 3)
        for part in PARTS:
            assert entry.heads(part, options) == stream.heads(part)
    assert entry.kind.own_classes


@pytest.fixture(scope="module")
def real() -> SplitCifar:
    given = os.environ.get("ONEPASS_DATA")
    if given is None or cifar.find(Path(given)) is None:
        pytest.skip("ONEPASS_DATA does not say where CIFAR-100 is")
    return SplitCifar(Options(), given)


def test_the_channels_of_cifar_have_the_means_that_everybody_knows(real: SplitCifar) -> None:
    assert (tuple(real.pool.x.shape), real.pool.training) == ((60_000, 3072), 50_000)
    assert real.pool.offset is not None
    means = -real.pool.offset.view(-1, 3).double().mean(0)
    assert [round(value, 4) for value in means.tolist()] == [0.5071, 0.4865, 0.4409]


def test_a_task_of_cifar_has_2500_training_and_500_test_examples(real: SplitCifar) -> None:
    tasks = [task for part in PARTS for task in real.tasks(part, 0)]
    assert {(len(task.train), len(task.test)) for task in tasks} == {(2500, 500)}


def test_the_authors_class_orders_are_numpys_for_their_seeds(folder: str) -> None:
    stream = SplitCifar(Options(class_order="authors"), folder)
    assert stream.order("ev", 0)[:5].tolist() == [86, 66, 82, 74, 50]
    for part, classes in (("cv", range(15)), ("ev", range(15, 100))):
        orders = [tuple(stream.order(part, seed).tolist()) for seed in range(5)]
        assert len(set(orders)) == 5
        assert all(sorted(order) == list(classes) for order in orders)


def test_tasks_may_have_fewer_classes(folder: str) -> None:
    stream = SplitCifar(Options(classes_per_task=2), folder)
    assert Slots(stream.heads("ev")).count == 34
    assert {len(classes) for part in PARTS for classes in classes_of(stream, part, 0)} == {2}
    assert set.union(*classes_of(stream, "cv", 0)) == set(range(6))
    assert set.union(*classes_of(stream, "ev", 0)) == set(range(6, 40))


@pytest.mark.parametrize("wrong", [{"class_order": "authros"}, {"classes_per_task": 6}])
def test_other_orders_and_too_many_classes_a_task_are_refused(
    wrong: dict[str, Any], folder: str
) -> None:
    with pytest.raises(InputError, match="class"):
        SplitCifar(Options(**wrong), folder)
