"""An altered file with the right checksums is refused; module and optimizer are unharmed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onepass import InputError, OnePass
from onepass.live.settings import read_tasks
from tests.live.altered_files import Change, changed, refusal, setting, shape_of, taken_apart
from tests.live.comparing import same
from tests.live.saved_cases import CASES, content_of
from tests.live.saved_learners import MIDDLE

# ---- headers


def of_tensor(number: object, dtype: str) -> dict[str, object]:
    return {"tensor": number, "dtype": dtype}


# Where a header is altered, and values that cannot be there.
WRONG_VALUES: list[tuple[str, str, list[Any]]] = [
    ("a-gem", "settings/learning_rate", ["0.1", True, -1, 1e300, None]),
    ("a-gem", "settings/own/reference_batch", ["4", 4.0, 0, True, 2**40]),
    (
        "a-gem",
        "settings/method",
        ["nothing", "prog-nn", "multi-task", "ewc", "gem\n", "x" * 10**5, None],
    ),
    (
        "a-gem",
        "settings/tasks",
        [[], [[0, [0, 0]]], [[0, [0]], [0, [1]]], [[0, [2**40]]], [[True, [1]]], [[0, [-1]]]],
    ),
    ("a-gem", "settings/memory/per_task", [0, "7", 7.0, True]),
    ("a-gem", "settings/memory/recent", [-1, True, None]),
    ("a-gem", "settings/memory/policy", ["all", "reservoir", "ring"]),
    ("a-gem", "settings/seed", [2**63, 0.5, "0"]),
    ("a-gem", "settings/grow", [True, "nowhere", "1", "a\nb", 0]),
    ("a-gem", "settings/precision", ["float8", []]),
    ("a-gem", "outputs", [None, 1, 10**9, 2**53]),
    ("a-gem", "examples/kinds/0/0", ["load", "float64", "Tensor", "nn", ""]),
    ("a-gem", "examples/kinds/0/1", [[7], [], [-6], [2**62], "6"]),
    ("a-gem", "examples/keywords", [["a", "a"], ["a", "b"], [1]]),
    ("a-gem", "replays", [[-1], ["x"], list(range(99))]),
    ("a-gem", "fleet/number", [0, -1, 2**62, 1]),
    ("a-gem", "segment", [-1, 0, 9, 2**40]),
    ("a-gem", "batches", [-1, 0, 99]),
    ("a-gem, tasks", "task", [None, "2", 9, True]),
    ("a-gem, task-free", "task", ["a", 1]),
    ("a-gem", "best", [[[0, "x"]], [[0, 1.0], [0, 2.0]], [[0]], {}]),
    ("a-gem", "learner", [{"steps": 1}, {"x": 0}, []]),
    ("a-gem", "memory", [None, {}, []]),
    ("ewc", "memory", [{"task": 0, "number": 0, "groups": [], "quota": []}]),
    ("ewc", "learner/anchored", [2, -1, True]),
    ("icarl", "learner/seen", [0, 2, 9]),
    ("icarl", "settings/own/exemplars", [0, 3, 2**40]),
    ("a-gem, ring", "memory/quota", [[], [[0, 7], [0, 0]], [[2, 10**9], [3, 3]]]),
    ("a-gem", "memory/quota", [[[0, 7]]]),
    ("a-gem", "memory/task", [0, 2]),
    ("er, Adam", "optimizer/kind", ["SGD", "eval", "x\ny"]),
    ("er, Adam", "optimizer/groups/0/lr", ["0.1", -1, None, [0.1], 10**300]),
    ("er, Adam", "optimizer/groups/0/betas", [[2, 3], [0.9], 0.9, ["a", "b"], None]),
    ("er, Adam", "optimizer/groups/0/amsgrad", [True, 1, "x"]),
    (
        "er, Adam",
        "optimizer/groups/0/params",
        [[0, 1, 2, 2], [3, 2, 1, 0], [], 4, ["0", "1", "2", "3"]],
    ),
    (
        "er, Adam",
        "optimizer/numbers",
        [{"0.step": 3}, {"9.x": 1}, {"x": 1}, {"0.exp_avg": 1}, {"-1.step": 1}],
    ),
    ("er, Adam", "optimizer/groups/0/lr", [of_tensor(1, "load"), of_tensor("x", "float32")]),
    ("er, Adam", "optimizer/groups/0/lr", [of_tensor(2**63, "int64")]),
]
WRONG = [(name, place, value) for name, place, values in WRONG_VALUES for value in values]


@pytest.mark.parametrize(
    ("name", "place", "value"),
    WRONG,
    ids=[f"{place}={str(value)[:20]!a}" for _, place, value in WRONG],
)
def test_a_header_with_right_checksums_that_cannot_be_is_one_sentence(
    name: str, place: str, value: Any, tmp_path: Path
) -> None:
    refusal(changed(name, setting(place, value)), CASES[name], tmp_path)


UNUSUAL = [
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]


@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
def test_a_kind_of_number_that_no_batch_can_have_is_refused_in_header_and_tensors_alike(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        about["examples"]["kinds"][0][0] = str(dtype).removeprefix("torch.")
        for name in ("memory.examples.x", "sample.000"):
            tensors[name] = tensors[name].abs().to(dtype)

    refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)


NO_PLACES = [np.array([1, 2]), torch.tensor([1, 2]), "", 3]


@pytest.mark.parametrize("where", NO_PLACES, ids=lambda where: type(where).__name__)
def test_a_place_that_is_none_is_refused(where: Any, tmp_path: Path) -> None:
    refusal(content_of("a-gem", MIDDLE), CASES["a-gem"], tmp_path, where=where)


def test_as_many_tasks_as_a_file_can_name_are_read_at_once() -> None:
    same_classes = {number: range(3) for number in range(20_000)}
    own_classes = {number: range(3 * number, 3 * number + 3) for number in range(20_000)}
    began = time.monotonic()
    for tasks in (same_classes, own_classes):
        assert len(read_tasks(tasks)) == 20_000
    assert time.monotonic() - began < 5


def test_settings_of_icarl_in_a_file_take_no_room_before_there_are_examples(tmp_path: Path) -> None:
    case = CASES["icarl"]

    def change(about: dict[str, Any], _: object) -> None:
        about["settings"]["own"] |= {"exemplars": 2**31, "reference_batch": 2**31}

    (tmp_path / "file").write_bytes(changed("icarl", change))
    learner = case.load(tmp_path / "file")
    case.run(learner, MIDDLE)
    learner.end_task(again=[case.data(2, batch) for batch in range(3)])
    assert learner.report()["memory_bytes"] < 100_000


def put(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    def change(_: object, tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name].clone())

    return change


def with_first(number: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = number
        return tensor

    return change


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


def first_twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:1], tensor[:1], tensor[2:]])


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double()


def as_float(tensor: Tensor) -> Tensor:
    return tensor.float()


def as_long(tensor: Tensor) -> Tensor:
    return tensor.long()


def narrower(tensor: Tensor) -> Tensor:
    return tensor[:, :-1]


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


NOT_NUMBERS = (with_first(float("nan")), with_first(float("inf")))
ROWS = (shorter, twice, first_twice, with_first(-1), with_first(99))
MEMORY_ROWS = [
    (row, change) for row in ("members", "arrived", "visible", "fresh") for change in ROWS
]
MEMORY_ROWS.remove(("arrived", first_twice))  # two examples may have come at once
# Whose tensors are altered, which of them, and how.
CHANGES: list[tuple[str, str, tuple[Callable[[Tensor], Tensor], ...]]] = [
    *(("a-gem", f"memory.{row}", (change,)) for row, change in MEMORY_ROWS),
    ("a-gem", "memory.members", (as_double,)),
    ("a-gem", "memory.examples.slots", (as_double, shorter, twice, lambda t: t[:, None])),
    ("a-gem", "memory.examples.x", (as_double, shorter, twice, lambda t: t[:, None])),
    ("a-gem", "memory.examples.slots", (with_first(-1), with_first(6), with_first(2**40))),
    ("a-gem", "memory.examples.x", NOT_NUMBERS),
    ("a-gem, task-free", "memory.coming", (with_first(99), lambda t: t[:, :1], lambda t: t[:0])),
    ("a-gem", "module.0.weight", NOT_NUMBERS),
    ("a-gem", "sample.000", (shorter, twice, as_double, narrower)),
    ("a-gem", "learner.violations", (with_first(-1), with_first(2**62), as_float, twice)),
    ("pi, momentum", "learner.path", (narrower, lambda t: t.half(), twice)),
    ("pi, momentum", "learner.anchor", (narrower, lambda t: t.half(), twice)),
    ("icarl", "learner.x", (lambda t: t[:, :, :-1], narrower, as_double, lambda t: t[..., :-1])),
    ("icarl", "learner.held", (with_first(-1), with_first(99), torch.zeros_like)),
    ("icarl", "learner.held", (as_float, narrower)),
    ("icarl, norm", "learner.teacher.norm.running_mean", (shorter, as_double)),
    ("er, Adam", "optimizer.0.exp_avg", (shorter, as_long, flat, NOT_NUMBERS[0])),
    ("er, Adam", "optimizer.0.step", (lambda t: t - 9, lambda t: t.repeat(3))),
    ("er, Adam", "optimizer.0.step", (lambda t: t * float("nan"), as_long)),
]
TENSORS = [(name, tensor, change) for name, tensor, changes in CHANGES for change in changes]


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    TENSORS,
    ids=[f"{place}-{number}" for number, (_, place, _) in enumerate(TENSORS)],
)
def test_tensors_with_right_checksums_that_cannot_be_are_one_sentence(
    name: str, tensor: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    refusal(changed(name, put(tensor, change)), CASES[name], tmp_path)


@pytest.mark.parametrize(
    "name",
    ["a-gem", "er, Adam", "er, grown, Adam", "icarl", "mega-1, two inputs", "a-gem, own loss"],
)
def test_a_tensor_that_is_missing_or_too_much_is_refused(name: str, tmp_path: Path) -> None:
    for key in taken_apart(content_of(name, MIDDLE))[1]:
        refusal(changed(name, lambda _, tensors, key=key: tensors.pop(key)), CASES[name], tmp_path)  # type: ignore[misc]
    of_parts = {f"{part}.x" for part in ("module", "learner", "memory", "optimizer")}
    others = {"memory.examples.y", "sample.009", "optimizer.99.step", "x", ""}
    for key in (of_parts | others) - taken_apart(content_of(name, MIDDLE))[1].keys():

        def more(_: object, tensors: dict[str, Tensor], key: str = key) -> None:
            tensors[key] = torch.zeros(2)

        refusal(changed(name, more), CASES[name], tmp_path)


@pytest.mark.parametrize("name", ["er, grown, Adam", "icarl, norm"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), KeyboardInterrupt(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_a_load_that_fails_at_its_very_end_leaves_everything_as_it_was(
    name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    module = case.build()
    module.eval()
    given = case.given(module)
    (tmp_path / "file").write_bytes(content_of(name, MIDDLE))
    before = shape_of(module, given.get("optimizer"))

    class Failing(set[int]):
        def __init__(self, *_: object) -> None:
            raise error

    monkeypatch.setattr("onepass.live.saving.set", Failing, raising=False)
    with pytest.raises(InputError if isinstance(error, MemoryError) else type(error)):
        OnePass.load(tmp_path / "file", module, **given)
    assert same(before, shape_of(module, given.get("optimizer")))
    monkeypatch.undo()
    OnePass.load(tmp_path / "file", module, **given).observe(*case.data(1, 2))
