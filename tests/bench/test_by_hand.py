"""Loops written by hand take the steps of the methods."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.bench.by_hand import PLAIN, Alone, Examples
from onepass.bench.processes import Case, middle
from onepass.engine.batch import Batch
from onepass.learners import METHODS

IMAGES, TASKS = 1000, 2


def looked_at(batch: Batch) -> Examples:
    return batch.x[0].float() / 255, batch.slots[0]


def hand_in(learner: Any, name: str, number: int) -> list[Examples]:
    """The examples of the past that a step uses, given to the learner as well."""
    memory = learner.memory
    if memory is None:
        return []
    tasks = [memory.of([task]) for task in range(TASKS)]
    if name == "gem":
        return [looked_at(task) for task in tasks]
    one = tasks[number % TASKS]
    if name != "s-gem":
        everything, _ = memory.contents()
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(TASKS * 250, generator=generator)
        chosen = order[: getattr(learner.option, "reference_batch", 0)]
        one = Batch(everything.x[:, chosen], everything.slots[:, chosen])
    memory.draw = memory.of_chosen = lambda _: one
    return [looked_at(one)]


def by_hand_as_ours(name: str, margin: float = 0.0) -> None:
    feed, fleet, learner, phase = middle(
        name, 1, TASKS, IMAGES, learning_rate=0.05, margin=margin, sensitivity=2.0
    )
    if "pull" in learner.state():  # so strong that it shows
        learner.state()["pull"].mul_(10 / learner.state()["pull"].max())
    run, start = Alone(learner), fleet.theta.clone()
    steps = 12 if learner.violations is None else 40
    for number, batch in enumerate(islice(feed.batches(phase), steps)):
        past = hand_in(learner, name, number)
        PLAIN[name].step(run, looked_at(batch), past)
        fleet.learn(learner, batch)
    assert not fleet.diverged()[0]
    if learner.violations is not None:
        assert 0 < int(learner.violations) < steps, "some steps are corrected, and some are not"

    def same(mine: list[Any], theirs: Tensor, before: Tensor | float) -> None:
        moved = (theirs - before).norm()
        assert moved > 0
        flat = torch.cat([part.detach().flatten() for part in mine])
        assert flat.sub(theirs[0]).norm() < 1e-3 * moved

    same(run.parameters, fleet.theta, start)
    for key in {"squares", "fisher", "path", "fresh", "start"} & run.state.keys():
        same(run.state[key], learner.state()[key], start if key == "start" else 0.0)


@pytest.mark.parametrize("name", PLAIN)
def test_a_loop_written_by_hand_is_the_method(name: str) -> None:
    by_hand_as_ours(name)


def test_gem_by_hand_knows_the_margin() -> None:
    by_hand_as_ours("gem", margin=0.1)


def test_every_method_of_this_stream_but_the_one_that_grows_is_written_by_hand() -> None:
    own = {name for name, found in METHODS.items() if found.learner.needs.own_classes}
    assert {*PLAIN} == METHODS.keys() - own - {"prog-nn"}


@pytest.mark.parametrize("name", ["a-gem", "gem", "s-gem"])
def test_a_loop_looks_at_as_much_of_the_past_as_the_method_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []

    def step(_: object, batch: Examples, past: list[Examples]) -> None:
        sizes.append([len(batch[1]), *(len(y) for _, y in past)])

    monkeypatch.setitem(PLAIN, name, PLAIN[name]._replace(step=step))
    assert Case(name, 1, None, TASKS, IMAGES).loop("cpu")(3) == 3
    assert sizes == 3 * [{"a-gem": [10, 256], "gem": [10, 250, 250], "s-gem": [10, 250]}[name]]
