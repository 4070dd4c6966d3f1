"""Passes over the memory come first, so that running statistics have seen the batch last."""

from __future__ import annotations

from typing import Any

import pytest

from onepass.learners import METHODS
from onepass.protocol import Setup, assemble
from tests.toys import ToyStream
from tests.training import runs


@pytest.mark.parametrize("name", ["a-gem", "s-gem", "gem", "mega-1", "mega-2"])
def test_the_batch_comes_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS[name]
    feed, fleet, learner = assemble(
        ToyStream(), "ev", method, runs(method, 2), Setup(hidden=(5,), memory_per_task=6)
    )
    for batch in feed.batches(0):
        fleet.learn(learner, batch)
    learner.end_task()
    learner.begin_task(1)
    seen: list[Any] = []
    grad = fleet.grad
    monkeypatch.setattr(
        fleet, "grad", lambda batch, **options: (seen.append(batch), grad(batch, **options))[1]
    )
    batch = next(feed.batches(1))
    fleet.learn(learner, batch)
    assert len(seen) == 2
    assert [one is batch for one in seen] == [False, True]
