from __future__ import annotations

from functools import partial

import pytest
import torch

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.precision import products
from onepass.engine.slots import Slots
from onepass.learners import METHODS
from onepass.models.resnet import ResNet
from onepass.protocol import Run, Setup, assemble
from onepass.random_numbers import Purpose, RandomNumbers
from onepass.streams import STREAMS
from onepass.streams.base import separate_heads
from tests.toys import ToyStream

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

SETUP = Setup(hidden=(12, 12), memory_per_task=6)


def rows(method: str) -> list[Run]:
    return [
        Run(seed, dict.fromkeys(METHODS[method].hyperparameters, 0.5) | {"learning_rate": 0.1})
        for seed in (1, 2, 3)
    ]


def test_cpu_and_gpu_draw_the_same_numbers() -> None:
    for population in (50, 5000):
        drawn = [
            RandomNumbers(torch.arange(4, device=device), Purpose.REFERENCE)
            .sample(torch.arange(4, device=device), [population] * 4, 20)
            .cpu()
            for device in ("cpu", "cuda")
        ]
        assert torch.equal(*drawn)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_run_on_the_gpu_equals_the_run_on_the_cpu(method: str, ragged: bool) -> None:
    ended = []
    for device in ("cpu", "cuda"):
        feed, fleet, learner = assemble(
            ToyStream(ragged), "ev", METHODS[method], rows(method), SETUP, device=device
        )
        for phase in range(min(2, feed.phases)):
            learner.begin_task(phase)
            for batch in feed.batches(phase):
                fleet.learn(learner, batch)
            if learner.needs.second_pass:
                learner.review(feed.batches(phase))
            learner.end_task()
        theta, slots = fleet.architecture.numbers(fleet.theta).cpu(), None
        if learner.memory is not None:
            slots = learner.memory.state()["slots"][:, :-1].cpu()
        ended.append((theta, slots))
    assert torch.allclose(ended[0][0], ended[1][0], atol=1e-3)
    if ended[0][1] is not None and ended[1][1] is not None:
        assert torch.equal(ended[0][1], ended[1][1])


@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_waits_for_the_gpu(method: str) -> None:
    options = STREAMS["split-digits"].options(train_examples=100, test_examples=20)
    stream = STREAMS["split-digits"].make(options, None)
    feed, fleet, learner = assemble(
        stream, "cv", METHODS[method], rows(method), SETUP, device="cuda"
    )
    if method == "gem" and learner.capture() is None:
        pytest.skip("without Triton it solves small problems on the host")
    for phase in range(feed.phases):
        learner.begin_task(phase)
        for number, batch in enumerate(feed.batches(phase)):
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            try:
                fleet.learn(learner, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if learner.needs.second_pass:
            learner.review(feed.batches(phase))
        learner.end_task()


def test_outputs_of_a_residual_network_on_the_gpu_are_those_of_the_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu, gpu = (
        Fleet(
            partial(ResNet, 20, 6),
            range(3),
            Slots(separate_heads(3, 2)),
            [0.1] * 3,
            device=device,
            gradients="looped",
        )
        for device in ("cpu", "cuda")
    )
    with products(gpu.device, tf32=False):
        for step in range(30):
            for one, other in [
                (cpu.theta, gpu.theta),
                *((b, gpu.buffers[name]) for name, b in cpu.buffers.items()),
            ]:
                one += 0.01 * (torch.randn_like(one) if one is cpu.theta else torch.rand_like(one))
                if one is not cpu.theta:
                    other.copy_(one)
            for mine, theirs in zip(
                cpu.architecture.views(cpu.theta), gpu.architecture.views(gpu.theta), strict=True
            ):
                theirs.copy_(mine)  # parameters lie at other places there
            x = torch.randn(3, (9, 60)[step % 2], 3, 16, 16)
            batch = Batch(x, torch.zeros(x.shape[:2], dtype=torch.int64))
            found = gpu.forward(Batch(x.cuda(), batch.slots.cuda())).logits.cpu()
            expected = cpu.forward(batch).logits
            assert float((found - expected).norm()) < 1e-4 * float(expected.norm())
    assert len(gpu._forward_graphs._graphs) == 2
    assert not caplog.records
