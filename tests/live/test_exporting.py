"""The current model as a file for other programs."""

from __future__ import annotations

import copy
import errno
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from onepass.models.resnet import ResNet
from tests.failing import failing
from tests.live.refused_calls import batch
from tests.toys import FEATURES, Asking, Dropped, Normed, Tied, small_net

CLASSES = 4


class Pair(nn.Module):
    """Two inputs, batch-norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.words = nn.Linear(FEATURES, CLASSES), nn.Embedding(5, CLASSES)
        self.norm, self.drop = nn.BatchNorm1d(CLASSES), nn.Dropout(0.5)

    def forward(self, left: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.left(left) + self.words(words).mean(1)))
        return out


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.unflatten(1, (3, 2)))[0][:, -1])
        return out


class Locked(nn.Module):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.lock = nn.Linear(FEATURES, CLASSES), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def image() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), ResNet(2, CLASSES, (1, 1), channels=1))


def learnt(
    module: nn.Module, dress: Callable[[Tensor], Any] = lambda x: x, **settings: Any
) -> OnePass:
    learner = OnePass(module, optimizer=torch.optim.Adam(module.parameters(), lr=0.01), **settings)
    for seed in range(3):
        x, y = batch(seed=seed)
        learner.observe(dress(x), y)
    learner.end_task()
    return learner


def loaded(path: Path) -> nn.Module:
    return torch.export.load(path).module()


def words(x: Tensor) -> Tensor:
    return (x[:, :3].abs() * 2).long().clamp(max=4)


def sentence(error: BaseException) -> str:
    assert type(error) is InputError
    message = str(error)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    "build", [small_net, Normed, Dropped, Tied, Reader, image], ids=lambda b: b.__name__
)
def test_an_exported_model_answers_as_the_learner_does_for_any_batch_size(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    learner = learnt(build())
    learner.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 2, 7, 33):
        x, _ = batch(size, seed=9)
        assert torch.allclose(program(x), learner.scores(x), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize("names", [True, False], ids=["dict", "tuple"])
def test_a_model_with_several_inputs_is_exported_with_them(names: bool, tmp_path: Path) -> None:
    def dress(x: Tensor) -> Any:
        return {"words": words(x), "left": x} if names else (x, words(x))

    learner = learnt(Pair(), dress)
    learner.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 2, 7):
        x, _ = batch(size, seed=9)
        answer = program(words=words(x), left=x) if names else program(x, words(x))
        assert torch.allclose(answer, learner.scores(dress(x)), atol=1e-6)


@pytest.mark.parametrize("build", [Normed, Dropped], ids=lambda b: b.__name__)
def test_learning_goes_on_as_if_nothing_had_been_exported(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    module, twin = build(), build()
    twin.load_state_dict(module.state_dict())
    learner, other = learnt(module), learnt(twin)
    module.train(False)
    twin.train(False)
    before, rng_state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    modes = [part.training for part in module.modules()]
    learner.export(tmp_path / "model.pt2")
    assert torch.equal(rng_state, torch.get_rng_state())
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for seed in range(3, 7):
        assert learner.observe(*batch(seed=seed)) == other.observe(*batch(seed=seed))
    mine, its = module.state_dict(), twin.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_file_is_not_changed_by_what_is_learnt_afterwards(tmp_path: Path) -> None:
    learner = learnt(Normed())
    learner.export(tmp_path / "model.pt2")
    x, y = batch(seed=9)
    expected = learner.scores(x)
    for _ in range(5):
        learner.observe(x, y)
    assert not torch.allclose(learner.scores(x), expected, atol=1e-3)
    assert torch.allclose(loaded(tmp_path / "model.pt2")(x), expected, atol=1e-6)
    learner.export(tmp_path / "model.pt2")
    assert torch.allclose(loaded(tmp_path / "model.pt2")(x), learner.scores(x), atol=1e-6)


def test_a_stream_of_single_examples_is_exported_for_any_batch_size(tmp_path: Path) -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = batch()
    for k in range(len(x)):
        learner.observe(x[k : k + 1], y[k : k + 1])
    learner.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 2, 7):
        assert torch.allclose(program(x[:size]), learner.scores(x[:size]), atol=1e-6)


def test_a_head_that_has_grown_is_exported_as_it_is(tmp_path: Path) -> None:
    learner = learnt(small_net(CLASSES), grow=True)
    x, y = batch()
    learner.observe(x, y + 3)
    learner.export(tmp_path / "model.pt2")
    outputs = loaded(tmp_path / "model.pt2")(x).shape[1]
    assert outputs == learner.outputs == int(y.max()) + 4


def test_a_loaded_learner_can_export_at_once(tmp_path: Path) -> None:
    module = Normed()
    learner = OnePass(module, learning_rate=0.1)
    learner.observe(*batch())
    learner.save(tmp_path / "saved")
    OnePass.load(tmp_path / "saved", Normed()).export(tmp_path / "model.pt2")
    x, _ = batch(7)
    assert torch.allclose(loaded(tmp_path / "model.pt2")(x), learner.scores(x), atol=1e-6)


@pytest.mark.parametrize("build", [Asking, Locked], ids=lambda b: b.__name__)
def test_a_module_that_cannot_be_exported_is_one_sentence_and_no_file(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    learner = learnt(build())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is looked at below
        learner.export(tmp_path / "new" / "model.pt2")
    assert "cannot" in sentence(caught.value)
    assert not list(tmp_path.iterdir())
    learner.observe(*batch(seed=5))
    assert learner.steps == 4


def test_a_module_that_cannot_be_exported_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_text("of old")
    with pytest.raises(InputError):
        learnt(Asking()).export(tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_text() == "of old"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_sentence_says_what_the_exporter_could_not_follow(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        learnt(Asking()).export(tmp_path / "model.pt2")
    assert "data-dependent" in sentence(caught.value)
    assert "nothing was written" in sentence(caught.value)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    learner = learnt(small_net(CLASSES))
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path, tmp_path / "file" / "model.pt2"):
        with pytest.raises(InputError) as caught:
            learner.export(path)
        assert "cannot write" in sentence(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learnt(small_net(CLASSES))
    monkeypatch.setattr(torch.export, "save", failing(errno.ENOSPC))
    with pytest.raises(InputError, match="No space left"):
        learner.export(tmp_path / "new" / "model.pt2")
    assert not list(tmp_path.iterdir())


# ---- ONNX


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_onnx_without_its_packages_is_one_sentence_and_no_file(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learnt(small_net(CLASSES))

    def find_spec(name: str) -> object:
        return None if name == missing else SimpleNamespace(name=name)

    monkeypatch.setattr("onepass.live.exporting.find_spec", find_spec)
    with pytest.raises(InputError) as caught:
        learner.export(tmp_path / "model.onnx")
    message = sentence(caught.value)
    assert "onnx and onnxscript" in message
    assert "install" in message
    assert not list(tmp_path.iterdir())


def test_a_model_that_onnx_cannot_say_is_one_sentence_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learnt(small_net(CLASSES))

    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("no ONNX function found for this operator\nand a long explanation")

    monkeypatch.setattr("onepass.live.exporting.find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(torch.onnx, "export", cannot)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is looked at below
        learner.export(tmp_path / "model.onnx")
    assert "no ONNX function found" in sentence(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not (importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxscript")),
    reason="needs onnx and onnxscript",
)
def test_onnx_answers_as_the_learner_does(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    learner = learnt(Normed())
    learner.export(tmp_path / "model.onnx")
    program = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    for size in (1, 2, 7):
        x, _ = batch(size, seed=9)
        answer = program.run(None, {program.input_names[0]: x.numpy()})[0]
        assert torch.allclose(torch.from_numpy(answer), learner.scores(x), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
