"""Batches for all runs of a fleet: each example once, in an order that the run's seed decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from onepass.feed import Feed
from onepass.streams import digits
from onepass.streams.base import Pool, Stream
from tests.toys import ToyStream, shipped


@pytest.mark.parametrize(
    "stream",
    [ToyStream(ragged=True), shipped("split-digits"), shipped("permuted-digits")],
    ids=["ragged", "split", "permuted"],
)
@pytest.mark.parametrize("joined", [False, True])
def test_every_training_example_is_shown_exactly_once(stream: Stream, joined: bool) -> None:
    # Every pixel says which example it is of.
    numbers = torch.arange(len(stream.pool.x))[:, None].expand(stream.pool.x.shape)
    pool = Pool(numbers, stream.pool.classes, stream.pool.training, 1.0)
    own = cast(Stream, SimpleNamespace(pool=pool, heads=stream.heads, tasks=stream.tasks))
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
    stream = shipped("permuted-digits")
    together, alone = Feed(stream, "ev", [4, 5], 10), Feed(stream, "ev", [5], 10)
    for a, b in zip(together.batches(2), alone.batches(2), strict=True):
        assert torch.equal(a.x[1], b.x[0])
        assert torch.equal(a.slots[1], b.slots[0])
    assert not torch.equal(next(together.batches(2)).slots[0], next(together.batches(2)).slots[1])
    assert not torch.equal(next(together.batches(0)).slots[0], next(together.batches(1)).slots[0])


def test_test_batches_apply_the_tasks_permutation_and_slots() -> None:
    stream = shipped("permuted-digits")
    batch = Feed(stream, "cv", [7], 10).test(1)
    task = stream.tasks("cv", 7)[1]
    assert task.permutation is not None
    assert torch.equal(batch.x[0], stream.pool.x[task.test][:, task.permutation])
    assert torch.equal(batch.slots[0], stream.pool.classes[task.test])


def test_joined_examples_keep_the_slots_of_their_own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = shipped("split-digits")
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
    stream = shipped("split-digits")
    batch = Feed(stream, "ev", [0, 1, 2], 10).test(0)
    assert batch.sizes == tuple(len(stream.tasks("ev", seed)[0].test) for seed in range(3))
