from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.errors import InputError
from onepass.feed import Feed
from onepass.learners import METHODS
from onepass.learners.icarl import ICarl, Options
from onepass.metrics import metrics
from onepass.protocol import Run, Setup, train
from onepass.recording import accuracy
from onepass.streams.base import Part, Task
from tests.toys import Normed, ToyStream, small_net

Made = tuple[Feed, Fleet, ICarl]


class Turned(ToyStream):
    """Runs meet the classes in an order of their own."""

    def tasks(self, part: Part, seed: int) -> list[Task]:
        before = super().tasks(part, seed)
        return [
            replace(before[(k + seed) % 4], slot_of_class=before[k].slot_of_class.roll(2 * seed))
            for k in range(4)
        ]


def made(
    build: Callable[[], nn.Module] = small_net,
    seeds: Sequence[int] = (1, 2, 3),
    stream: ToyStream | None = None,
    strength: Sequence[float] = (0.5, 1.0, 2.0),
    **options: Any,
) -> Made:
    """A learner on a stream of four tasks, before its first step."""
    stream = stream or Turned(ragged=True)
    feed = Feed(stream, "ev", seeds, 10)
    fleet = Fleet(build, seeds, feed.slots, [0.1] * len(seeds), prepare=stream.pool.prepare)
    columns = {"distillation": torch.tensor(strength[: len(seeds)])[:, None]}
    return feed, fleet, ICarl(fleet, columns, Options(**({"exemplars": 40} | options)), None)


def learn(one: Made, tasks: Sequence[int], skip: int = 0, stop: int | None = None) -> None:
    feed, fleet, learner = one
    for k in tasks:
        for batch in list(feed.batches(k, skip))[:stop]:
            fleet.learn(learner, batch)
        if stop is None:
            keep(one, k)
        skip = 0


def keep(one: Made, task: int) -> None:
    one[2].review(one[0].batches(task))
    one[2].end_task()


def features(fleet: Fleet, x: Tensor, run: int) -> Tensor:
    """What enters the head of a `small_net`, of length 1; `x [B, D]` as stored."""
    weight, bias = (p[run].double() for p in fleet.architecture.views(fleet.theta)[:2])
    h = torch.tanh(x.double() / 255 @ weight.T + bias)
    return h / h.square().sum(-1, keepdim=True).sqrt()


def shown(feed: Feed, task: int, slot: int, run: int) -> Tensor:
    """The training examples of a class, once each, in the order of the stream."""
    rows = [(b.x[run, :n], b.slots[run, :n]) for b in feed.batches(task) if (n := b.lengths()[run])]
    return torch.cat([x for x, _ in rows])[torch.cat([s for _, s in rows]) == slot]


def test_exemplars_are_herded_on_features_of_length_one_at_the_end_of_their_task() -> None:
    feed, fleet, learner = one = made(exemplars=37)
    for k in range(4):
        learn(one, [k])
        for r in range(3):
            for slot in (2 * k, 2 * k + 1):
                pool = shown(feed, k, slot, r)
                rows, chosen = features(fleet, pool, r), learner.x[r, slot, : learner.held[r, slot]]
                where = (chosen[:, None] == pool).all(-1)
                assert (where.sum(1) == 1).all()
                total, left = (
                    torch.zeros(5, dtype=torch.float64),
                    torch.ones(len(rows), dtype=torch.bool),
                )
                for step, best in enumerate(where.long().argmax(1).tolist(), start=1):
                    far = (rows.mean(0) - (rows + total) / step).norm(dim=1)
                    assert left[best]
                    assert far[best] < far[left].min() + 1e-6
                    total, left[best] = total + rows[best], False


