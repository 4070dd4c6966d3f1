"""A stream that is shown twice is noticed, and nothing else is changed by that."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from onepass.live.repeats import PLACES, Repeats, hashes
from onepass.live.saving import packed

SAYS = "the stream seems to repeat"


def data(seed: int = 0, batches: int = 30) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10 * batches, 6, generator=generator)
    y = torch.randint(0, 3, (10 * batches,), generator=generator)
    return list(zip(x.split(10), y.split(10), strict=True))


def shuffled(stream: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(10 * len(stream), generator=torch.Generator().manual_seed(5))
    x, y = (torch.cat(part)[order] for part in zip(*stream, strict=True))
    return list(zip(x.split(10), y.split(10), strict=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def learnt(
    epochs: list[list[tuple[Tensor, Tensor]]], task_free: bool = True, end: bool = False
) -> OnePass:
    plan = Memory(per_task=40, examples=60, recent=2)
    learner = OnePass(net(), "er", learning_rate=0.01, task_free=task_free, memory=plan)
    for epoch in epochs:
        for x, y in epoch:
            learner.observe(x, y)
        if end:
            learner.end_task()
    return learner


@pytest.mark.parametrize(
    ("task_free", "end"),
    [(True, False), (False, False), (False, True)],
    ids=["task-free", "one task", "an epoch is a task"],
)
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "shuffled"])
def test_a_second_epoch_is_told_once(
    task_free: bool, end: bool, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    once = data()
    learnt([once], task_free, end)
    assert SAYS not in caplog.text
    learnt([once] + 3 * [shuffled(once) if mixed else once], task_free, end)
    assert caplog.text.count(SAYS) == 1
    assert [record.levelno for record in caplog.records if SAYS in record.message] == [
        logging.WARNING
    ]


def test_a_second_epoch_after_loading_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learnt([data()]).save(tmp_path / "saved")
    loaded = OnePass.load(tmp_path / "saved", net())
    for x, y in data() * 3:
        loaded.observe(x, y)
    assert SAYS in caplog.text


@pytest.mark.parametrize("reload", [False, True], ids=["at once", "after loading"])
def test_a_second_epoch_is_told_of_a_memory_that_holds_all_of_the_first(
    reload: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8000, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8000) % 3
    learner = OnePass(net(), "er", learning_rate=0.01, memory=Memory(per_task=20_000))
    for rows in torch.arange(8000).split(500):
        learner.observe(x[rows], y[rows])
    if reload:
        learner.save(tmp_path / "saved")
        learner = OnePass.load(tmp_path / "saved", net())
    assert SAYS not in caplog.text
    for rows in torch.arange(8000).split(500):
        learner.observe(x[rows], y[rows])
    assert caplog.text.count(SAYS) == 1


def test_what_is_remembered_of_the_examples_has_a_limit() -> None:
    columns = {"x": torch.arange(20_000.0)[:, None]}
    repeats = Repeats()
    repeats.note(columns, range(20_000))
    assert len(repeats._some) <= PLACES
    # Of the 30 kilobytes that are promised.
    assert sum(map(sys.getsizeof, (repeats._table, repeats._some))) < 20_000
    assert repeats._again == 0
    repeats.note(columns, range(20_000))
    assert repeats._again >= PLACES // 4


def test_the_last_examples_are_known_again_after_any_number_of_others() -> None:
    columns = {"x": torch.arange(100_000.0)[:, None]}
    repeats = Repeats()
    for rows in (range(99_900), range(99_900, 100_000), range(99_900, 100_000)):
        repeats.note(columns, rows)
    assert repeats._again >= 10


def test_a_stream_without_repetitions_is_never_suspected(caplog: pytest.LogCaptureFixture) -> None:
    learnt([data(seed) for seed in range(10)])
    few = data(77, batches=1)
    # Five alike may be by nature.
    learnt([[(x.clone(), y) for x, y in few], [(few[0][0][:5], few[0][1][:5])]])
    assert SAYS not in caplog.text


def test_noticing_changes_nothing_in_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = packed(learnt([data(), data()]))
    monkeypatch.setattr(Repeats, "note", lambda *_: None)
    assert packed(learnt([data(), data()])) == noticed


def test_a_batch_that_was_taken_back_does_not_count() -> None:
    from copy import copy

    columns = {"x": torch.arange(20.0)[:, None], "slots": torch.zeros(20, dtype=torch.int64)}
    repeats = Repeats()
    before = copy(repeats)
    repeats.note(columns, range(20))
    before.note(columns, range(20))
    assert before._again == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64]
)
def test_examples_differ_by_any_column(dtype: torch.dtype) -> None:
    columns = {
        "x": torch.tensor([[0, 1], [0, 1], [1, 1], [0, 1]]).to(dtype),
        "slots": torch.tensor([0, 0, 0, 1]),
    }
    found = hashes(columns, range(4))
    assert found[0] == found[1]
    assert len(set(found)) == 3
