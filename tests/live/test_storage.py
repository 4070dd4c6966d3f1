"""Examples on disk: room for all columns or for none, and a forked process leaves them alone."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.live.saving import packed
from onepass.live.storage import Storage


class Two(nn.Module):
    """A module of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(5, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.one(a) + self.other(b)
        return out


def batch(seed: int, size: int = 20) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator), torch.randn(size, 5, generator=generator)
    return inputs, torch.randint(0, 2, (size,), generator=generator)


def learner_of(**where: object) -> OnePass:
    torch.manual_seed(0)
    return OnePass(Two(), learning_rate=0.1, memory=Memory(per_task=20, **where))  # type: ignore[arg-type]


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("disk", OSError(28, "No space left on device")),
        ("disk", MemoryError()),
        ("cpu", RuntimeError("can't allocate memory")),
        ("cpu", MemoryError()),
    ],
    ids=["a full disk", "memory for a mapping", "torch", "memory"],
)
def test_room_that_cannot_be_made_for_one_column_leaves_all_of_them_as_they_were(
    where: str, column: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(where=where, folder=tmp_path if where == "disk" else None)
    learner.observe(*batch(0), task=0)
    twin = learner_of()
    twin.observe(*batch(0), task=0)
    assert learner.memory is not None
    storage = learner.memory.storage
    assert storage is not None
    calls = iter(range(100))
    sentences = []

    def fail_once(*_: object, **__: object) -> None:
        if next(calls) == column:
            raise error

    real = torch.empty
    with monkeypatch.context() as patch:
        if where == "disk":
            allocate = os.posix_fallocate
            patch.setattr(
                "onepass.live.storage.os.posix_fallocate",
                lambda *given: (fail_once(), allocate(*given)),
            )
        else:
            patch.setattr(
                "onepass.live.storage.torch.empty",
                lambda *given, **more: (fail_once(), real(*given, **more))[1],
            )
        before = packed(learner)
        for number in range(1, 4):
            try:
                learner.observe(*batch(number), task=1)
            except InputError as reason:
                sentences.append(str(reason))
                assert packed(learner) == before
                learner.observe(*batch(number), task=1)
            before = packed(learner)
            twin.observe(*batch(number), task=1)
    assert len(sentences) == 1
    assert "cannot keep" in sentences[0]
    assert len({len(tensor) for tensor in storage.columns.values()}) == 1
    assert torch.equal(learner.fleet.theta, twin.fleet.theta)
    for one in (learner, twin):
        one.end_task()
        one.observe(*batch(9))
    assert torch.equal(learner.fleet.theta, twin.fleet.theta)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_more_than_any_memory_holds_is_one_sentence(where: str, tmp_path: Path) -> None:
    for rows in (2**50, 2**60):
        with pytest.raises(InputError, match="cannot keep"):
            Storage(
                {"x": torch.zeros(1, 64)},
                torch.device("cpu"),
                tmp_path if where == "disk" else None,
                rows,
            )


def go_on(learner: OnePass, say: object, path: str) -> None:
    """What a forked child does; it reports what came of it."""
    found = []
    for call in (
        lambda: learner.observe(*batch(7)),
        lambda: learner.save(path),
        lambda: learner.report(),
        lambda: learner.predict(batch(7)[0]),
    ):
        try:
            call()
            found.append("done")
        except InputError as reason:
            found.append(str(reason))
    found.append(learner.steps)  # type: ignore[arg-type]
    say.put(found)  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_forked_child_leaves_its_parents_memory_alone(where: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent's
    learner = learner_of(where=where, folder=tmp_path if where == "disk" else None)
    for number in range(4):
        learner.observe(*batch(number), task=number // 2)
    before = packed(learner)
    context = multiprocessing.get_context("fork")
    say = context.Queue()
    child = context.Process(target=go_on, args=(learner, say, str(tmp_path / "saved")))
    child.start()
    found = say.get(timeout=60)
    child.join(60)
    assert packed(learner) == before
    if where == "cpu":  # its memory is a copy
        assert found == ["done"] * 4 + [5]
        return
    *refused, answered, steps = found
    assert all(
        "belongs to process" in sentence and "load it here" in sentence for sentence in refused
    ), refused
    assert (answered, steps) == ("done", 4)
    assert not (tmp_path / "saved").exists()
    learner.observe(*batch(7))
