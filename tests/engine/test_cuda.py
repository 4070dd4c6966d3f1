from __future__ import annotations

import pytest
import torch

from onepass.draws import Purpose, Source
from onepass.learners import METHODS
from onepass.protocol import Run, Setup, assemble
from onepass.streams import STREAMS
from toys import ToyStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

SETUP = Setup(hidden=(12, 12), memory_per_task=6)


def rows(method: str) -> list[Run]:
    return [Run(seed, dict.fromkeys(METHODS[method].hyperparameters, 0.5) | {"learning_rate": 0.1}) for seed in (1, 2, 3)]


def test_cpu_and_gpu_draw_the_same_numbers() -> None:
    for population in (50, 5000):
        drawn = [
            Source(torch.arange(4, device=device), Purpose.REFERENCE).sample(torch.arange(4, device=device), [population] * 4, 20).cpu()
            for device in ("cpu", "cuda")
        ]
        assert torch.equal(*drawn)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_run_on_the_gpu_equals_the_run_on_the_cpu(method: str, ragged: bool) -> None:
    ended = []
    for device in ("cpu", "cuda"):
        feed, fleet, learner = assemble(ToyStream(ragged), "ev", METHODS[method], rows(method), SETUP, device=device)
        for phase in range(min(2, feed.phases)):
            learner.begin_task(phase)
            for batch in feed.batches(phase):
                fleet.learn(learner, batch)
            if learner.needs_review:
                learner.review(feed.batches(phase))
            learner.end_task()
        theta = fleet.architecture.numbers(fleet.theta).cpu()
        ended.append((theta, None if learner.memory is None else learner.memory.state()["slots"][:, :-1].cpu()))
    assert torch.allclose(ended[0][0], ended[1][0], atol=1e-3)
    if ended[0][1] is not None and ended[1][1] is not None:
        assert torch.equal(ended[0][1], ended[1][1])


@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_waits_for_the_gpu(method: str) -> None:
    options = STREAMS["split-digits"].options(train_examples=100, test_examples=20)
    stream = STREAMS["split-digits"].make(options, None)
    feed, fleet, learner = assemble(stream, "cv", METHODS[method], rows(method), SETUP, device="cuda")
    if method == "gem" and learner.form() is None:
        pytest.skip("without Triton it solves small problems on the host")
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for number, batch in enumerate(feed.batches(phase)):
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            try:
                fleet.learn(learner, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if learner.needs_review:
            learner.review(feed.batches(phase))
        learner.end_task()
