"""Modules, settings and optimizers that make no sense are refused before anything is learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from onepass import InputError, Memory, OnePass
from tests.live.comparing import same
from tests.live.refused_calls import CLASSES, Rich, batch, check_sentence, refused
from tests.toys import FEATURES, small_net

# ---- memories


RATE = {"learning_rate": 0.1}


# ---- wrapping


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5).double(), nn.Linear(5, CLASSES))


def not_finite() -> nn.Module:
    module = small_net(CLASSES)
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan  # type: ignore[index]
    return module


def complex_numbers() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).to(torch.complex64)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: torch.relu, ("nn.Module", "builtin")),
        (lambda: nn.Linear, ("nn.Module", "type")),
        (nn.ReLU, ("no trainable parameters",)),
        (lambda: nn.Linear(3, 2).requires_grad_(False), ("no trainable parameters",)),
        (lambda: nn.Sequential(nn.LazyLinear(5)), ("'0.weight'", "no shape yet", "one batch")),
        (mixed, ("float32", "float64", "convert")),
        (not_finite, ("'0.weight' is not finite", "initialise")),
        (complex_numbers, ("complex", "real")),
        (lambda: nn.Linear(3, 2, device="meta"), ("meta",)),
    ],
)
def test_a_module_that_cannot_learn_is_refused(
    module: Callable[[], Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        OnePass(module(), learning_rate=0.1)
    check_sentence(caught.value, words)


SETTINGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("agem", RATE, ("unknown method 'agem'", "did you mean 'a-gem'")),
    ("quantum", RATE, ("unknown method 'quantum'",)),
    ("prog-nn", RATE, ("prog-nn", "network of its own", "choose another")),
    ("multi-task", RATE, ("multi-task", "all tasks at once", "choose another")),
    ("gem", RATE | {"task_free": True}, ("gem needs task boundaries", "a-gem")),
    ("s-gem", RATE | {"task_free": True}, ("task boundaries",)),
    ("ewc", RATE | {"task_free": True}, ("task boundaries",)),
    ("icarl", RATE | {"task_free": True}, ("task boundaries",)),
    ("icarl", RATE, ("classes of each task", "tasks=")),
    ("icarl", RATE | {"tasks": [[0, 1]], "loss": mse_loss}, ("classes of each task",)),
    ("icarl", RATE | {"tasks": [[0, 1], [0, 1]]}, ("icarl", "classes of their own")),
    ("icarl", RATE | {"tasks": [[0, 1], [2, 3]], "exemplars": 3}, ("exemplar", "exemplars=3")),
    ("ewc", RATE | {"loss": nn.functional.mse_loss}, ("ewc", "labels='data'")),
    ("a-gem", {}, ("learning_rate", "optimizer", "one of them")),
    ("a-gem", {"learning_rate": 0}, ("learning rate", "above 0")),
    ("a-gem", {"learning_rate": -0.1}, ("learning rate", "-0.1")),
    ("a-gem", {"learning_rate": float("nan")}, ("learning rate", "nan")),
    ("a-gem", {"learning_rate": float("inf")}, ("learning rate", "inf")),
    ("a-gem", {"learning_rate": "fast"}, ("learning rate", "fast")),
    ("a-gem", {"learning_rate": True}, ("learning rate", "True")),
    ("a-gem", {"learning_rate": 1e39}, ("learning rate",)),
    ("a-gem", RATE | {"reference_bach": 3}, ("'reference_bach'", "did you mean 'reference_batch'")),
    ("a-gem", RATE | {"strength": 3}, ("setting of a-gem 'strength'",)),
    ("a-gem", RATE | {"lr": 3}, ("setting of a-gem 'lr'",)),
    ("a-gem", RATE | {"reference_batch": 0}, ("reference_batch", "at least 1")),
    ("er", RATE | {"reference_batch": 0}, ("reference_batch", "at least 1")),
    ("a-gem", RATE | {"reference_batch": -3}, ("reference_batch", "-3")),
    ("a-gem", RATE | {"reference_batch": 2.5}, ("reference_batch", "2.5")),
    ("a-gem", RATE | {"reference_batch": "all"}, ("reference_batch", "all")),
    ("a-gem", RATE | {"reference_batch": True}, ("reference_batch", "True")),
    ("a-gem", RATE | {"reference_moves_buffers": 1}, ("reference_moves_buffers", "1")),
    ("ewc", RATE | {"strength": -1}, ("strength", "-1")),
    ("ewc", RATE | {"strength": float("nan")}, ("strength", "nan")),
    ("ewc", RATE | {"strength": "strong"}, ("strength", "strong")),
    ("ewc", RATE | {"fisher": "moving average"}, ("fisher", "moving average", "moving-average")),
    ("ewc", RATE | {"labels": "modell"}, ("labels", "modell", "model")),
    ("ewc", RATE | {"fisher": 3}, ("fisher", "3")),
    ("ewc", RATE | {"fisher": "moving-average", "fisher_every": 0}, ("fisher_every",)),
    ("rwalk", RATE | {"fisher_every": 0}, ("fisher_every",)),
    ("pi", RATE | {"damping": 0.0}, ("damping", "above 0")),
    ("pi", RATE | {"damping": float("nan")}, ("damping",)),
    ("rwalk", RATE | {"damping": float("inf")}, ("damping",)),
    ("gem", RATE | {"ridge": float("nan")}, ("ridge",)),
    ("gem", RATE | {"margin": -0.5}, ("margin", "-0.5")),
    ("a-gem", RATE | {"loss": "mse"}, ("unknown loss 'mse'", "cross-entropy")),
    ("a-gem", RATE | {"loss": None}, ("loss",)),
    ("a-gem", RATE | {"loss": 3}, ("loss",)),
    ("a-gem", RATE | {"precision": "bf16"}, ("unknown precision 'bf16'", "bfloat16")),
    ("a-gem", RATE | {"precision": "float16"}, ("unknown precision", "bfloat16")),
    ("a-gem", RATE | {"precision": None}, ("precision",)),
    ("a-gem", RATE | {"precision": torch.bfloat16}, ("precision",)),
    ("a-gem", RATE | {"tasks": []}, ("tasks", "classes of each task")),
    ("a-gem", RATE | {"tasks": [[]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [[0, 0]]}, ("tasks", "each once")),
    ("a-gem", RATE | {"tasks": [[-1, 0]]}, ("tasks", "from 0")),
    ("a-gem", RATE | {"tasks": [[0, 1], [1, 2]]}, ("overlap",)),
    ("a-gem", RATE | {"tasks": [0, 1]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": 2}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [["cat", "dog"]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [[0.5, 1]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": {1.5: [0, 1]}}, ("task",)),
    ("a-gem", RATE | {"tasks": [[0, 1]], "task_free": True}, ("task-free", "not both")),
    ("a-gem", RATE | {"grow": "fc"}, ("'fc'", "choose one of 0, 2")),
    ("a-gem", RATE | {"grow": "1"}, ("'1'",)),
    ("a-gem", RATE | {"grow": True, "loss": nn.functional.mse_loss}, ("classes", "grow")),
    ("a-gem", RATE | {"memory": Memory(policy="ring"), "loss": mse_loss}, ("ring", "reservoir")),
    ("a-gem", RATE | {"memory": Memory(policy="ring"), "task_free": True}, ("ring", "task-free")),
    ("a-gem", RATE | {"memory": 100}, ("memory",)),
    ("a-gem", RATE | {"memory": {"per_task": 3}}, ("memory",)),
    ("a-gem", RATE | {"seed": "zero"}, ("seed",)),
    ("a-gem", RATE | {"seed": None}, ("seed",)),
    ("a-gem", RATE | {"seed": 1.5}, ("seed",)),
    ("a-gem", RATE | {"seed": 2**70}, ("seed",)),
    ("a-gem", RATE | {"watch": 5}, ("watch",)),
    ("a-gem", RATE | {"watch": [print, 5]}, ("watch", "int")),
    ("a-gem", RATE | {"watch_every": 0}, ("watch_every", "above 0")),
    ("a-gem", RATE | {"watch_every": 1.5}, ("watch_every", "1.5")),
    ("a-gem", RATE | {"autosave": 5}, ("autosave",)),
    ("a-gem", RATE | {"autosave_every": 0}, ("autosave_every", "above 0")),
    ("a-gem", {"optimizer": "adam"}, ("optimizer", "str")),
]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    SETTINGS,
    ids=[f"{method} {' '.join(given)}" for method, given, _ in SETTINGS],
)
def test_settings_that_make_no_sense_are_refused(
    method: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    module = small_net(CLASSES)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(InputError) as caught:
        OnePass(module, method, **settings)
    check_sentence(caught.value, words)
    assert same(dict(before), dict(module.state_dict()))
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("method", [3, None, ["a-gem"]])
def test_a_method_that_is_no_name_is_refused(method: Any) -> None:
    with pytest.raises(InputError) as caught:
        OnePass(small_net(), method, learning_rate=0.1)
    check_sentence(caught.value, ("method",))


def test_optimizers_that_cannot_drive_the_module_are_refused() -> None:
    module = small_net()
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, small_net()))
    several_passes = torch.optim.LBFGS(module.parameters())
    cases: list[tuple[torch.optim.Optimizer, dict[str, Any], tuple[str, ...]]] = [
        (other, {}, ("not the module's", "module.parameters()")),
        (several_passes, {}, ("LBFGS", "several times", "choose another")),
        (mine, RATE, ("one of them",)),
    ]
    for optimizer, settings, words in cases:
        with pytest.raises(InputError) as caught:
            OnePass(module, optimizer=optimizer, **settings)
        check_sentence(caught.value, words)


def test_a_layer_that_cannot_grow_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    parametrised = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    still = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    convolution = nn.Sequential(nn.Conv2d(1, 1, 1))
    for module, word in (
        (tied, "untie"),
        (parametrised, "parametrised"),
        (still, "frozen"),
        (convolution, "no nn.Linear"),
    ):
        with pytest.raises(InputError) as caught:
            OnePass(module, learning_rate=0.1, grow=True)
        check_sentence(caught.value, (word,))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pi", {"damping": 0.0}),
        ("icarl", {"tasks": [[0, 1], [0, 1]]}),
        ("a-gem", {"watch": [5]}),
        ("a-gem", {"grow": "fc"}),
        ("nothing", {}),
    ],
)
def test_a_wrapper_that_could_not_be_made_leaves_the_one_there_is_alone(
    method: str, settings: dict[str, Any]
) -> None:
    module = small_net(CLASSES)
    learner = OnePass(module, learning_rate=0.1)
    learner.observe(*batch())
    with pytest.raises(InputError):
        OnePass(module, method, learning_rate=0.1, **settings)
    learner.observe(*batch(seed=1))
    assert learner.steps == 2


def test_what_is_not_there_yet_cannot_be_exported(tmp_path: Path) -> None:
    learner = OnePass(small_net(), learning_rate=0.1)
    with refused(learner, "nothing to export", "observe a batch"):
        learner.export(tmp_path / "early.pt2")
    assert not list(tmp_path.iterdir())


def test_icarl_has_no_answer_before_its_first_task_has_ended() -> None:
    learner = OnePass(Rich(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    with refused(learner, "no answer", "end_task()"):
        learner.predict(x, task=0)
