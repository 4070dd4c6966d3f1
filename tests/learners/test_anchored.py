"""What every regularising method does.

A pull towards the past, importances that leave no trace in the model, a second pass over a task.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Build, Fleet
from onepass.engine.slots import Slots
from onepass.feed import Feed
from onepass.learners import METHODS
from onepass.learners import ewc as ewc_module
from onepass.learners.anchored import Anchored, examples, scaled, singly
from onepass.learners.ewc import Ewc
from onepass.learners.mas import Mas
from onepass.learners.mas import Options as MasOptions
from onepass.learners.pi import Options as PiOptions
from onepass.learners.pi import Pi
from onepass.learners.rwalk import Options as RWalkOptions
from onepass.learners.rwalk import RWalk
from onepass.protocol import Run, Setup, train
from onepass.streams.base import separate_heads, shared_heads
from tests.learners.oracles import learn, task, task_batch, uneven
from tests.toys import Dropped, Normed, ToyStream, fleet_of, small_net

CPU = torch.device("cpu")
CASES: dict[str, tuple[type[Anchored], object]] = {
    "ewc": (Ewc, ewc_module.Options()),
    "ewc, labels of the data": (Ewc, ewc_module.Options(labels="data", normalise=True)),
    "ewc, moving": (Ewc, ewc_module.Options(fisher="moving-average", normalise=True)),
    "pi": (Pi, PiOptions()),
    "mas": (Mas, MasOptions()),
    "mas, per batch": (Mas, MasOptions(per_batch=True)),
    "rwalk": (RWalk, RWalkOptions(fisher_every=4)),
}
every_case = pytest.mark.parametrize("case", CASES)
every_method = pytest.mark.parametrize("case", ["ewc", "ewc, moving", "pi", "mas", "rwalk"])


def make(case: str, fleet: Fleet, strength: float = 0.5) -> Anchored:
    kind, options = CASES[case]
    return kind(fleet, {"strength": torch.full((fleet.runs, 1), strength)}, options, None)


def finish(case: str, learner: Anchored, batches: list[Batch]) -> None:
    """What the protocol does after the last batch of a task."""
    kind, options = CASES[case]
    if kind.needs_with(options).second_pass:
        learner.review(iter(batches))
    learner.end_task()


@every_case
@pytest.mark.parametrize("build", [Normed, Dropped])
def test_importances_leave_no_trace_in_the_model_its_buffers_and_its_random_draws(
    case: str, build: Build
) -> None:
    learner = make(case, fleet_of(build))
    learn(learner, 0, uneven())
    before, random = (
        {name: t.clone() for name, t in learner.fleet.state().items()},
        torch.get_rng_state(),
    )
    finish(case, learner, uneven())
    assert torch.equal(random, torch.get_rng_state())
    for name, tensor in learner.fleet.state().items():
        assert torch.equal(tensor, before[name]), name
    assert (learner.pull > 0).any(1).all()


@pytest.mark.parametrize("case", ["ewc", "mas"])
def test_a_second_pass_before_the_first_full_batch_does_not_hide_random_layers(case: str) -> None:
    """Dropout is still the run's own in batches of unequal rows after a second pass."""
    learner, random = make(case, fleet_of(Dropped)), torch.get_rng_state()
    short = task_batch(sizes=(7, 4, 2))
    learn(learner, 0, [short])
    finish(case, learner, [short, task_batch()])
    learn(learner, 1, [task_batch(1, sizes=(7, 4, 2))])
    assert torch.equal(random, torch.get_rng_state())


@every_case
@pytest.mark.parametrize("steps", [1, 6])
def test_importances_are_not_zero_after_a_task_however_short(case: str, steps: int) -> None:
    learner, batches = make(case, fleet_of(runs=1)), task(0, steps, runs=1)
    learn(learner, 0, batches)
    finish(case, learner, batches)
    assert (learner.pull > 0).any(1).all()
    assert (learner.pull >= 0).all()


@every_case
def test_a_row_equals_the_same_run_alone(case: str) -> None:
    together, alone = (
        make(case, fleet_of()),
        make(case, Fleet(small_net, [11], Slots(separate_heads(4, 2)), [0.1])),
    )
    for number in range(2):
        batches = uneven(number)
        mine = [
            Batch(b.x[1:2, : b.lengths()[1]], b.slots[1:2, : b.lengths()[1]], task=number)
            for b in batches
        ]
        for learner, seen in ((together, batches), (alone, mine)):
            learn(learner, number, seen)
            finish(case, learner, seen)
        assert torch.allclose(together.fleet.theta[1], alone.fleet.theta[0], atol=1e-5)
        for name, tensor in together.state().items():
            assert torch.allclose(
                tensor[1].float(), alone.state()[name][0].float(), rtol=1e-3, atol=1e-5
            ), name


