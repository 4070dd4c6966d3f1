"""The variants of methods that explain published numbers are what they say they are."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onepass.engine import step_graphs
from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.feed import Feed
from onepass.learners import Method
from onepass.learners.agem import project
from onepass.learners.icarl import Options
from onepass.learners.rehearsal import Reference
from onepass.memory import FleetMemory
from onepass.protocol import train
from tests.engine.simulated_cuda import Simulated
from tests.toys import Normed, ToyStream, small_net
from tests.training import SETUP, Ends, digits, runs, same, same_bits
from variants import VARIANTS, GemICarl, UnionAGem

SEEDS = (1, 2)


def fleet_and_feed(build: Callable[[], nn.Module] = small_net) -> tuple[Fleet, Feed]:
    stream = ToyStream(examples=40)
    feed = Feed(stream, "ev", SEEDS, 10)
    return Fleet(build, SEEDS, feed.slots, [0.1, 0.1], prepare=stream.pool.prepare), feed


def outputs(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Of a `small_net`, by hand; `x [B, D]` as stored."""
    w, b, head, bias = parameters
    return torch.tanh(x.double() / 255 @ w.T + b) @ head.T + bias


def parameters(fleet: Fleet, run: int) -> list[Tensor]:
    views = fleet.architecture.views(fleet.theta)
    return [p[run].detach().double().requires_grad_() for p in views]


def gradient(loss: Tensor, at: list[Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, at)])


def own_task(logits: Tensor, slots: Tensor) -> Tensor:
    """The outputs of the two classes of each example's task."""
    first = slots // 2 * 2
    return torch.stack([logits.gather(1, (first + place)[:, None])[:, 0] for place in (0, 1)], 1)


def own_loss(at: list[Tensor], x: Tensor, slots: Tensor) -> Tensor:
    return cross_entropy(own_task(outputs(at, x), slots), slots % 2)


def test_in_the_union_all_past_classes_and_no_others_compete_in_the_reference_loss() -> None:
    fleet, feed = fleet_and_feed()
    learner = UnionAGem(fleet, {}, Reference(100), FleetMemory(fleet, 4, 10))
    conflicts = 0
    for task in range(4):
        learner.begin_task(task)
        for batch in feed.batches(task):
            reference = learner.episodic.draw(100)
            points = [parameters(fleet, r) for r in range(2)]
            before = learner.violations.clone()
            found = learner.direction(batch).clone()
            for r, at in enumerate(points):
                g = gradient(own_loss(at, batch.x[r], batch.slots[r]), at)
                if reference is not None:
                    past = outputs(at, reference.x[r])[:, : 2 * task]
                    g_ref = gradient(cross_entropy(past, reference.slots[r]), at)
                    g, violated = (t[0] for t in project(g[None], g_ref[None]))
                    assert violated == learner.violations[r] - before[r]
                    conflicts += int(violated)
                assert torch.allclose(found[r].double(), g, atol=1e-5)
            fleet.theta -= 0.5 * found
        learner.end_task()
    assert conflicts > 4


def icarl_after(
    tasks: int, build: Callable[[], nn.Module] = small_net
) -> tuple[Fleet, Feed, GemICarl]:
    fleet, feed = fleet_and_feed(build)
    columns = {"distillation": torch.tensor([[0.5], [2.0]])}
    learner = GemICarl(fleet, columns, Options(exemplars=32), None)
    for task in range(tasks):
        for batch in feed.batches(task):
            fleet.learn(learner, batch)
        learner.review(feed.batches(task))
        learner.end_task()
    return fleet, feed, learner


def test_icarl_of_gem_distils_one_exemplar_of_each_past_class_in_the_softmax_of_its_task() -> None:
    fleet, feed, learner = icarl_after(2)
    # At the end of the last task.
    was = [[p.detach() for p in parameters(fleet, r)] for r in range(2)]
    first, second = list(feed.batches(2))[:2]
    fleet.learn(learner, first)
    drawn = [learner.one_a_class(task) for task in range(2)]
    assert [batch.slots.tolist() for batch in drawn] == [[[0, 1]] * 2, [[2, 3]] * 2]
    found = learner.direction(second)
    for r, strength in enumerate((0.5, 2.0)):
        at = parameters(fleet, r)
        loss = own_loss(at, second.x[r], second.slots[r])
        for past in drawn:
            now, then = (own_task(outputs(p, past.x[r]), past.slots[r]) for p in (at, was[r]))
            loss = loss - strength * (then.softmax(1) * now.log_softmax(1)).sum(1).mean()
        assert torch.allclose(found[r].double(), gradient(loss, at), atol=1e-5)


def test_icarl_of_gem_keeps_what_is_said_in_training_of_a_class_alone() -> None:
    fleet, _, learner = icarl_after(2, Normed)
    before = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
    learner.seen -= 1
    learner.end_task()  # once more, and nothing else
    for r in range(2):
        module = Normed().train()
        views = fleet.architecture.views(fleet.theta[r])
        values = dict(zip(fleet.architecture.names, views, strict=True))
        module.load_state_dict(values, strict=False)
        module.load_state_dict({name: buffer[r] for name, buffer in before.items()}, strict=False)
        for c in range(4):
            held = int(learner.held[r, c])
            said = module(learner.x[r, c, :held] / 255)[:, c // 2 * 2 :][:, :2]
            assert torch.allclose(learner.taught[r, c, :held], said.softmax(1), atol=1e-5)
        mean, was = (kept["norm.running_mean"][r] for kept in (fleet.buffers, before))
        assert torch.allclose(mean, module.get_buffer("norm.running_mean"), atol=1e-6)
        assert not torch.allclose(mean, was, atol=1e-4)


def test_icarl_of_gem_answers_by_the_nearest_mean_of_outputs_and_herds_those_of_the_task() -> None:
    fleet, feed, learner = icarl_after(2)
    for r in range(2):
        at = [p.detach() for p in parameters(fleet, r)]
        exemplars = [learner.x[r, c, : learner.held[r, c]] for c in range(4)]
        means = torch.stack([outputs(at, of_class).mean(0) for of_class in exemplars])
        test = feed.test(0)
        far = torch.cdist(outputs(at, test.x[r]), means)
        scores = learner.scores(Batch(test.x, test.slots))[r, :, :4]
        assert torch.allclose(scores.double(), -far, atol=1e-4)
        shown = [(b.x[r], b.slots[r]) for b in feed.batches(1)]
        x, slots = (torch.cat(parts) for parts in zip(*shown, strict=True))
        pool = outputs(at, x[slots == 3])[:, 2:4]  # of its own task, which was learnt last
        nearest = (pool - pool.mean(0)).norm(dim=1).argmin()
        assert torch.equal(learner.x[r, 3, 0], x[slots == 3][nearest])


@pytest.mark.parametrize(
    "found", [found for variants in VARIANTS.values() for found in variants.values()]
)
def test_replayed_steps_end_where_eager_ones_do(
    found: Method, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_graphs, "STRETCH", 5)
    data = digits("split-digits", 61)
    eager, captured = Ends(), Ends()
    records = train(data, "cv", found, runs(found), SETUP, keeper=eager)
    monkeypatch.setattr("onepass.protocol.StepGraphs", Simulated)
    monkeypatch.setattr(Simulated, "launched", 0)
    with caplog.at_level(logging.WARNING):
        same(records, train(data, "cv", found, runs(found), SETUP, keeper=captured))
    assert not caplog.records
    assert Simulated.launched > 5
    same_bits(eager, captured)
