"""A saved learner that was altered and has the right checksums is refused, and the module and the optimizer given are unharmed."""

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


WRONG: list[tuple[str, str, Any]] = [
    *(("a-gem", "settings/learning_rate", value) for value in ("0.1", True, -1, 1e300, None)),
    *(("a-gem", "settings/own/reference_batch", value) for value in ("4", 4.0, 0, True, 2**40)),
    *(("a-gem", "settings/method", value) for value in ("nothing", "prog-nn", "multi-task", "ewc", "gem\n", "x" * 10**5, None)),
    *(("a-gem", "settings/tasks", value) for value in ([], [[0, [0, 0]]], [[0, [0]], [0, [1]]], [[0, [2**40]]], [[True, [1]]], [[0, [-1]]])),
    *(("a-gem", "settings/memory/per_task", value) for value in (0, "7", 7.0, True)),
    *(("a-gem", "settings/memory/recent", value) for value in (-1, True, None)),
    *(("a-gem", "settings/memory/policy", value) for value in ("all", "reservoir", "ring")),
    *(("a-gem", "settings/seed", value) for value in (2**63, 0.5, "0")),
    *(("a-gem", "settings/grow", value) for value in (True, "nowhere", "1", "a\nb", 0)),
    *(("a-gem", "settings/precision", value) for value in ("float8", [])),
    *(("a-gem", "outputs", value) for value in (None, 1, 10**9, 2**53)),
    *(("a-gem", "examples/kinds/0/0", value) for value in ("load", "float64", "Tensor", "nn", "")),
    *(("a-gem", "examples/kinds/0/1", value) for value in ([7], [], [-6], [2**62], "6")),
    *(("a-gem", "examples/keywords", value) for value in (["a", "a"], ["a", "b"], [1])),
    *(("a-gem", "replays", value) for value in ([-1], ["x"], list(range(99)))),
    *(("a-gem", "fleet/number", value) for value in (0, -1, 2**62, 1)),
    *(("a-gem", "segment", value) for value in (-1, 0, 9, 2**40)),
    *(("a-gem", "batches", value) for value in (-1, 0, 99)),
    *(("a-gem, tasks", "task", value) for value in (None, "2", 9, True)),
    *(("a-gem, task-free", "task", value) for value in ("a", 1)),
    *(("a-gem", "best", value) for value in ([[0, "x"]], [[0, 1.0], [0, 2.0]], [[0]], {})),
    *(("a-gem", "learner", value) for value in ({"steps": 1}, {"x": 0}, [])),
    *(("a-gem", "memory", value) for value in (None, {}, [])),
    *(("ewc", "memory", value) for value in ({"task": 0, "number": 0, "groups": [], "quota": []},)),
    *(("ewc", "learner/anchored", value) for value in (2, -1, True)),
    *(("icarl", "learner/seen", value) for value in (0, 2, 9)),
    *(("icarl", "settings/own/exemplars", value) for value in (0, 3, 2**40)),
    *(("a-gem, ring", "memory/quota", value) for value in ([], [[0, 7], [0, 0]], [[2, 10**9], [3, 3]])),
    *(("a-gem", "memory/quota", value) for value in ([[0, 7]],)),
    *(("a-gem", "memory/task", value) for value in (0, 2)),
    *(("er, Adam", "optimizer/kind", value) for value in ("SGD", "eval", "x\ny")),
    *(("er, Adam", "optimizer/groups/0/lr", value) for value in ("0.1", -1, None, [0.1], 10**300)),
    *(("er, Adam", "optimizer/groups/0/lr", {"tensor": number, "dtype": kind}) for number, kind in ((1, "load"), ("x", "float32"), (2**63, "int64"))),
    *(("er, Adam", "optimizer/groups/0/betas", value) for value in ([2, 3], [0.9], 0.9, ["a", "b"], None)),
    *(("er, Adam", "optimizer/groups/0/amsgrad", value) for value in (True, 1, "x")),
    *(("er, Adam", "optimizer/groups/0/params", value) for value in ([0, 1, 2, 2], [3, 2, 1, 0], [], 4, ["0", "1", "2", "3"])),
    *(("er, Adam", "optimizer/numbers", value) for value in ({"0.step": 3}, {"9.x": 1}, {"x": 1}, {"0.exp_avg": 1}, {"-1.step": 1})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place", "value"),
    WRONG,
    ids=[f"{place}={str(value)[:20]!a}" for _, place, value in WRONG],
)
def test_a_header_with_right_checksums_that_cannot_be_is_one_sentence(
    name: str, place: str, value: Any, tmp_path: Path
) -> None:
    refusal(changed(name, setting(place, value)), CASES[name], tmp_path)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    ],
    ids=str,
)
def test_a_kind_of_number_that_no_batch_can_have_is_refused_in_header_and_tensors_alike(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        about["examples"]["kinds"][0][0] = str(dtype).removeprefix("torch.")
        for name in ("memory.examples.x", "sample.000"):
            tensors[name] = tensors[name].abs().to(dtype)

    refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)