@every_method
def test_without_strength_it_is_plain_sgd_and_each_row_has_a_strength_of_its_own(case: str) -> None:
    learner = make(case, fleet_of(), strength=2.0)
    learner.columns["strength"][1] = 0
    plain = learner.fleet.theta.clone()
    for number in range(2):
        batches = task(number, 3)
        for batch in batches:
            plain -= 0.1 * learner.fleet.grad(batch, theta=plain)[0]
        learn(learner, number, batches)
        if number == 0:
            assert torch.allclose(
                learner.fleet.theta, plain, atol=1e-6
            )  # no pull in the first task
        finish(case, learner, batches)
    assert torch.allclose(learner.fleet.theta[1], plain[1], atol=1e-6)
    assert (learner.pull[1] == 0).all()
    assert (learner.fleet.theta[0] - plain[0]).abs().max() > 2e-5


@every_method
def test_the_protocol_shows_it_every_example_of_a_task_once_more_before_the_task_ends(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = CASES[case]
    looks: list[list[Batch]] = []
    ends: list[int] = []
    begin_review, look_again, end_task = kind.begin_review, kind.review_batch, kind.end_task

    def began(self: Anchored) -> None:
        looks.append([])
        assert int(self.fleet.step.max()) == 2 * len(looks)
        begin_review(self)

    def looked(self: Anchored, batch: Batch) -> None:
        looks[-1].append(batch)
        look_again(self, batch)

    def ended(self: Anchored) -> None:
        ends.append(len(looks))
        end_task(self)
        assert (self.pull > 0).any(1).all()

    monkeypatch.setattr(kind, "begin_review", began)
    monkeypatch.setattr(kind, "review_batch", looked)
    monkeypatch.setattr(kind, "end_task", ended)
    name = next(name for name, method in METHODS.items() if method.learner is kind)
    runs = [Run(3, {"learning_rate": 0.1, "strength": 0.5})]
    train(
        ToyStream(examples=13),
        "ev",
        METHODS[name],
        runs,
        Setup(hidden=(5,)),
        options,
        evaluate=False,
    )
    if not kind.needs_with(options).second_pass:
        assert (len(looks), len(ends)) == (0, 4)
        return
    assert ends == [1, 2, 3, 4]
    feed = Feed(ToyStream(examples=13), "ev", [3], 10)
    for number, seen in enumerate(looks):
        expected = list(feed.batches(number))
        assert torch.equal(torch.cat([b.x for b in seen], 1), torch.cat([b.x for b in expected], 1))
        assert torch.equal(
            torch.cat([b.slots for b in seen], 1), torch.cat([b.slots for b in expected], 1)
        )


def test_the_pull_is_the_gradient_of_the_penalty_without_a_half() -> None:
    learner, batch = make("pi", fleet_of(), strength=3.0), task_batch()
    g = learner.fleet.grad(batch)[0].clone()
    assert torch.equal(learner.direction(batch), g)
    importance, anchor = torch.rand_like(g), learner.fleet.theta.clone()
    learner.protect(importance)
    learner.fleet.theta += torch.randn_like(g)
    theta = learner.fleet.theta.clone().requires_grad_()
    penalty = 3.0 * (importance * (theta - anchor).square()).sum()
    expected = learner.fleet.grad(batch)[0] + torch.autograd.grad(penalty, theta)[0]
    assert torch.allclose(learner.direction(batch), expected, rtol=1e-5, atol=1e-5)


def test_scaling_is_over_a_whole_row_and_a_constant_row_vanishes() -> None:
    importance = torch.rand(3, 50) * torch.tensor([[1e-6], [1.0], [1e6]])
    importance[1] = 4.0
    found = scaled(importance)
    assert found.amin(1).tolist() == [0, 0, 0]
    assert found.amax(1).tolist() == [1, 0, 1]
    for r in (0, 2):
        order = importance[r].argsort()
        assert (found[r][order].diff() >= 0).all()
        assert torch.allclose(
            found[r] * (importance[r].max() - importance[r].min()) + importance[r].min(),
            importance[r],
            rtol=1e-4,
        )


def test_singly_every_example_of_every_run_comes_once_and_in_order() -> None:
    batches = uneven()
    ones = [one for batch in batches for one in singly(batch)]
    assert all(one.x.shape[1] == 1 and one.slots.shape[1] == 1 for one in ones)
    assert sum((examples(one, torch.zeros(1)) for one in ones), torch.zeros(3, 1)).tolist() == [
        [11],
        [9],
        [8],
    ]
    for run, count in enumerate((11, 9, 8)):
        mine = [one for one in ones if one.lengths()[run]]
        assert len(mine) == count
        expected = torch.cat([b.x[run, : b.lengths()[run]] for b in batches])
        assert torch.equal(torch.stack([one.x[run, 0] for one in mine]), expected)
        assert [int(one.slots[run, 0]) for one in mine] == [
            s for b in batches for s in b.slots[run, : b.lengths()[run]].tolist()
        ]
    assert all(one.task == 0 for one in ones)


LAYOUTS = {
    "a head a task": Slots(separate_heads(3, 2)),
    "shared": Slots(shared_heads(3, 4)),
    "ragged": Slots(((0, 1, 2), (3, 4))),
    "shuffled": Slots(((4, 0), (3, 1), (2, 5))),
    "union": Slots(((0, 1, 2), (3, 4)), union=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_are_drawn_by_the_probabilities_of_the_slots_that_compete_in_the_loss(
    layout: str,
) -> None:
    slots, count = LAYOUTS[layout], 4000
    for own in slots.table:
        logits, uniform = (
            1.5 * torch.randn(slots.count),
            torch.rand(2, count // 2, dtype=torch.float64),
        )
        given = torch.full((2, count // 2), own[-1])
        drawn = slots.on(CPU).sample(logits.expand(2, count // 2, -1), given, uniform)
        rivals = list(range(slots.count)) if slots.union else list(own)
        likely = logits[rivals].softmax(0) * count
        seen = torch.bincount(drawn.flatten(), minlength=slots.count)
        assert drawn.shape == given.shape
        assert int(seen[rivals].sum()) == count
        assert (
            chisquare(
                seen[rivals].numpy(),
                likely.double().numpy() * (count / float(likely.double().sum())),
            ).pvalue
            > 1e-4
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_extreme_draws_are_still_slots_of_the_task(layout: str, uniform: float) -> None:
    slots = LAYOUTS[layout]
    logits = torch.randn(200, slots.count)
    for own in slots.table:
        drawn = slots.on(CPU).sample(
            logits, torch.full((200,), own[0]), torch.full((200,), uniform, dtype=torch.float64)
        )
        rivals = range(slots.count) if slots.union else own
        assert set(drawn.tolist()) == {rivals[0] if uniform == 0 else rivals[-1]}


def rows_of(logits: Tensor, slots: Tensor, table: tuple[tuple[int, ...], ...]) -> list[list[float]]:
    return [
        x[list(next(row for row in table if int(s) in row))].tolist()
        for x, s in zip(logits, slots, strict=True)
    ]


@pytest.mark.parametrize("layout", ["a head a task", "ragged", "shuffled", "union"])
def test_outputs_are_those_of_the_examples_own_task_whatever_competes_in_the_loss(
    layout: str,
) -> None:
    slots = LAYOUTS[layout]
    logits, given = torch.randn(2, 9, slots.count), torch.randint(0, slots.count, (2, 9))
    found, width = slots.on(CPU).outputs(logits, given), max(len(row) for row in slots.table)
    for r in range(2):
        expected = [
            row + [0.0] * (width - len(row)) for row in rows_of(logits[r], given[r], slots.table)
        ]
        assert found[r].tolist() == expected


def test_outputs_of_a_shared_head_have_a_finite_slope_where_tasks_are_ragged() -> None:
    logits = torch.randn(5, 4, requires_grad=True)
    assert torch.equal(
        Slots(shared_heads(3, 4)).on(CPU).outputs(logits, torch.zeros(5, dtype=torch.int64)), logits
    )
    ragged = torch.randn(3, 5, requires_grad=True)
    value = LAYOUTS["ragged"].on(CPU).outputs(ragged, torch.tensor([4, 3, 1])).square().sum()
    slope = torch.autograd.grad(value, ragged)[0]
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [1, 1, 1, 0, 0]])
    assert torch.allclose(slope, 2 * ragged * mask)
