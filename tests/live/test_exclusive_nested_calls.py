"""Where the user's own code runs inside a call, no other change begins and nothing is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from onepass.live.saving import packed
from tests.live.refused_calls import CLASSES, batch
from tests.toys import FEATURES


class Calling(nn.Module):
    """Calls something in its forward pass."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, outputs)
        self.then: Callable[[], object] = bool

    def forward(self, x: Tensor) -> Tensor:
        self.then()
        found: Tensor = self.head(x)
        return found


def changes(learner: OnePass, path: Path) -> dict[str, Callable[[], object]]:
    return {
        "observe()": lambda: learner.observe(*batch(seed=5)),
        "end_task()": learner.end_task,
        "save()": lambda: learner.save(path),
    }


@pytest.mark.parametrize("call", ["observe()", "end_task()", "save()"])
@pytest.mark.parametrize(
    "when", ["first batch", "later", "a class that is new", "a task that ends by itself"]
)
def test_a_module_changes_and_saves_no_learner_that_is_learning(
    when: str, call: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Calling(2 if "class" in when else CLASSES)
    learner = OnePass(module, "er", learning_rate=0.1, grow="class" in when)
    path = tmp_path / "saved"
    if when != "first batch":
        learner.observe(*batch(classes=range(2)), task="a")
        learner.save(path)
    before, kept = packed(learner), path.read_bytes() if path.exists() else None
    module.then = changes(learner, path)[call]
    x, y = batch(classes=range(CLASSES if "class" in when else 2))
    with pytest.raises(InputError, match="in the middle") as caught:
        learner.observe(x, y, task="b" if "task" in when else "a")
    assert f"do not call {call}" in str(caught.value)
    assert packed(learner) == before
    assert (path.read_bytes() if path.exists() else None) == kept
    module.then = bool
    learner.observe(x, y, task="a")
    learner.save(path)
    OnePass.load(path, Calling(len(module.head.bias)))


@pytest.mark.parametrize("call", ["observe()", "end_task()", "save()"])
@pytest.mark.parametrize("where", ["data", "module"])
def test_the_end_of_a_task_is_interrupted_by_no_other_change(
    where: str, call: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Calling()
    learner = OnePass(module, "mas", learning_rate=0.1)
    again = [batch(seed=n) for n in range(3)]
    for x, y in again:
        learner.observe(x, y)
    before, values = packed(learner), copy.deepcopy(module.state_dict())
    change = changes(learner, tmp_path / "saved")[call]

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        yield again[0]
        change()
        yield again[1]

    if where == "module":
        module.then = change
    with pytest.raises(InputError, match="in the middle") as caught:
        learner.end_task(again=data() if where == "data" else again)
    assert f"do not call {call}" in str(caught.value)
    assert packed(learner) == before
    assert all(torch.equal(values[name], value) for name, value in module.state_dict().items())
    assert not (tmp_path / "saved").exists()
    module.then = bool
    learner.end_task(again=again)
    assert learner.segment == 1


def test_a_watch_may_save_learn_and_end_a_task(tmp_path: Path) -> None:
    """It is called when the batch was learnt."""

    def watch(report: dict[str, Any]) -> None:
        learner.save(tmp_path / str(report["step"]))
        if report["step"] == 1:
            learner.observe(*batch(seed=5))
            learner.end_task()

    learner = OnePass(Calling(), "er", learning_rate=0.1, watch=watch, watch_every=1)
    learner.observe(*batch())
    assert (learner.steps, learner.segment) == (2, 1)
    assert [OnePass.load(tmp_path / name, Calling()).steps for name in "12"] == [1, 2]


@pytest.mark.parametrize("call", ["wrap", "load", "observe()", "end_task()"])
def test_inference_mode_is_refused_before_anything_is_made_in_it(call: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, again, path = Calling(), [batch()], tmp_path / "saved"
    learner = OnePass(Calling(), "mas", learning_rate=0.1)
    learner.observe(*again[0])
    learner.save(path)
    before = packed(learner)
    calls: dict[str, Callable[[], object]] = {
        "wrap": lambda: OnePass(module, learning_rate=0.1),
        "load": lambda: OnePass.load(path, module),
        "observe()": lambda: learner.observe(*again[0]),
        "end_task()": lambda: learner.end_task(again=again),
    }
    with torch.inference_mode(), pytest.raises(InputError, match="inference mode"):
        calls[call]()
    assert packed(learner) == before
    x, y = batch()
    nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    learner.end_task(again=again)
    learner.observe(x, y)


def test_a_learner_answers_and_is_saved_in_inference_mode(tmp_path: Path) -> None:
    learner = OnePass(Calling(), "er", learning_rate=0.1)
    x, y = batch()
    learner.observe(x, y)
    learner.end_task()
    with torch.inference_mode():
        answer = learner.predict(x)
        learner.report()
        learner.save(tmp_path / "saved")
    assert torch.equal(learner.predict(x), answer)
    learner.observe(x, y)
    assert OnePass.load(tmp_path / "saved", Calling()).steps == 1