@pytest.mark.parametrize(
    "where", [np.array([1, 2]), torch.tensor([1, 2]), "", 3], ids=lambda where: type(where).__name__
)
def test_a_place_that_is_none_is_refused(where: Any, tmp_path: Path) -> None:
    refusal(content_of("a-gem", MIDDLE), CASES["a-gem"], tmp_path, where=where)


def test_as_many_tasks_as_a_file_can_name_are_read_at_once() -> None:
    began = time.monotonic()
    assert len(read_tasks({number: range(3) for number in range(20_000)})) == 20_000
    assert (
        len(read_tasks({number: range(3 * number, 3 * number + 3) for number in range(20_000)}))
        == 20_000
    )
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


ROWS = [
    (row, change)
    for row in ("members", "arrived", "visible", "fresh")
    for change in (shorter, twice, first_twice, with_first(-1), with_first(99))
]
TENSORS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    *(
        ("a-gem", f"memory.{row}", change)
        for row, change in ROWS
        if (row, change) != ("arrived", first_twice)
    ),
    *(
        ("a-gem", f"memory.{row}", lambda t: t.double())
        for row in ("members", "examples.slots", "examples.x")
    ),
    *(
        ("a-gem", f"memory.examples.{column}", change)
        for column in ("x", "slots")
        for change in (shorter, twice, lambda t: t[:, None])
    ),
    *(("a-gem", "memory.examples.slots", with_first(number)) for number in (-1, 6, 2**40)),
    *(
        ("a-gem", "memory.examples.x", with_first(number))
        for number in (float("nan"), float("inf"))
    ),
    *(
        ("a-gem, task-free", "memory.coming", change)
        for change in (with_first(99), lambda t: t[:, :1], lambda t: t[:0])
    ),
    *(("a-gem", "module.0.weight", with_first(number)) for number in (float("nan"), float("inf"))),
    *(
        ("a-gem", "sample.000", change)
        for change in (shorter, twice, lambda t: t.double(), lambda t: t[:, :-1])
    ),
    *(
        ("a-gem", "learner.violations", change)
        for change in (with_first(-1), with_first(2**62), lambda t: t.float(), twice)
    ),
    *(
        ("pi, momentum", f"learner.{name}", change)
        for name in ("path", "anchor")
        for change in (lambda t: t[:, :-1], lambda t: t.half(), twice)
    ),
    *(
        ("icarl", "learner.x", change)
        for change in (
            lambda t: t[:, :, :-1],
            lambda t: t[:, :-1],
            lambda t: t.double(),
            lambda t: t[..., :-1],
        )
    ),
    *(
        ("icarl", "learner.held", change)
        for change in (
            with_first(-1),
            with_first(99),
            torch.zeros_like,
            lambda t: t.float(),
            lambda t: t[:, :-1],
        )
    ),
    *(
        ("icarl, norm", "learner.teacher.norm.running_mean", change)
        for change in (shorter, lambda t: t.double())
    ),
    *(
        ("er, Adam", "optimizer.0.exp_avg", change)
        for change in (
            shorter,
            lambda t: t.long(),
            lambda t: t.reshape(-1),
            with_first(float("nan")),
        )
    ),
    *(
        ("er, Adam", "optimizer.0.step", change)
        for change in (
            lambda t: t - 9,
            lambda t: t.repeat(3),
            lambda t: t * float("nan"),
            lambda t: t.long(),
        )
    ),
]


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
    for key in (
        "module.x",
        "learner.x",
        "memory.x",
        "memory.examples.y",
        "sample.009",
        "optimizer.99.step",
        "optimizer.x",
        "x",
        "",
    ):
        if key not in taken_apart(content_of(name, MIDDLE))[1]:
            refusal(
                changed(name, lambda _, tensors, key=key: tensors.update({key: torch.zeros(2)})),
                CASES[name],
                tmp_path,
            )  # type: ignore[misc]


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
