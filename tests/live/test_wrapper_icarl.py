"""iCaRL around a module: it says what it keeps, and predicts among all classes by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass

TASKS = [[0, 1], [2, 3], [4, 5]]


def data(task: int, batches: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(task)
    found = []
    for _ in range(batches):
        y = torch.randint(2 * task, 2 * task + 2, (10,), generator=generator)
        found.append(
            (torch.randn(10, 6, generator=generator) / 2 + 3 * nn.functional.one_hot(y, 6), y)
        )
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))


def learnt(tasks: int = 3, exemplars: int = 60) -> OnePass:
    learner = OnePass(net(), "icarl", learning_rate=0.2, tasks=TASKS, exemplars=exemplars)
    for task in range(tasks):
        for x, y in data(task):
            learner.observe(x, y)
        learner.end_task(again=data(task))
    return learner


def test_a_report_tells_what_the_exemplars_take() -> None:
    assert (learnt(0).report()["memory"], learnt(0).report()["memory_bytes"]) == ({}, 0)
    learner = learnt()
    report = learner.report()
    held = learner.learner.held[0]  # type: ignore[attr-defined]
    assert (
        report["memory"]
        == {task: int(held[2 * task : 2 * task + 2].sum()) for task in range(3)}
        == dict.fromkeys(range(3), 20)
    )
    assert report["memory_bytes"] == 60 * 6 * 4 + 6 * 8


def test_it_answers_among_all_classes_seen_after_every_task() -> None:
    for tasks in (1, 2, 3):
        learner = learnt(tasks)
        for task in range(tasks):
            x, y = (torch.cat(part) for part in zip(*data(task), strict=True))
            assert (learner.predict(x) == y).double().mean() > 0.8
            assert set(learner.predict(x, task=task).tolist()) <= set(TASKS[task])


def test_all_classes_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(InputError, match="leave all_classes out") as caught:
        OnePass(net(), "icarl", learning_rate=0.2, tasks=TASKS, all_classes=True)
    assert "\n" not in str(caught.value)
    OnePass(net(), "icarl", learning_rate=0.2, tasks=TASKS, all_classes=False)


def test_files_that_have_what_is_refused_by_now_are_loaded_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("onepass.live.wrapper.check_method", lambda *_: None)  # as it was before
        asked = {"all_classes": True, "memory": Memory(bytes=100_000)}
        old = OnePass(net(), "icarl", learning_rate=0.2, tasks=TASKS, exemplars=60, **asked)
        for task in range(2):
            for x, y in data(task):
                old.observe(x, y)
            old.end_task(again=data(task))
        with pytest.raises(InputError, match="no answer"):
            old.predict(data(1)[0][0])
        old.save(tmp_path / "saved")
    learner = OnePass.load(tmp_path / "saved", net())
    x, y = data(1)[0]
    assert (learner.predict(x) == y).double().mean() > 0.7
    learner.observe(*data(2)[0])


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_it_learns_and_answers_in_numbers_of_every_kind(kind: torch.dtype) -> None:
    learner = OnePass(net().to(kind), "icarl", learning_rate=0.2, tasks=TASKS, exemplars=60)
    for task in range(2):
        batches = [(x.to(kind), y) for x, y in data(task)]
        for x, y in batches:
            learner.observe(x, y)
        learner.end_task(again=batches)
    for task in range(2):
        x, y = (torch.cat(part) for part in zip(*data(task), strict=True))
        assert (learner.predict(x.to(kind)) == y).double().mean() > 0.8


def test_the_default_kind_of_number_does_not_matter() -> None:
    learner = learnt(2)
    x = data(0)[0][0]
    answer = learner.scores(x).nan_to_num(7)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(learner.scores(x).nan_to_num(7), answer)
    finally:
        torch.set_default_dtype(torch.float32)
