"""Streams: tasks to choose with and tasks to learn, which share no class and no permutation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from onepass.errors import InputError
from onepass.streams import STREAMS, digits
from onepass.streams.base import Options, Part, PermutedStream, Pool, is_odd
from tests.toys import shipped

PARTS: list[Part] = ["cv", "ev"]
OWN = [name for name, entry in STREAMS.items() if entry.data is None]


@pytest.mark.parametrize("name", OWN)
def test_a_stream_has_three_tasks_to_choose_with_and_seventeen_to_learn(name: str) -> None:
    stream = shipped(name)
    assert [len(stream.tasks(part, 0)) for part in PARTS] == [3, 17]


@pytest.mark.parametrize("name", OWN)
def test_the_size_of_a_network_for_a_stream_is_known_without_its_data(name: str) -> None:
    stream, entry = shipped(name), STREAMS[name]
    assert entry.kind.shape == stream.pool.shape
    assert math.prod(entry.kind.shape) == stream.pool.x.shape[1]
    for part in PARTS:
        assert entry.heads(part, entry.options()) == stream.heads(part)
    assert stream.pool.x.dtype is torch.uint8


def test_permutations_of_cross_validation_never_occur_in_evaluation_whatever_the_seeds() -> None:
    stream = shipped("permuted-digits")
    parity = {
        part: {
            is_odd(t.permutation)
            for seed in range(20)
            for t in stream.tasks(part, seed)
            if t.permutation is not None
        }
        for part in PARTS
    }
    assert parity == {"cv": {False}, "ev": {True}}


def test_disjointness_holds_even_where_permutations_are_few() -> None:
    pool = Pool(torch.zeros(10, 3, dtype=torch.uint8), torch.arange(10), 8, scale=1)
    stream = PermutedStream(pool, None, None)
    found = {
        part: {
            tuple(t.permutation.tolist())
            for s in range(50)
            for t in stream.tasks(part, s)
            if t.permutation is not None
        }
        for part in PARTS
    }
    assert {part: len(f) for part, f in found.items()} == {"cv": 3, "ev": 3}
    assert not found["cv"] & found["ev"]


@pytest.mark.parametrize("n", [4, 5])
def test_half_of_all_permutations_are_odd(n: int) -> None:
    everything = [torch.tensor(p) for p in itertools.permutations(range(n))]
    assert sum(is_odd(p) for p in everything) == len(everything) // 2
    swapped = everything[7].clone()
    swapped[[0, 2]] = swapped[[2, 0]]
    assert is_odd(swapped) != is_odd(everything[7])


def test_cross_validation_classes_are_the_same_for_all_seeds_and_never_in_evaluation() -> None:
    stream = shipped("split-digits")
    classes = {
        part: [
            {int(c) for t in stream.tasks(part, s) for c in (t.slot_of_class >= 0).nonzero()}
            for s in range(5)
        ]
        for part in PARTS
    }
    assert all(found == set(range(6)) for found in classes["cv"])
    assert all(found == set(range(6, 40)) for found in classes["ev"])
    orders = [[t.slot_of_class.tolist() for t in stream.tasks("ev", s)] for s in range(5)]
    assert len({str(order) for order in orders}) == 5


@pytest.mark.parametrize("name", OWN)
def test_training_and_test_examples_do_not_overlap(name: str) -> None:
    stream = shipped(name)
    for part in PARTS:
        for task in stream.tasks(part, 3):
            assert task.train.max() < stream.pool.training <= task.test.min()
            assert len(set(task.train.tolist())) == len(task.train)


def test_split_digits_are_rotations_and_a_test_image_is_one_in_every_rotation() -> None:
    stream = digits.SplitDigits(Options())
    images, classes = stream.pool.x.view(-1, 8, 8), stream.pool.classes
    training = stream.pool.training
    quarter = training // 4
    assert torch.equal(images[quarter], images[0].rot90(1))
    assert classes[quarter] == classes[0] + 10
    assert torch.equal(images[training + digits.TEST_IMAGES], images[training].rot90(1))
    assert sorted(set(classes.tolist())) == list(range(40))


@pytest.mark.parametrize(("train", "test"), [(0, None), (1438, None), (None, 361), (-3, None)])
def test_an_impossible_number_of_examples_is_refused_with_a_sentence(
    train: int | None, test: int | None
) -> None:
    with pytest.raises(InputError, match="examples"):
        digits.PermutedDigits(Options(train, test)).tasks("ev", 0)


def test_fewer_examples_are_a_random_choice_that_differs_by_task_and_seed() -> None:
    stream = digits.PermutedDigits(Options(train_examples=100))
    chosen = [tuple(t.train.tolist()) for s in (0, 1) for t in stream.tasks("ev", s)]
    assert {len(c) for c in chosen} == {100}
    assert len(set(chosen)) == 34


@pytest.mark.parametrize("what", ["train_examples", "test_examples"])
def test_a_number_of_examples_that_any_of_the_seeds_lacks_is_refused(what: str) -> None:
    whole = shipped("split-digits")
    fewest = {
        part: [
            min(len(getattr(task, what[:-9])) for task in whole.tasks(part, seed))
            for seed in range(8)
        ]
        for part in PARTS
    }
    for part in PARTS:
        for count in range(min(fewest[part]) - 1, max(fewest[part]) + 2):
            stream = digits.SplitDigits(Options(**{what: count}))
            for seeds in range(1, 9):
                least = min(fewest[part][:seeds])
                if count <= least:
                    stream.check(part, range(seeds))
                    assert len(stream.tasks(part, seeds - 1)) in (3, 17)
                else:
                    with pytest.raises(InputError, match=f"{what}={count} is not possible"):
                        stream.check(part, range(seeds))
