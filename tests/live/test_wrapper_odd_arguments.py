"""Whatever a caller passes for an argument works, or is refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onepass import InputError, OnePass
from onepass.errors import MOST
from tests.live.odd_values import odd_values
from tests.live.refused_calls import CLASSES, batch, check_sentence
from tests.toys import FEATURES

RATE = {"learning_rate": 0.1}


def net() -> nn.Module:
    """It is not traced: there are hundreds of them."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, CLASSES))


def works_or_is_one_sentence(call: Callable[[], Any]) -> bool:
    """Whether it works; anything but one sentence is an error."""
    try:
        call()
    except InputError as error:
        refused = error
    else:
        return True
    check_sentence(refused, ())
    assert len(str(refused)) <= MOST
    return False


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "odd").mkdir()
    monkeypatch.chdir(tmp_path)
    return odd_values(tmp_path / "odd")


def some_steps(module: Any, method: Any, settings: dict[str, Any]) -> None:
    learner = OnePass(module, method, **settings)
    learner.observe(*batch())
    if not learner.task_free:
        learner.end_task()
    learner.observe(*batch(seed=1))
    learner.predict(batch()[0])


WORKING = {  # of each argument, where it is not obvious
    "method": set(),
    "learning_rate": {"NumPy float"},
    "optimizer": set(),
    "loss": set(),
    "tasks": {"None"},
    "task_free": {"True", "False", "NumPy bool"},
    "grow": {"True", "False"},
    "memory": {"None"},
    "precision": set(),
    "seed": {"0", "-1"},
    "watch": {"empty list", "empty tuple", "type", "function"},
    "watch_every": set(),
    "autosave": {"None", "word", "two lines", "half a character"},
    "autosave_every": set(),
    "reference_batch": set(),
    "reference_moves_buffers": {"True", "False"},
    "no_such_setting": set(),
}


@pytest.mark.parametrize("argument", WORKING)
def test_an_odd_argument_of_a_wrapper_works_or_is_one_sentence(
    argument: str, odd: dict[str, Any]
) -> None:
    found = set()
    for name, value in odd.items():
        settings = {} if argument == "optimizer" else dict(RATE)
        method = value if argument == "method" else "a-gem"
        if argument != "method":
            settings[argument] = value
        if works_or_is_one_sentence(partial(some_steps, net(), method, settings)):
            found.add(name)
    assert found == WORKING[argument]


def test_an_odd_module_is_one_sentence(odd: dict[str, Any]) -> None:
    for value in odd.values():
        assert not works_or_is_one_sentence(partial(some_steps, value, "a-gem", RATE))


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        *(("ewc", name) for name in ("strength", "fisher", "labels", "fisher_every", "normalise")),
        *(("rwalk", name) for name in ("flush", "damping")),
        ("gem", "margin"),
        ("gem", "ridge"),
        ("pi", "damping"),
        ("icarl", "exemplars"),
    ],
)
def test_an_odd_option_of_a_method_works_or_is_one_sentence(
    method: str, argument: str, odd: dict[str, Any]
) -> None:
    def first_step(value: Any) -> None:
        settings: dict[str, Any] = {**RATE, "tasks": [[0, 1], [2, 3]], argument: value}
        OnePass(net(), method, **settings).observe(*batch(classes=range(2)))

    for value in odd.values():
        works_or_is_one_sentence(partial(first_step, value))


def loading(argument: str) -> Callable[[OnePass, Any], Any]:
    return lambda _, value: OnePass.load("good", net(), **{argument: value})


PATHS = {"word", "two lines", "half a character"}
WATCHES = {"empty list", "empty tuple", "type", "function"}
NAMES = {"None", "-1", "0", "long word", "empty word", "NUL", "loop of links", "no such place"}
# Calls, and the odd values with which they work.
CALLS: dict[str, tuple[Callable[[OnePass, Any], Any], set[str]]] = {
    "observe x": (lambda learner, value: learner.observe(value, batch()[1]), set()),
    "observe y": (lambda learner, value: learner.observe(batch()[0], value), set()),
    "observe task": (lambda learner, value: learner.observe(*batch(), task=value), NAMES | PATHS),
    "predict x": (lambda learner, value: learner.predict(value), set()),
    "predict task": (lambda learner, value: learner.predict(batch()[0], task=value), NAMES | PATHS),
    "scores x": (lambda learner, value: learner.scores(value), set()),
    "save": (lambda learner, value: learner.save(value), PATHS),
    "learning_rate": (
        lambda learner, value: setattr(learner, "learning_rate", value),
        {"NumPy float"},
    ),
    "load module": (lambda learner, value: OnePass.load("good", value), set()),
    "load path": (lambda learner, value: OnePass.load(value, net()), set()),
    "load watch": (loading("watch"), WATCHES),
    "load watch_every": (loading("watch_every"), set()),
    "load autosave": (loading("autosave"), {"None", *PATHS}),
    "load loss": (loading("loss"), set()),
    "load optimizer": (loading("optimizer"), {"None"}),
    "load something else": (loading("method"), set()),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_odd_argument_of_a_call_works_or_is_one_sentence(call: str, odd: dict[str, Any]) -> None:
    ask, expected = CALLS[call]
    learner = OnePass(net(), **RATE)
    learner.observe(*batch())
    learner.save("good")
    found = set()
    for name, value in odd.items():
        learner = OnePass(net(), **RATE)
        learner.observe(*batch())
        if works_or_is_one_sentence(partial(ask, learner, value)):
            found.add(name)
        if call == "load path":  # that nothing is left of an earlier one
            for made in set(os.listdir()) - {"good", "odd"}:
                os.unlink(made)
    assert found == expected


def test_odd_data_to_look_at_again_are_one_sentence(odd: dict[str, Any]) -> None:
    for value in odd.values():
        learner = OnePass(net(), "mas", **RATE)
        learner.observe(*batch())
        for again in (value, [(value, batch()[1])]):
            assert not works_or_is_one_sentence(partial(learner.end_task, again=again))
        learner.end_task(again=[batch()])


def test_a_path_that_cannot_be_exported_to_is_one_sentence(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    learner = OnePass(net(), **RATE)
    learner.observe(*batch())
    for name in odd.keys() - PATHS - {"generator"}:
        assert not works_or_is_one_sentence(partial(learner.export, odd[name]))
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_autosave_that_may_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert not works_or_is_one_sentence(lambda: OnePass(net(), **RATE, autosave=closed / "file"))


def test_a_message_is_one_line_that_begins_and_ends_as_it_was() -> None:
    error = InputError("what is wrong with " + "\n\x1b[2J" * 5000 + ": what to do")
    assert str(error).isprintable()
    assert str(error).startswith("what is wrong with \\n\\x1b[2J")
    assert str(error).endswith(": what to do")
    assert len(str(error)) <= MOST
    assert type(error)(*error.args).args == error.args


def test_a_sentence_names_the_value_even_if_it_is_a_tensor() -> None:
    with pytest.raises(InputError, match=r"below a million, got tensor\(\[1., 1.\]\)"):
        OnePass(net(), learning_rate=torch.ones(2))  # type: ignore[arg-type]
