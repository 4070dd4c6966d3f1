"""Files of earlier versions and unusual settings are loaded, and go on."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim

from onepass import InputError, Memory, OnePass, OnePassClassifier
from onepass.live.saving import packed
from tests.live.altered_files import taken_apart
from tests.live.saved_learners import (
    MIDDLE,
    OPTIMIZERS,
    TASKS,
    Case,
    appearing,
    classes,
    net,
    square,
    values,
)

SAVED = Path(__file__).parent / "saved"  # by an earlier version


ON_DISK = Memory(per_task=7, bytes=5000, where="disk", folder="memory")
OLD = {
    "a-gem": Case(optimizer=OPTIMIZERS["Adam"], tasks=TASKS),
    "icarl": Case("icarl", tasks=TASKS),
    "ewc": Case("ewc", optimizer=OPTIMIZERS["momentum"]),
    "grown": Case("er", {"grow": True}, partial(net, 2), appearing, OPTIMIZERS["Adam"]),
    "task-free": Case("er", {"task_free": True, "memory": Memory(examples=9, recent=1)}),
    "disk": Case("mega-1", {"memory": ON_DISK}),
    "own-loss": Case("rwalk", data=values, loss=square),
}


@pytest.mark.parametrize("name", OLD)
def test_a_file_of_an_earlier_version_is_loaded_and_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a relative folder is
    path = SAVED / f"{name}.safetensors"
    learner = OLD[name].load(path)
    was, tensors = taken_apart(path.read_bytes())
    now, same = taken_apart(packed(learner))
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensor, same[key]) for key, tensor in tensors.items())
    was["learner"].pop("steps", None)  # the fleet counts them now
    assert {key for key in was if was[key] != now[key]} <= {"settings"}
    OLD[name].run(learner, MIDDLE)
    assert learner.steps == 9


def test_a_head_that_is_not_the_last_layer_is_loaded(tmp_path: Path) -> None:
    case = Case(settings={"grow": "0"})
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(tmp_path / "file")
    assert case.run(case.load(tmp_path / "file"), MIDDLE) == case.run(learner, MIDDLE)


def test_a_scheduler_and_other_settings_of_the_optimizer_go_on(tmp_path: Path) -> None:
    module = net()
    adam = optim.Adam(module.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.ExponentialLR(adam, 0.5)
    learner = OnePass(module, optimizer=adam)
    learner.observe(*classes(0, 0))
    scheduler.step()
    learner.save(tmp_path / "file")
    other = net()
    again = optim.Adam(other.parameters(), lr=7, betas=(0.1, 0.2), foreach=False)
    loaded = OnePass.load(tmp_path / "file", other, optimizer=again)
    assert again.param_groups[0]["lr"] == 0.05
    assert again.param_groups[0]["betas"] == (0.9, 0.999)
    assert again.param_groups[0]["initial_lr"] == 0.1
    assert again.param_groups[0]["foreach"] is False, "how it is computed is the caller's"
    assert loaded.observe(*classes(0, 1)) == learner.observe(*classes(0, 1))


def test_an_optimizer_of_ones_own_that_refuses_its_state_is_one_sentence(tmp_path: Path) -> None:
    class Own(optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("mine")

    module = net()
    learner = OnePass(module, optimizer=Own(module.parameters(), lr=0.1))
    learner.save(tmp_path / "file")
    other = net()
    with pytest.raises(InputError, match="optimizer"):
        OnePass.load(tmp_path / "file", other, optimizer=Own(other.parameters(), lr=0.1))


def test_numbers_that_a_file_cannot_hold_do_not_stop_a_save(tmp_path: Path) -> None:
    module = net()
    sgd = optim.SGD(module.parameters(), lr=0.1)
    learner = OnePass(module, optimizer=sgd)
    learner.observe(*classes(0, 0))
    learner._watch.best = {0: 0.5, 1: float("-inf")}
    learner.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    assert taken_apart(before)[0]["best"] == [[0, 0.5]]
    sgd.param_groups[0]["lr"] = float("inf")
    with pytest.raises(InputError, match="'lr' of SGD cannot be saved: it is inf"):
        learner.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before


def test_a_classifier_with_its_memory_on_disk_is_pickled_and_copied_as_before(
    tmp_path: Path,
) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 3
    memory = Memory(bytes=10**5, where="disk", folder=tmp_path / "memory")
    learner = OnePassClassifier(memory=memory, random_state=0)
    learner.partial_fit(x, y, task_ends=True)
    for other in (pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner)):
        assert str(other.learner_.plan.folder) == str(tmp_path / "memory")
        assert packed(other.learner_) == packed(learner.learner_)
        other.partial_fit(x, y)
    learner.partial_fit(x, y)
    assert packed(other.learner_) == packed(learner.learner_)
