from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.feed import Feed
from onepass.streams import STREAMS, digits, mnist
from onepass.streams.base import Part, PermutedStream, Pool, Stream, is_odd
from tests.toys import ToyStream

PARTS: list[Part] = ["cv", "ev"]
OWN = [name for name, entry in STREAMS.items() if entry.data is None]


def make(name: str) -> Stream:
    return STREAMS[name].make(STREAMS[name].options(), None)


@pytest.mark.parametrize("name", OWN)
def test_a_stream_has_three_tasks_to_choose_with_and_seventeen_to_learn(name: str) -> None:
    stream = make(name)
    assert [len(stream.tasks(part, 0)) for part in PARTS] == [3, 17]


@pytest.mark.parametrize("name", OWN)
def test_the_size_of_a_network_for_a_stream_is_known_without_its_data(name: str) -> None:
    stream, entry = make(name), STREAMS[name]
    assert (entry.inputs, entry.outputs) == (
        stream.pool.x.shape[1],
        Slots(stream.heads("ev")).count,
    )
    assert stream.pool.x.dtype is torch.uint8


def test_the_network_for_mnist_has_a_pixel_an_input_and_a_digit_an_output() -> None:
    assert (STREAMS["permuted-mnist"].inputs, STREAMS["permuted-mnist"].outputs) == (28 * 28, 10)


def test_permutations_of_cross_validation_never_occur_in_evaluation_whatever_the_seeds() -> None:
    stream = make("permuted-digits")
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
    stream = make("split-digits")
    classes = {
        part: [
            {int(c) for t in stream.tasks(part, s) for c in (t.slot_of_class >= 0).nonzero()}
            for s in range(5)
        ]
        for part in PARTS
    }
    assert all(found == set(range(6)) for found in classes["cv"])
    assert all(found == set(range(6, 40)) for found in classes["ev"])
    orders = {
        tuple(
            tuple((t.slot_of_class >= 0).nonzero().flatten().tolist())
            for t in stream.tasks("ev", s)
        )
        for s in range(5)
    }
    assert len(orders) == 5


@pytest.mark.parametrize("name", OWN)
def test_training_and_test_examples_do_not_overlap(name: str) -> None:
    stream = make(name)
    for part in PARTS:
        for task in stream.tasks(part, 3):
            assert task.train.max() < stream.pool.training <= task.test.min()
            assert len(set(task.train.tolist())) == len(task.train)


def test_split_digits_are_rotations_and_a_test_image_is_one_in_every_rotation() -> None:
    stream = digits.SplitDigits(digits.Options())
    images, classes, training = (
        stream.pool.x.view(-1, 8, 8),
        stream.pool.classes,
        stream.pool.training,
    )
    quarter = training // 4
    assert torch.equal(images[quarter], images[0].rot90(1))
    assert classes[quarter] == classes[0] + 10
    assert torch.equal(images[training + digits.TEST_IMAGES], images[training].rot90(1))
    assert sorted(set(classes.tolist())) == list(range(40))


@pytest.mark.parametrize(
    "stream",
    [ToyStream(ragged=True), make("split-digits"), make("permuted-digits")],
    ids=["ragged", "split", "permuted"],
)
@pytest.mark.parametrize("joined", [False, True])
def test_every_training_example_is_shown_exactly_once(stream: Stream, joined: bool) -> None:
    numbers = torch.arange(len(stream.pool.x))[:, None].expand(
        stream.pool.x.shape
    )  # every pixel says which example it is of
    own = type(
        "Numbered",
        (),
        {
            "pool": Pool(numbers, stream.pool.classes, stream.pool.training, 1.0),
            "heads": stream.heads,
            "tasks": stream.tasks,
        },
    )()
    seeds = [0, 1, 2]
    feed = Feed(own, "ev", seeds, 10, joined=joined)
    for phase in range(feed.phases):
        batches = list(feed.batches(phase))
        for r, seed in enumerate(seeds):
            tasks = stream.tasks("ev", seed)
            shown = torch.cat(
                [b.x[r, : b.slots.shape[1] if b.sizes is None else b.sizes[r], 0] for b in batches]
            )
            expected = torch.cat([t.train for t in tasks] if joined else [tasks[phase].train])
            assert torch.equal(shown.sort().values, expected.sort().values)
            assert not torch.equal(shown, expected)


