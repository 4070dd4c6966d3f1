"""Forward passes as CUDA graphs, simulated on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.engine import fleet, forward
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.forward import ForwardGraphs, TracedForward
from onepass.engine.slots import Slots
from onepass.models.mlp import mlp
from onepass.models.progressive import Progressive
from onepass.models.resnet import ResNet
from onepass.streams.base import separate_heads
from tests.engine.simulated_cuda import Graph, Recording
from tests.toys import small_net

GENERATOR = Random(0)


class Simulated(ForwardGraphs):
    """On a CPU."""

    device = "cpu"
    recorded = 0

    def _record(self, device: torch.device, work: Callable[[], None]) -> Any:
        Simulated.recorded += 1
        graph = Graph(GENERATOR)
        with Recording(graph) as streams:
            work()
            streams.end_step()
            streams.join()
        graph.undo()
        return graph


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "ENOUGH", 3)
    monkeypatch.setattr(fleet, "ForwardGraphs", Simulated)
    monkeypatch.setattr(
        fleet, "TracedForward", lambda architecture, traces: TracedForward(architecture, True)
    )
    monkeypatch.setattr(Simulated, "recorded", 0)


def runs(build: Callable[[], torch.nn.Module], count: int = 3) -> Fleet:
    return Fleet(
        build, range(count), Slots(separate_heads(3, 2)), [0.1] * count, gradients="looped"
    )


def batch(n: int, *shape: int) -> Batch:
    return Batch(torch.randn(3, n, *shape), torch.zeros(3, n, dtype=torch.int64))


def truth(learners: Fleet, given: Batch) -> Tensor:
    parameters = learners.architecture.views(learners.theta)
    rows = []
    for r in range(learners.runs):
        buffers = {name: b[r] for name, b in learners.buffers.items()}
        rows.append(
            learners.architecture.call([p[r] for p in parameters], buffers, given.x[r], None)[0]
        )
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: small_net(6), (6,)), (lambda: ResNet(4, 6, (1, 1)), (3, 8, 8))],
    ids=["net", "residual"],
)
def test_captured_passes_use_the_current_parameters_and_buffers(
    build: Callable[[], torch.nn.Module], shape: tuple[int, ...]
) -> None:
    learners = runs(build)
    kept = []
    for step in range(6):
        with torch.no_grad():
            learners.theta += 0.01 * torch.randn_like(learners.theta)
            for buffer in learners.buffers.values():
                buffer += 0.1
        for n in (5, 7):
            given = batch(n, *shape)
            found = learners.forward(given)
            assert torch.allclose(found.logits, truth(learners, given), atol=1e-5), step
            parameters = learners.architecture.views(learners.theta)
            _, features = learners._run_by_run(parameters, learners.buffers, given.x, None)
            assert torch.allclose(found.features, features, atol=1e-5)
            kept += [(found.logits, found.logits.clone()), (found.features, found.features.clone())]
    assert Simulated.recorded == 2
    assert all(torch.equal(one, other) for one, other in kept), "results are written over"


def test_other_parameters_and_large_batches_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learners = runs(lambda: small_net(6))
    given, other = batch(5, 6), learners.theta * 2
    monkeypatch.setattr(forward, "LARGEST", 3 * 30)
    for _ in range(6):
        learners.forward(given, theta=other)
    assert Simulated.recorded == 0
    for _ in range(6):
        assert torch.allclose(learners.forward(given).logits, truth(learners, given))
        learners.forward(batch(6, 6))
    assert Simulated.recorded == 1
    twice = learners.forward(given, theta=other).logits
    learners.theta *= 2
    assert torch.allclose(twice, truth(learners, given))


def test_each_column_of_a_progressive_network_has_a_graph_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "LONG_ENOUGH", 3)
    learners = runs(lambda: Progressive(lambda: mlp(6, [5], 6), 2))
    with torch.no_grad():
        learners.theta.normal_()
    given, module = batch(5, 6), learners.architecture.module
    for shown in (0, 1) * 6:
        module.shown = shown  # type: ignore[assignment]
        found = learners.forward(given, variant=shown).logits
        assert torch.allclose(found, truth(learners, given), atol=1e-5)
    assert Simulated.recorded == 2


def test_passes_that_cannot_be_captured_run_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: ForwardGraphs, *_: Any) -> Any:
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(Simulated, "_record", fails)
    learners, given = runs(lambda: small_net(6)), batch(5, 6)
    for _ in range(6):
        assert torch.allclose(learners.forward(given).logits, truth(learners, given))
    assert caplog.text.count("forward passes are not captured: no graphs today") == 1


def test_the_number_of_graphs_is_limited() -> None:
    learners = runs(lambda: small_net(6))
    for _ in range(3):
        for n in range(4, 12):
            given = batch(n, 6)
            assert torch.allclose(learners.forward(given).logits, truth(learners, given))
    assert Simulated.recorded == forward.KEPT


class Fickle(torch.nn.Module):
    """Negates its outputs in every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = torch.nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(x)
        return out if self.calls % 2 else -out


def test_a_module_that_is_not_traced_is_not_captured_either() -> None:
    learners, given = runs(Fickle), batch(5, 6)
    for _ in range(6):
        learners.forward(given)
    before = learners.architecture.module.calls
    learners.forward(given)
    assert learners.architecture.module.calls == before + 3  # type: ignore[operator]
    assert Simulated.recorded == 0


def test_passes_follow_parameters_and_buffers_that_moved() -> None:
    learners, given = runs(lambda: ResNet(4, 6, (1, 1))), batch(5, 3, 8, 8)
    for _ in range(4):
        learners.forward(given)
    assert Simulated.recorded == 1
    other = {name: buffer + 1 for name, buffer in learners.buffers.items()}
    found = learners.forward(given, buffers=other).logits
    learners.buffers.update(other)
    assert torch.allclose(found, truth(learners, given), atol=1e-5)
    assert torch.allclose(learners.forward(given).logits, truth(learners, given), atol=1e-5)
    learners.theta = learners.theta * 2
    assert torch.allclose(learners.forward(given).logits, truth(learners, given), atol=1e-5)


def test_a_graph_of_inference_mode_serves_outside_of_it_too() -> None:
    learners, given = runs(lambda: small_net(6)), batch(5, 6)
    with torch.inference_mode():
        for _ in range(4):
            learners.forward(given)
    assert Simulated.recorded == 1
    assert torch.allclose(learners.forward(given).logits, truth(learners, given))


def test_inside_a_capture_nothing_else_is_captured() -> None:
    learners, given = runs(lambda: small_net(6)), batch(5, 6)
    for _ in range(3):
        learners.forward(given)
    graph, found = Graph(GENERATOR), list[Tensor]()
    learners._forward_graphs, Simulated.recorded = Simulated(), 0
    with Recording(graph) as streams:
        for n in (5, 9):
            found.append(learners.forward(batch(n, 6)).logits)
        streams.join()
    assert Simulated.recorded == 0
