"""Which runs share a fleet, and which fleets share a device."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from onepass.errors import InputError
from onepass.learners import METHODS
from onepass.protocol import Run, Setup, assemble
from onepass.studies import packing, work
from tests.studies.small_study import small
from tests.toys import ToyStream


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name == "prog-nn" else name for name in METHODS],
)
def test_different_packings_agree_within_rounding_over_twenty_steps(name: str) -> None:
    hyper = dict.fromkeys(METHODS[name].hyperparameters, 0.5) | {"learning_rate": 0.1}
    factors = [(1 + seed) / 2 for seed in range(4)]
    rows = [
        Run(seed, {key: factor * value for key, value in hyper.items()})
        for seed, factor in enumerate(factors)
    ]
    together = parameters_after_20_steps(name, rows)
    for size in (1, 2):
        fleets = [rows[start : start + size] for start in range(0, 4, size)]
        apart = [row for fleet in fleets for row in parameters_after_20_steps(name, fleet)]
        for one, other in zip(apart, together, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
            assert not torch.equal(one, torch.zeros_like(one))


def parameters_after_20_steps(name: str, rows: list[Run]) -> list[torch.Tensor]:
    setup = Setup(hidden=(8,), memory_per_task=6)
    feed, fleet, learner = assemble(ToyStream(), "ev", METHODS[name], rows, setup)
    steps = 0
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for batch in feed.batches(phase):
            if steps < 20:
                fleet.learn(learner, batch)
            steps += 1
        if learner.needs.second_pass:
            learner.review(feed.batches(phase))
        learner.end_task()
    return list(fleet.theta.clone())


def test_packing_depends_on_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small()
    stream = work.open_stream(recipe, None)
    need = packing.bytes_per_row(stream, recipe, "van", "ev")
    assert packing.most_rows(stream, recipe, "van", "ev", "cpu", 2) == packing.MOST_ROWS["cpu"]
    monkeypatch.setattr(packing, "memory", lambda _: int(2 * 5.5 * need / packing.SHARE))
    assert packing.most_rows(stream, recipe, "van", "ev", "cpu", 2) == 5
    monkeypatch.setattr(packing, "memory", lambda _: need)
    assert packing.most_rows(stream, recipe, "van", "ev", "cpu", 2) == 1
    monkeypatch.setattr(packing, "memory", lambda _: need - 1)
    why = r"a single run of van does not fit .* leave it out by --methods"
    with pytest.raises(InputError, match=why):
        packing.most_rows(stream, recipe, "van", "ev", "cpu", 2)


def test_what_a_run_needs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("van,ewc,a-gem")
    stream = work.open_stream(recipe, None)
    need = {name: packing.bytes_per_row(stream, recipe, name, "ev") for name in recipe.methods}
    parameters = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert need["van"] > 4 * parameters
    assert need["ewc"] - need["van"] >= 4 * parameters
    remembering = small("a-gem", changes=["memory_per_task=1000"])
    larger = packing.bytes_per_row(stream, remembering, "a-gem", "ev")
    assert larger - need["a-gem"] >= 17 * 900 * 64


def test_one_fleet_per_gpu_at_a_time(tmp_path: Path) -> None:
    files = [tmp_path / "gpu0", tmp_path / "gpu1"]

    def opened() -> list[int]:
        return [os.open(path, os.O_RDWR | os.O_CREAT) for path in files]

    first, second, third = opened(), opened(), opened()
    assert work._first_free(first) == 0
    assert work._first_free(second) == 1
    waited: list[int] = []
    thread = threading.Thread(target=lambda: waited.append(work._first_free(third)))
    thread.start()
    time.sleep(0.3)
    assert waited == []
    os.close(second[1])
    thread.join(timeout=5)
    assert waited == [1]
