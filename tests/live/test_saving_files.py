"""The file of a learner: what it is, and that anything else is refused."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn, optim

from onepass import Memory, OnePass
from onepass.live.container import FORMAT
from tests.fuzzing import damaged
from tests.live.comparing import same
from tests.live.saved_learners import MIDDLE, OPTIMIZERS, Case, net, square, values
from tests.sentences import refusal_of
from tests.toys import FEATURES, Normed

# ---- the file


def about_in(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    about: dict[str, Any] = json.loads(metadata["onepass"])
    return about


def with_about(content: bytes, about: Any) -> bytes:
    text = about if isinstance(about, str) else json.dumps(about)
    return safetensors.torch.save(safetensors.torch.load(content), metadata={"onepass": text})


def test_the_file_is_plain_safetensors_with_a_json_header(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with safetensors.safe_open(saved, "pt") as file:
        about = json.loads(file.metadata()["onepass"])
        names = set(file.keys())
        weight = file.get_tensor("module.0.weight")
    assert about["format"] == FORMAT == 1
    assert about["settings"]["method"] == "a-gem"
    assert {name.partition(".")[0] for name in names} == {"module", "learner", "memory", "sample"}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it is unpickled")

    for place in ("pickle.loads", "pickle.load", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(place, refuse)
    loaded = Case().load(saved)
    assert torch.equal(dict(loaded.module.named_parameters())["0.weight"], weight)


def test_an_autosaved_file_is_the_one_that_save_writes(tmp_path: Path) -> None:
    case = Case(settings={"autosave": tmp_path / "auto", "autosave_every": 2})
    learner = case.start()
    case.run(learner, 0, 1)
    assert not (tmp_path / "auto").exists()
    case.run(learner, 1, 2)
    learner.save(tmp_path / "by hand")
    assert (tmp_path / "auto").read_bytes() == (tmp_path / "by hand").read_bytes()
    case.run(learner, 2, 3)
    assert (tmp_path / "auto").read_bytes() == (tmp_path / "by hand").read_bytes()


# ---- what is refused


def refusal(path: Path, module: nn.Module | None = None, **given: Any) -> str:
    """The sentence with which a load is refused, which must leave the module alone."""
    module = net() if module is None else module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    sentence = refusal_of(lambda: OnePass.load(path, module, **given))
    assert same(before, dict(module.state_dict()))
    assert len(sentence) > 15
    return sentence


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_file_is_refused_and_never_loads_wrongly(seed: int, saved: Path) -> None:
    content = saved.read_bytes()
    harmed = damaged(content, random.Random(seed))
    saved.write_bytes(harmed)
    if harmed != content:
        refusal(saved)


def test_a_header_with_one_wrong_digit_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    digits = [place for place in range(8, 8 + length) if chr(content[place]).isdigit()]
    for place in random.Random(1).sample(digits, 60):
        harmed = bytearray(content)
        harmed[place] = ord("1") if content[place] != ord("1") else ord("2")
        saved.write_bytes(harmed)
        refusal(saved)


def test_a_header_that_lacks_something_or_has_something_else_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    about = about_in(content)
    for key in about:
        without = {name: value for name, value in about.items() if name != key}
        for changed in (without, about | {key: {}}, about | {key: [7]}, about | {key: "x"}):
            if changed != about:
                saved.write_bytes(with_about(content, changed))
                refusal(saved)
    for key in about["settings"]:
        fewer = {name: value for name, value in about["settings"].items() if name != key}
        saved.write_bytes(with_about(content, about | {"settings": fewer}))
        refusal(saved)


@pytest.mark.parametrize(
    "about",
    ["", "null", "[]", "7", "{}", '{"format": 1}', "[" * 5000],
    ids=lambda text: text[:5] or "empty",
)
def test_a_safetensors_file_that_is_not_ours_is_refused(about: str, saved: Path) -> None:
    saved.write_bytes(with_about(saved.read_bytes(), about))
    assert "save()" in refusal(saved) or "damaged" in refusal(saved)


def test_a_file_without_a_header_of_ours_or_no_file_at_all_is_refused(saved: Path) -> None:
    saved.write_bytes(safetensors.torch.save({"weight": torch.zeros(3)}))
    assert "damaged or not a file that save() wrote" in refusal(saved)
    others = (b"PK\x03\x04", b"{}", os.urandom(300))
    for content in (b"", b"\x00" * 8, b"\xff" * 8, b"\xff" * 200, *others):
        saved.write_bytes(content)
        assert "damaged or not a file that save() wrote" in refusal(saved)
    assert "cannot read" in refusal(saved.parent / "nothing")
    assert "cannot read" in refusal(saved.parent)


@pytest.mark.parametrize("number", [2, 17, 0, -1, "1", None, 1.5])
def test_a_format_of_the_future_is_refused(number: object, saved: Path) -> None:
    content = saved.read_bytes()
    saved.write_bytes(with_about(content, about_in(content) | {"format": number}))
    sentence = refusal(saved)
    if isinstance(number, int) and number > 1:
        assert f"format {number}" in sentence
        assert "reads 1" in sentence


def grouped(parameters: Any) -> optim.Optimizer:
    return optim.Adam([{"params": [p]} for p in parameters], lr=0.1)


BODY = nn.Linear(FEATURES, 5), nn.Tanh()
UNFIT = {
    "other shape": (nn.Sequential(*BODY, nn.Linear(5, 9)), "is torch.float32 of shape [9"),
    "less": (nn.Sequential(*BODY, nn.Linear(5, 6, bias=False)), "'2.bias' is only in the file"),
    "more": (nn.Sequential(*net(), nn.BatchNorm1d(6)), "is only in the module"),
    "other precision": (net().double(), "torch.float64"),
    "quite another": (Normed(), "only in"),
}


@pytest.mark.parametrize(("module", "words"), UNFIT.values(), ids=UNFIT)
def test_a_module_that_does_not_fit_is_refused(module: nn.Module, words: str, saved: Path) -> None:
    sentence = refusal(saved, module)
    assert sentence.startswith("the module does not fit the file")
    assert words in sentence


def test_what_the_file_holds_cannot_be_given_again(saved: Path) -> None:
    held = {"seed": 3, "method": "er", "learning_rate": 0.1, "memory": Memory()}
    for name, value in (held | {"nonsense": 1}).items():
        assert f"'{name}'" in refusal(saved, **{name: value})


def test_a_loss_or_an_optimizer_that_is_missing_or_too_much_is_refused(saved: Path) -> None:
    assert "leave out loss=" in refusal(saved, loss=square)
    module = net()
    sgd = optim.SGD(module.parameters(), lr=0.1)
    assert "leave out optimizer=" in refusal(saved, module, optimizer=sgd)
    case = Case(data=values, loss=square, optimizer=OPTIMIZERS["Adam"])
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(saved)
    module = net()
    adam = optim.Adam(module.parameters(), lr=0.1)
    assert "give loss=" in refusal(saved, module, optimizer=adam)
    assert "give optimizer=" in refusal(saved, loss=square)
    assert "not the module's" in refusal(saved, loss=square, optimizer=adam)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (partial(optim.SGD, lr=0.1), "Adam"),
        (grouped, "groups"),
        (partial(optim.AdamW, lr=0.1), "Adam"),
    ],
)
def test_another_optimizer_is_refused(
    other: Callable[[Any], optim.Optimizer], words: str, saved: Path
) -> None:
    case = Case(optimizer=OPTIMIZERS["Adam"])
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(saved)
    module = net()
    optimizer = other(module.parameters())
    before = repr(optimizer.state_dict())
    assert words in refusal(saved, module, optimizer=optimizer)
    assert repr(optimizer.state_dict()) == before


# ---- no room
