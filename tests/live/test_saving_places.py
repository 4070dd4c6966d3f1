"""Where a learner cannot be written, the old file stays and the learner goes on."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from onepass import InputError, OnePass
from onepass.live.saving import packed
from tests.failing import failing
from tests.live.saved_learners import MIDDLE, TASKS, Case, classes


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize("had", [None, 0o600, 0o640])
@pytest.mark.parametrize("way", ["save", "autosave", "export"])
def test_a_file_keeps_its_mode_and_a_new_one_obeys_the_umask(
    way: str, had: int | None, mask: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if had is not None:
        path.touch()
        path.chmod(had)
    learner = Case(settings={"autosave": path} if way == "autosave" else {}).start()
    before = os.umask(mask)
    try:
        learner.observe(*classes(0, 0))
        if way != "autosave":
            getattr(learner, way)(path)
    finally:
        os.umask(before)
    assert path.stat().st_size
    assert path.stat().st_mode & 0o777 == (0o666 & ~mask if had is None else had)


# A child that imports once and then forks, for each delay, one that saves until it is killed.
SAVES = """
import os, signal, sys, time
import torch
from torch import nn
from onepass import OnePass
torch.set_num_threads(1)
path, delays = sys.argv[1], [float(word) for word in sys.argv[2:]]
learner = OnePass(nn.Linear(200, 100), "a-gem", learning_rate=0.01)
learner.observe(torch.randn(10, 200), torch.arange(10))
learner.save(path)
for delay in delays:
    child = os.fork()
    if child == 0:
        while True:
            learner.observe(torch.randn(10, 200), torch.arange(10))
            learner.save(path)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
    sys.stdin.readline()
"""


def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    chance = random.Random(5)
    delays = [f"{chance.uniform(0.01, 0.12):.4f}" for _ in range(10)]
    command = [sys.executable, "-c", SAVES, str(tmp_path / "file"), *delays]
    steps = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in delays:
            assert child.stdout.readline() == "killed\n"
            loaded = OnePass.load(tmp_path / "file", nn.Linear(200, 100))
            steps.append(loaded.steps)
            loaded.observe(torch.randn(10, 200), torch.arange(10))
            child.stdin.write("on\n")
            child.stdin.flush()
        assert child.wait(timeout=60) == 0
    assert min(steps) >= 1
    assert len(set(steps)) > 1, "nothing was ever saved"


CALLS = [
    *(("os.fsync", errno.ENOSPC), ("os.fsync", errno.EIO)),
    *(("os.replace", errno.EACCES), ("_create", errno.EROFS)),
]


@pytest.mark.parametrize(("call", "code"), CALLS)
def test_a_place_that_cannot_be_written_is_one_sentence_and_the_old_file_stays(
    call: str, code: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, content = Case(tasks=TASKS), saved.read_bytes()
    learner = case.load(saved)
    case.run(learner, MIDDLE, 7)
    now = packed(learner)
    with monkeypatch.context() as patch:
        patch.setattr(f"onepass.files.{call}", failing(code))
        with pytest.raises(InputError, match=os.strerror(code)) as caught:
            learner.save(saved)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value)
    assert saved.read_bytes() == content
    assert list(saved.parent.iterdir()) == [saved], "nothing temporary is left"
    assert packed(learner) == now
    learner.save(saved)
    assert saved.read_bytes() == now


def test_places_that_do_not_exist_or_are_full_or_are_folders_are_refused(saved: Path) -> None:
    learner = Case().load(saved)
    places = (saved / "below a file", saved.parent / "missing" / "file", saved.parent)
    for path in (*places, Path("/dev/full")):
        with pytest.raises(InputError, match="cannot write"):
            learner.save(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_folder_that_is_read_only_is_refused(saved: Path) -> None:
    learner, content = Case().load(saved), saved.read_bytes()
    saved.parent.chmod(0o555)
    try:
        with pytest.raises(InputError, match="cannot write"):
            learner.save(saved)
    finally:
        saved.parent.chmod(0o755)
    assert saved.read_bytes() == content
