"""Changes of a module from outside, while it learns, are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from onepass import OnePass
from tests.live.comparing import same
from tests.live.refused_calls import CLASSES, Rich, batch, in_a_second_task, refused

# ---- modules that were changed behind our back


def moved(module: Rich) -> None:
    module.to("meta")


def emptied(module: Rich) -> None:
    module.to_empty(device="meta")


def doubled(module: Rich) -> None:
    module.double()


def there_and_back(module: Rich) -> None:
    module.double().float()


def shared(module: Rich) -> None:
    module.body.weight.data = module.body.weight.data.clone()


def lent(module: Rich) -> None:
    module.share_memory()  # moves the storages themselves


def recreated(module: Rich) -> None:
    module.body.weight = nn.Parameter(module.body.weight.detach().clone())


def replaced(module: Rich) -> None:
    module.head = nn.Linear(7, CLASSES)


def enlarged(module: Rich) -> None:
    module.head = nn.Linear(7, CLASSES + 2)


def added(module: Rich) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def removed(module: Rich) -> None:
    module.body.bias = None


def frozen(module: Rich) -> None:
    module.body.requires_grad_(False)


def thawed(module: Rich) -> None:
    module.still.requires_grad_(True)


def tied(module: Rich) -> None:
    module.still.bias = module.norm.bias  # type: ignore[assignment]


def assigned(module: Rich) -> None:
    module.load_state_dict(
        {name: value.clone() for name, value in module.state_dict().items()}, assign=True
    )


TAMPERED: dict[Callable[[Rich], None], tuple[str, ...]] = {
    moved: ("moved from cpu to meta", "move it back"),
    emptied: ("moved from cpu to meta",),
    doubled: ("'still.weight'", "wrap the module anew"),
    there_and_back: ("created anew", "in place"),
    shared: ("'body.weight' was created anew", "in place"),
    lent: ("created anew", "in place"),
    recreated: ("'body.weight' was created anew", "in place"),
    replaced: ("'head.weight' was created anew",),
    enlarged: ("'head.weight' was created anew",),
    added: ("'scale' was added", "wrap"),
    removed: ("'body.bias' is gone", "put it back"),
    frozen: ("requires_grad of 'body.weight'", "change it back"),
    thawed: ("requires_grad of 'still.weight'", "change it back"),
    tied: ("",),
    assigned: ("created anew",),
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda f: f.__name__)
def test_a_module_that_was_changed_behind_our_back_is_noticed(
    tamper: Callable[[Rich], None], tmp_path: Path
) -> None:
    learner = in_a_second_task()
    assert isinstance(learner.module, Rich)
    tamper(learner.module)
    x, y = batch(seed=9)
    calls: list[Callable[[], object]] = [
        lambda: learner.observe(x, y),
        learner.end_task,
        lambda: learner.predict(x),
        lambda: learner.scores(x),
        lambda: learner.save(tmp_path / "saved"),
        lambda: learner.export(tmp_path / "exported.pt2"),
    ]
    for call in calls:
        with refused(learner, *TAMPERED[tamper]):
            call()
    assert not list(tmp_path.iterdir())


def test_what_is_put_back_is_as_good_as_before() -> None:
    learner = in_a_second_task()
    module = learner.module
    assert isinstance(module, Rich)
    head = module.head
    replaced(module)
    frozen(module)
    added(module)
    module.head = head
    module.body.requires_grad_(True)
    del module.scale
    learner.observe(*batch(seed=9))
    assert learner.steps == 6


def test_values_that_were_written_in_place_are_taken_as_they_are() -> None:
    learner = in_a_second_task("van", adam=False)
    module = learner.module
    twin = copy.deepcopy(module)
    fresh = Rich().state_dict()
    module.load_state_dict(fresh)
    twin.load_state_dict(fresh)
    assert same(dict(learner.module.state_dict()), dict(fresh))
    x, _ = batch(seed=9)
    assert torch.equal(learner.scores(x), twin.eval()(x))


def test_a_module_that_was_wrapped_again_belongs_to_the_second_wrapper() -> None:
    module = Rich()
    first = OnePass(module, learning_rate=0.1)
    second = OnePass(module, learning_rate=0.1)
    with refused(first, "created anew"):
        first.observe(*batch())
    second.observe(*batch())
