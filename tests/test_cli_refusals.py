"""Bad input on the command line is one sentence and exit code 2."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import md5
from math import prod
from pathlib import Path

import pytest
import torch

from onepass.streams import mnist
from tests.commands import exit_code, refusal

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("command", "mentions"),
    [
        ("run quikstart", "did you mean 'quickstart'?"),
        ("run quickstart --methods agem", "did you mean 'a-gem'?"),
        ("run quickstart --methods=,", "at least one method"),
        ("run quickstart --set memory_per_tsk=5", "did you mean 'memory_per_task'?"),
        (
            "run quickstart --set grids.vna.learning_rate=1",
            "did you mean 'grids.van.learning_rate'?",
        ),
        ("run quickstart --set batch_size", "--set key=value"),
        ("run quickstart --set batch_size=ten", "batch_size='ten'"),
        ("run quickstart --set batch_size=0", "batch_size=0"),
        ("run quickstart --set memory=rnig", "'ring'"),
        ("run quickstart --set memory_per_task=0", "memory_per_task=0"),
        ("run quickstart --set memory_per_task=-5", "memory_per_task=-5"),
        ("run quickstart --set grids.van.learning_rate=0", "grids.van.learning_rate"),
        ("run quickstart --set train_examples=1000000", "train_examples=1000000"),
        ("run quickstart --seeds 0", "seeds=0"),
        ("run quickstart --seeds -1", "seeds=-1"),
        ("run quickstart --workers 0", "--workers 0"),
        ("run quickstart --threads 0", "--threads 0"),
        ("run quickstart --checkpoint-every 0", "--checkpoint-every 0"),
        ("run", "name a recipe to run"),
        ("run --out {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("run {tmp}/harmed", "go on with it by 'onepass run --out {tmp}/harmed'"),
        ("run quickstart --scheduler nonsense", "write tcp://HOST:PORT"),
        ("run quickstart --json {tmp}/harmed/study.sqlite", "belongs to a study"),
        ("run quickstart --out {tmp}/file/study", "{tmp}/file is not a folder"),
        ("run quickstart --tensorboard {tmp}/file", "{tmp}/file is not a folder"),
        ("status {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("status {tmp}/file", "there is no study in {tmp}/file"),
        ("status {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("table {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("show {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("verify {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("run quickstart --out {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("merge {tmp}/new {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("table {tmp}/folder", "there is no study in {tmp}/folder"),
        ("show {tmp}/folder some", "there is no study in {tmp}/folder"),
        ("merge {tmp}/folder {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("merge {tmp}/folder {tmp}/folder", "cannot be merged into itself"),
        ("verify {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("companions {tmp}/nowhere", "there is no study in {tmp}/nowhere"),
        ("companions {tmp}/harmed", "{tmp}/harmed/study.sqlite cannot be used"),
        ("run quickstart --device gpu", "cpu, cuda or auto"),
        pytest.param("run quickstart --device cuda", "--device cpu", marks=no_gpu),
        ("run quickstart --json {tmp}/file/table.json", "{tmp}/file is not a folder"),
        ("run quickstart --json {tmp}/folder", "{tmp}/folder (it is a folder)"),
        ("run quickstart --out {tmp}/file", "{tmp}/file is not a folder"),
        ("run permuted-mnist --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get mnst", "did you mean 'mnist'?"),
        ("data get mnist --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get cifar10", "did you mean 'cifar100'?"),
        ("data get cifar100 --data {tmp}/nowhere", "{tmp}/nowhere"),
        ("data get cifar100 --data {tmp}/short", "{tmp}/short/train.bin has 2 bytes"),
    ],
)
def test_bad_input_is_one_sentence(
    command: str, mentions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "harmed").mkdir()
    (tmp_path / "harmed" / "study.sqlite").write_bytes(b"SQLite format 3\0" + bytes(1000))
    (tmp_path / "short").mkdir()
    for name in ("train.bin", "test.bin"):
        (tmp_path / "short" / name).write_bytes(b"no")
    line = refusal(capsys, *(word.format(tmp=tmp_path) for word in command.split()))
    assert mentions.format(tmp=tmp_path) in line


def test_a_refused_command_leaves_no_study_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "quickstart", "--set", "train_examples=1000000"]
    refusal(capsys, *command, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


WRONG = ["run quickstart --sedes 3", "run quickstart --seeds some"]


@pytest.mark.parametrize("command", [*WRONG, "status", "merge some", "data get", "walk"])
def test_wrong_usage_exits_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def mnist_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four tiny files in the format of MNIST that count as the canonical ones."""
    for name in mnist.FILES:
        shape = (2, 28, 28) if "images" in name else (2,)
        content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(prod(shape))
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(mnist.FILES, name, ("", md5(content).hexdigest()))
    return tmp_path


def test_a_folder_with_sound_files_is_found(
    mnist_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("data", "get", "mnist", "--data", str(mnist_folder)) == 0
    assert capsys.readouterr().out.strip() == str(mnist_folder)


@pytest.mark.parametrize("command", ["run permuted-mnist", "data get mnist"])
@pytest.mark.parametrize(
    "harm",
    [lambda content: content[:-1], lambda content: content[:-1] + b"\x01", lambda _: b""],
    ids=["truncated", "altered", "empty"],
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_harmed_file_is_refused_by_its_name(
    command: str,
    harm: Callable[[bytes], bytes],
    name: str,
    mnist_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = mnist_folder / name
    path.write_bytes(harm(path.read_bytes()))
    line = refusal(capsys, *command.split(), "--data", str(mnist_folder))
    assert f"{path} is truncated or altered" in line


def test_the_data_folder_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEPASS_DATA", str(tmp_path / "nowhere"))
    assert "ONEPASS_DATA" in refusal(capsys, "run", "permuted-mnist")
