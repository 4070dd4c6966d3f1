"""What may be asked of a memory: bad values, too much and too little are refused."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass import InputError, Memory, OnePass
from tests.failing import failing
from tests.live.comparing import same
from tests.live.refused_calls import Rich, batch, check_sentence, in_a_second_task, refused
from tests.toys import small_net


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"per_task": 0}, ("per_task", "above 0")),
        ({"per_task": -1}, ("per_task", "-1")),
        ({"per_task": 2.5}, ("per_task", "2.5")),
        ({"per_task": True}, ("per_task", "True")),
        ({"per_task": "many"}, ("per_task", "many")),
        ({"examples": 0}, ("examples", "above 0")),
        ({"bytes": 0}, ("bytes", "above 0")),
        ({"bytes": 1e6}, ("bytes", "whole number")),
        ({"bytes": 2**80}, ("bytes", "at most 2**60", "a larger one")),
        ({"examples": 10**4000}, ("examples", "a larger one")),
        ({"per_task": None}, ("per_task", "None")),
        ({"per_task": [5] * 1000}, ("per_task", "5, 5")),
        ({"recent": True}, ("recent", "True")),
        ({"recent": None}, ("recent", "None")),
        ({"recent": -1}, ("recent", "-1")),
        ({"held_out": -1}, ("held_out", "at least 0")),
        ({"held_out": 0.1}, ("held_out", "0.1")),
        ({"held_out": True}, ("held_out", "True")),
        ({"recent": 0.5}, ("recent", "0.5")),
        ({"policy": "ringg"}, ("unknown memory policy 'ringg'", "did you mean 'ring'")),
        ({"policy": 3}, ("policy", "3")),
        ({"where": "gpu"}, ("place", "'gpu'", "cpu")),
        ({"where": ["cpu"]}, ("place", "cpu")),
        ({"where": np.array(["cpu", "disk"])}, ("place", "cpu")),
        ({"policy": np.array(["ring", "reservoir"])}, ("policy", "ring")),
        ({"where": "disk"}, ("folder",)),
        ({"where": "disk", "folder": 5}, ("folder", "got 5")),
        ({"where": "disk", "folder": b"there"}, ("folder", "there")),
        ({"where": "disk", "folder": ""}, ("folder", "''", "'.'")),
        ({"where": "disk", "folder": "a\0b"}, ("folder",)),
        ({"folder": "there"}, ("folder", "disk")),
        ({"where": "cpu", "folder": "there"}, ("folder", "disk")),
    ],
    ids=str,
)
def test_a_memory_with_bad_values_is_refused(plan: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Memory(**plan)
    check_sentence(caught.value, words)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"per_task": np.int64(9), "bytes": np.uint32(20_000)}
    numbers |= {"recent": np.int8(3), "held_out": np.int16(2)}
    plan = Memory(**numbers)
    assert plan == Memory(per_task=9, bytes=20_000, recent=3, held_out=2)
    assert all(type(getattr(plan, name)) is int for name in numbers)
    OnePass(Rich(), learning_rate=0.1, memory=plan).save(tmp_path / "saved")


@pytest.mark.parametrize(
    "plan", [{"per_task": 2**60}, {"examples": 2**60}, {"bytes": 2**60}], ids=str
)
def test_a_memory_larger_than_there_is_is_refused_before_anything_is_learnt(
    plan: dict[str, Any],
) -> None:
    learner = OnePass(Rich(), learning_rate=0.1, memory=Memory(**plan))
    with refused(learner, "cannot keep", "fewer"):
        learner.observe(*batch())


ASKED = [
    *({"bytes": 100_000}, {"examples": 50}, {"per_task": 20}, {"policy": "ring"}),
    *({"where": "cpu"}, {"recent": 3}, {"held_out": 5}),
]


@pytest.mark.parametrize("plan", ASKED, ids=str)
def test_a_memory_that_icarl_would_not_keep_to_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="exemplars of its own") as caught:
        OnePass(Rich(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]], memory=Memory(**plan))
    check_sentence(caught.value, ("icarl", "leave memory out", "exemplars="))


def test_a_limit_holds_for_methods_that_keep_nothing_and_a_default_memory_for_all(
    tmp_path: Path,
) -> None:
    plan = Memory(bytes=1000, where="disk", folder=tmp_path / "not made")
    for method in ("van", "ewc", "pi", "mas", "rwalk"):
        learner = OnePass(small_net(), method, learning_rate=0.1, memory=plan)
        assert learner.report()["memory_bytes"] == 0
    assert not list(tmp_path.iterdir())
    OnePass(Rich(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]], memory=Memory())


def test_a_memory_of_too_few_bytes_is_refused_before_anything_is_learnt() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, memory=Memory(bytes=10))
    with refused(learner, "10 bytes", "one example needs"):
        learner.observe(*batch())


def test_a_memory_in_a_folder_that_cannot_be_is_refused_before_anything_is_learnt(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("in the way")
    module = Rich()
    before = copy.deepcopy(module.state_dict())
    plan = Memory(where="disk", folder=tmp_path / "file" / "folder")
    with pytest.raises(InputError) as caught:
        OnePass(module, learning_rate=0.1, memory=plan).observe(*batch())
    check_sentence(caught.value, (str(tmp_path), "folder"))
    assert same(dict(before), dict(module.state_dict()))


def test_a_disk_that_is_full_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = in_a_second_task(memory=Memory(where="disk", folder=tmp_path, per_task=40))
    learner.observe(*batch(seed=5))  # 48 of 48 rows are taken
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", failing(errno.ENOSPC))
        with refused(learner, "No space left", "make room"):
            learner.observe(*batch(seed=6))
    learner.observe(*batch(seed=6))
    assert learner.memory is not None
    assert learner.memory.size == 56