@pytest.mark.parametrize("budget", [8, 9, 13, 50, 97, 1000])
def test_the_budget_is_never_exceeded_and_every_class_has_exemplars(budget: int) -> None:
    feed, _, learner = one = made(exemplars=budget)
    before = learner.x
    for k in range(4):
        keep(one, k)
        room = budget // (2 * k + 2)
        assert learner.x.shape[:2] == (3, 2 * k + 2)
        assert learner.held.max() <= learner.x.shape[2] <= room
        assert learner.held.shape == (3, 2 * k + 2)
        sizes = torch.tensor(
            [[len(shown(feed, slot // 2, slot, r)) for slot in range(2 * k + 2)] for r in range(3)]
        )
        assert torch.equal(learner.held, sizes.clamp(max=room))
        assert learner.held.min() >= 1
        assert learner.held.sum(1).max() <= budget
        if k:
            places = min(room, before.shape[2])
            assert torch.equal(
                learner.x[:, : 2 * k, :places], before[:, :, :places]
            )  # the first ones, in their order
        before = learner.x


def test_settings_beyond_all_examples_take_no_room_for_more() -> None:
    one = made(exemplars=2**31, reference_batch=2**31)
    learn(one, range(3))
    feed, _, learner = one
    assert learner.x.shape[2] <= max(max(feed.lengths(k)) for k in range(3))
    assert learner.exemplars().slots.shape[1] == learner.x.shape[1] * learner.x.shape[2]


def test_exemplars_are_training_examples_of_their_own_class_and_run_once_each() -> None:
    stream = Turned(ragged=True)
    learner = (one := made(stream=stream, exemplars=90))[2]
    learn(one, range(4))
    for r, seed in enumerate((1, 2, 3)):
        for k, task in enumerate(stream.tasks("ev", seed)):
            for slot in (2 * k, 2 * k + 1):
                kept = learner.x[r, slot, : learner.held[r, slot]]
                where = (kept[:, None] == stream.pool.x).all(-1).nonzero()[:, 1].tolist()
                assert len(where) == len(set(where)) == len(kept)
                assert set(where) <= set(task.train.tolist())
                assert max(where) < stream.pool.training
                assert (task.slot_of_class[stream.pool.classes[where]] == slot).all()


def test_a_class_without_examples_has_no_exemplars_and_is_no_answer() -> None:
    _, fleet, learner = one = made(stream=ToyStream(examples=1))  # of two classes
    for k in range(2):
        keep(one, k)
    assert learner.held.tolist() == [[1, 0, 1, 0]] * 3
    assert set(learner.exemplars().slots.flatten().tolist()) == {0, 2}
    weight, bias = fleet.architecture.views(fleet.theta)[:2]
    weight.fill_(1)
    bias.fill_(-1)  # nothing but zeros is as far from all exemplars as can be
    away = Batch(torch.zeros(3, 1, 6, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.int64))
    assert learner.scores(away)[..., :2].argmax(-1).tolist() == [[0]] * 3


def test_draws_are_uniform_over_exemplars() -> None:
    learner = (one := made(exemplars=300, reference_batch=6000))[2]
    for k in range(3):
        keep(one, k)
    drawn = learner.exemplars()
    assert len(set(learner.held.flatten().tolist())) > 3  # classes of unequal size
    for r in range(3):
        every = torch.cat(
            [learner.x[r, slot, :n] for slot, n in enumerate(learner.held[r].tolist())]
        )
        owner = torch.arange(6).repeat_interleave(learner.held[r])
        same = (drawn.x[r][:, None] == every).all(-1)
        assert (same.sum(1) == 1).all()
        assert torch.equal(owner[same.long().argmax(1)], drawn.slots[r])
        assert chisquare(same.sum(0).numpy()).pvalue > 1e-3


def test_draws_depend_on_seed_and_step_alone() -> None:
    together, alone, seen = made(), made(seeds=(2,)), []
    for one in (together, alone):
        keep(one, 0)
    learner, its = together[2], alone[2]
    assert torch.equal(its.x[0], learner.x[1])
    for step in (3, 4, 5):
        learner.fleet.step.fill_(step)
        its.fleet.step.fill_(step)
        torch.rand(5)
        drawn = learner.exemplars()
        assert torch.equal(drawn.x, learner.exemplars().x)
        assert torch.equal(drawn.x[1], its.exemplars().x[0])
        seen.extend(drawn.x)
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def distances(one: Made, x: Tensor, run: int, seen: int) -> Tensor:
    """From each example to the mean of each class's exemplars, all of length 1."""
    _, fleet, learner = one
    means = torch.stack(
        [
            features(fleet, learner.x[run, s, : learner.held[run, s]], run).mean(0)
            for s in range(2 * seen)
        ]
    )
    return (features(fleet, x, run)[:, None] - means / means.norm(dim=1, keepdim=True)).norm(dim=-1)


@pytest.mark.parametrize("everything", [False, True], ids=["its own task", "all classes"])
def test_an_answer_is_the_nearest_mean_of_exemplars(everything: bool) -> None:
    feed, fleet, learner = one = made(all_classes=everything, exemplars=300)
    others_were_nearer = 0
    for k, seen in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3)):
        if k == seen:  # the network has moved on, the exemplars are those of earlier tasks
            learn(one, [k], stop=99)
        else:
            keep(one, k)
        assert [
            accuracy(fleet, learner, feed.test(unknown)).tolist() for unknown in range(seen, 4)
        ] == [[0] * 3] * (4 - seen)
        for task in range(seen):
            test = Batch(
                torch.randint(0, 256, (3, 60, 6), dtype=torch.uint8),
                torch.randint(2 * task, 2 * task + 2, (3, 60)),
            )
            scores = learner.scores(test)
            right = fleet.competition.correct(scores, test.slots)
            for r in range(3):
                far = distances(one, test.x[r], r, seen)
                others_were_nearer += int((far.argmin(1) // 2 != task).sum())
                if not everything:
                    assert torch.allclose(scores[r, :, : 2 * seen].double(), -far, atol=1e-3)
                    far[:, torch.arange(2 * seen) // 2 != task] = torch.inf
                two = far.topk(2, largest=False).values
                sure = two[:, 1] - two[:, 0] > 1e-4
                assert sure.sum() > 50
                assert torch.equal(right[r][sure], (far.argmin(1) == test.slots[r])[sure])
    assert others_were_nearer > 100


def gradient_by_hand(
    one: Made, x: Tensor, slots: Tensor, run: int, seen: int, teacher: Tensor
) -> Tensor:
    """The gradient of the mean binary cross-entropy.

    Targets are one-hot on new outputs, and the teacher's on old ones.
    """
    _, fleet, learner = one

    def outputs(parameters: list[Tensor]) -> Tensor:
        w, b, head, bias = parameters
        return torch.sigmoid(torch.tanh(x.double() / 255 @ w.T + b) @ head.T + bias)

    at, was = (
        [p[run].double().requires_grad_() for p in fleet.architecture.views(theta)]
        for theta in (fleet.theta, teacher)
    )
    found, old, strength = (
        outputs(at),
        outputs(was).detach(),
        float(learner.columns["distillation"][run]),
    )
    total = torch.zeros((), dtype=torch.float64)
    for y in range(2 * seen + 2):
        wanted, weight = (old[:, y], strength) if y < 2 * seen else ((slots == y).double(), 1.0)
        total = (
            total
            - weight * (wanted * found[:, y].log() + (1 - wanted) * (1 - found[:, y]).log()).mean()
        )
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, at)]).float()


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_the_gradient_is_that_of_the_formula(seen: int) -> None:
    feed, fleet, learner = one = made(reference_batch=4)
    learn(one, range(seen))
    teacher = fleet.theta.clone()
    learn(one, [seen], stop=2)
    batches = list(feed.batches(seen))
    for batch in (batches[1], batches[-1]):  # full, and rows of unequal size
        drawn = learner.exemplars() if seen else Batch(batch.x[:, :0], batch.slots[:, :0])
        g = learner.direction(batch)
        for r, n in enumerate(batch.lengths()):
            if n == 0:
                assert (g[r] == 0).all()
                continue
            x, slots = (
                torch.cat([batch.x[r, :n], drawn.x[r]]),
                torch.cat([batch.slots[r, :n], drawn.slots[r]]),
            )
            assert torch.allclose(
                g[r], gradient_by_hand(one, x, slots, r, seen, teacher), atol=1e-5
            )
            assert g[r].norm() > 0.1
            for part in fleet.architecture.views(g[r])[2:]:  # the head
                assert (part[: 2 * seen + 2] != 0).all()
                assert (part[2 * seen + 2 :] == 0).all(), "outputs of the future"


def test_the_teacher_is_the_network_at_the_end_of_the_last_task_statistics_and_all() -> None:
    feed, fleet, learner = one = made(Normed)
    batch = next(feed.batches(2))
    learn(one, [0])
    for k in (1, 2):
        old = slice(0, 2 * k)
        taught = fleet.forward(batch).logits.sigmoid()[..., old]
        learn(one, [k], stop=2)
        assert torch.equal(learner.targets(batch)["wanted"][..., old], taught)
        for other in (
            fleet.forward(batch),
            fleet.forward(batch, theta=learner.teacher),
        ):  # the network of now, or its statistics
            assert not torch.allclose(other.logits.sigmoid()[..., old], taught, atol=1e-4)
        learn(one, [k], skip=2)


def test_looking_back_and_answering_change_nothing_of_the_network() -> None:
    feed, fleet, learner = one = made(Normed)
    for k in range(2):
        learn(one, [k], stop=3)
        before, random = (
            {name: t.clone() for name, t in fleet.state().items()},
            torch.get_rng_state(),
        )
        for look in (
            lambda k=k: learner.review(feed.batches(k)),
            learner.end_task,
            lambda k=k: learner.scores(feed.test(k)),
            learner.exemplars,
        ):
            look()
            assert all(torch.equal(t, before[name]) for name, t in fleet.state().items())
            assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("build", "task", "batches"), [(small_net, 1, 0), (small_net, 2, 2), (Normed, 2, 2)]
)
def test_it_resumes_bit_identically(
    build: Callable[[], nn.Module], task: int, batches: int
) -> None:
    one, other = made(build), made(build)
    learn(one, range(task))
    learn(one, [task], stop=batches)
    for part, its in ((one[2], other[2]), (one[1], other[1])):
        its.restore({name: t.clone() for name, t in part.state().items()}, part.counters())
    for both in (one, other):
        learn(both, range(task, 4), skip=batches)
    for part, its in zip(one[1:], other[1:], strict=True):
        assert all(torch.equal(tensor, its.state()[name]) for name, tensor in part.state().items())
    assert torch.equal(one[2].scores(one[0].test(0)), other[2].scores(one[0].test(0)))


def test_there_is_no_learning_curve_but_accuracy_and_forgetting() -> None:
    rows = [Run(seed, {"learning_rate": 0.3, "distillation": 1.0}) for seed in (0, 1)]
    for record in train(
        Turned(), "ev", METHODS["icarl"], rows, Setup(hidden=(16,)), Options(exemplars=80)
    ):
        found = metrics(record)
        assert (found.LCA_10, found.LCA_10_trapezoid) == (None, None)
        assert found.A_T > 0.8  # type: ignore[operator]
        assert -1 < found.F_T < 0.2  # type: ignore[operator]


def test_streams_and_budgets_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="classes of their own"):
        made(stream=ToyStream(shared=True))
    with pytest.raises(InputError, match="with 8 classes, exemplars=7 is not enough"):
        made(exemplars=7)