def test_only_the_last_batch_of_a_run_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.feed.CHUNK", 2)
    feed = Feed(ToyStream(ragged=True), "ev", [0, 1, 2], 10)
    for phase in range(feed.phases):
        lengths, sizes = feed.lengths(phase), [b.sizes or (10, 10, 10) for b in feed.batches(phase)]
        for r in range(3):
            mine = [s[r] for s in sizes]
            assert sum(mine) == lengths[r]
            full = lengths[r] // 10
            assert mine[:full] == [10] * full
            assert sum(n > 0 for n in mine) == -(-lengths[r] // 10)
    assert feed.steps() == sum(-(-n // 10) for phase in range(4) for n in feed.lengths(phase))


def test_the_order_depends_on_the_seed_of_a_run_and_not_on_its_neighbours() -> None:
    stream = make("permuted-digits")
    together, alone = Feed(stream, "ev", [4, 5], 10), Feed(stream, "ev", [5], 10)
    for a, b in zip(together.batches(2), alone.batches(2), strict=True):
        assert torch.equal(a.x[1], b.x[0])
        assert torch.equal(a.slots[1], b.slots[0])
    assert not torch.equal(next(together.batches(2)).slots[0], next(together.batches(2)).slots[1])
    assert not torch.equal(next(together.batches(0)).slots[0], next(together.batches(1)).slots[0])


def test_test_batches_apply_the_tasks_permutation_and_slots() -> None:
    stream = make("permuted-digits")
    batch = Feed(stream, "cv", [7], 10).test(1)
    task = stream.tasks("cv", 7)[1]
    assert task.permutation is not None
    assert torch.equal(batch.x[0], stream.pool.x[task.test][:, task.permutation])
    assert torch.equal(batch.slots[0], stream.pool.classes[task.test])


def test_joined_examples_keep_the_slots_of_their_own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make("split-digits")
    feed = Feed(stream, "ev", [0], 50, joined=True)
    assert feed.slots.union
    tasks = stream.tasks("ev", 0)
    of_slot = {int(s): c for t in tasks for c, s in enumerate(t.slot_of_class.tolist()) if s >= 0}
    known = {
        c: {tuple(x.tolist()) for x in stream.pool.x[stream.pool.classes == c]}
        for c in of_slot.values()
    }
    monkeypatch.setattr("onepass.feed.CHUNK", 2)
    for batch in feed.batches(0):
        assert all(
            tuple(x.tolist()) in known[of_slot[int(s)]]
            for x, s in zip(batch.x[0], batch.slots[0], strict=True)
        )
        assert len({int(s) // 2 for s in batch.slots[0]}) > 3


def test_joined_examples_are_permuted_by_their_own_task() -> None:
    stream = digits.PermutedDigits(digits.Options(train_examples=20))
    feed = Feed(stream, "cv", [0], 10, joined=True)
    tasks = stream.tasks("cv", 0)
    expected = sorted(
        tuple(stream.pool.x[i][t.permutation].tolist()) for t in tasks for i in t.train.tolist()
    )
    assert sorted(tuple(x.tolist()) for b in feed.batches(0) for x in b.x[0]) == expected


def test_test_batches_know_the_true_sizes_of_unequal_rows() -> None:
    stream = make("split-digits")
    batch = Feed(stream, "ev", [0, 1, 2], 10).test(0)
    assert batch.sizes == tuple(len(stream.tasks("ev", seed)[0].test) for seed in range(3))


@pytest.mark.parametrize(("train", "test"), [(0, None), (1438, None), (None, 361), (-3, None)])
def test_an_impossible_number_of_examples_is_refused_with_a_sentence(
    train: int | None, test: int | None
) -> None:
    with pytest.raises(InputError, match="examples"):
        digits.PermutedDigits(digits.Options(train, test)).tasks("ev", 0)


def test_fewer_examples_are_a_random_choice_that_differs_by_task_and_seed() -> None:
    stream = digits.PermutedDigits(digits.Options(train_examples=100))
    chosen = [tuple(t.train.tolist()) for s in (0, 1) for t in stream.tasks("ev", s)]
    assert {len(c) for c in chosen} == {100}
    assert len(set(chosen)) == 34


def test_a_folder_without_mnist_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no MNIST"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))


def test_an_altered_file_is_refused_by_its_checksum(tmp_path: Path) -> None:
    for name in mnist.FILES:
        (tmp_path / f"{name}.gz").write_bytes(b"not it")
    with pytest.raises(InputError, match="checksum"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))


@pytest.mark.parametrize("what", ["train_examples", "test_examples"])
def test_a_number_of_examples_that_any_of_the_seeds_lacks_is_refused(what: str) -> None:
    whole = make("split-digits")
    fewest = {
        part: [
            min(len(getattr(task, what[:-9])) for task in whole.tasks(part, seed))
            for seed in range(8)
        ]
        for part in PARTS
    }
    for part in PARTS:
        for count in range(min(fewest[part]) - 1, max(fewest[part]) + 2):
            stream = digits.SplitDigits(digits.Options(**{what: count}))
            for seeds in range(1, 9):
                least = min(fewest[part][:seeds])
                if count <= least:
                    stream.check(part, range(seeds))
                    assert len(stream.tasks(part, seeds - 1)) in (3, 17)
                else:
                    with pytest.raises(InputError, match=f"{what}={count} is not possible"):
                        stream.check(part, range(seeds))
