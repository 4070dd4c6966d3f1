"""A learner that is saved and loaded goes on bit by bit as if nothing had happened."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn, optim

from onepass import Memory, OnePass
from onepass.errors import InputError
from onepass.live.saving import packed
from tests.live.saved_learners import (
    BETWEEN,
    EVENTS,
    MIDDLE,
    OPTIMIZERS,
    SUPPORTED,
    TASKS,
    Case,
    Data,
    appearing,
    classes,
    net,
    normed,
    numbers,
    square,
    torch_optimizer,
    values,
)
from tests.toys import FEATURES, Dropped, Tied, small_net


def several(task: int, batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs of several shapes and kinds."""
    generator, (x, y) = numbers(task, batch), classes(task, batch)
    words = torch.randint(0, 9, (6,), generator=generator)
    third, fourth = (torch.randn(6, 3, generator=generator) for _ in range(2))
    return (x, words, third, fourth), y


def by_name(task: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    (x, words, third, fourth), y = several(task, batch)
    return {"word": words, "x": x, "third": third, "fourth": fourth}, y


def dropped() -> nn.Module:
    module = Dropped()
    module.head = nn.Linear(16, 6)
    return module


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(FEATURES + 4 + 3, 6)

    def forward(self, x: Tensor, word: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([x, self.words(word), third - 2 * fourth], 1))
        return out


class Buffered(nn.Module):
    """Buffers of many kinds, some of which move."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("on", torch.tensor([True, False]), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("across", torch.randn(4, 2, dtype=torch.float64).T)
        self.register_buffer("level", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.level += x.detach().mean().bfloat16()
            self.across += 0.1
        out: Tensor = self.head(x)
        return out * (1 + self.level.float() / 10)


def assert_goes_on(
    case: Case, path: Path, stops: tuple[int, ...] = (0, 2, BETWEEN, MIDDLE, 8)
) -> OnePass:
    """A learner that is saved at these places goes on as one that is not, in other modules too."""
    whole, saved, place = case.start(), case.start(), 0
    losses, before = case.run(whole), list[float]()
    expected = packed(whole)
    loaded = []
    for stop in stops:
        before += case.run(saved, place, stop)
        place, content = stop, packed(saved)
        saved.save(path)
        assert path.read_bytes() == packed(saved) == content, "saving changes nothing"
        loaded.append((case.load(path), stop, len(before)))
        assert packed(loaded[-1][0]) == content
    assert before + case.run(saved, place) == losses
    assert packed(saved) == expected
    for learner, stop, seen in loaded:
        assert case.run(learner, stop) == losses[seen:]
        assert packed(learner) == expected
    assert torch.equal(case.outputs(loaded[-1][0]), case.outputs(whole))
    return loaded[-1][0]


MORE_OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": torch_optimizer(optim.Adadelta, lr=0.5),
    "Adamax": torch_optimizer(optim.Adamax, lr=0.02),
    "ASGD": torch_optimizer(optim.ASGD, lr=0.1, t0=2),
    "NAdam": torch_optimizer(optim.NAdam, lr=0.02),
    "RAdam": torch_optimizer(optim.RAdam, lr=0.02),
    "Rprop": torch_optimizer(optim.Rprop, lr=0.02),
    "Adafactor": torch_optimizer(optim.Adafactor, lr=0.02),
    "a rate that is a tensor": torch_optimizer(optim.Adam, lr=torch.tensor(0.02), foreach=False),
    "a group per parameter": lambda parameters: optim.SGD(
        [{"params": [p], "lr": 0.1 / (1 + i)} for i, p in enumerate(parameters)], momentum=0.9
    ),
    "some parameters": lambda parameters: optim.Adam(list(parameters)[-2:], lr=0.05),
}
METHOD: dict[str, dict[str, Any]] = {name: {} for name in SUPPORTED} | {
    "ewc, online": {"fisher": "moving-average"}
}
every_method = pytest.mark.parametrize("name", METHOD)


def case_of(name: str, **more: Any) -> Case:
    more["settings"] = METHOD[name] | more.get("settings", {})
    return Case(name.partition(",")[0], **more)


@every_method
def test_every_method_goes_on_bit_identically_wherever_it_was_saved(
    name: str, tmp_path: Path
) -> None:
    loaded = assert_goes_on(case_of(name, tasks=TASKS), tmp_path / "file")
    if loaded.violations is not None:
        assert loaded.violations > 0


@pytest.mark.parametrize("method", ["er", "gem", "a-gem", "icarl"])
def test_what_is_traced_goes_on_bit_identically(method: str, tmp_path: Path) -> None:
    case = Case(method, build=partial(small_net, 6), tasks=TASKS)
    loaded = assert_goes_on(case, tmp_path / "file", (MIDDLE,))
    assert loaded.fleet.gradients._programs or method == "icarl"


@every_method
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_method_goes_on_bit_identically_with_a_torch_optimizer(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    case = case_of(name, tasks=TASKS, optimizer=OPTIMIZERS[optimizer])
    assert_goes_on(case, tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_other_optimizers_go_on_bit_identically(optimizer: str, tmp_path: Path) -> None:
    assert_goes_on(Case(optimizer=MORE_OPTIMIZERS[optimizer]), tmp_path / "file")


@every_method
@pytest.mark.parametrize("build", [normed, dropped], ids=lambda build: build.__name__)
def test_batch_norm_and_dropout_go_on_bit_identically(
    name: str, build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    assert_goes_on(case_of(name, tasks=TASKS, build=build), tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("build", [Tied, Buffered], ids=lambda build: build.__name__)
def test_tied_weights_and_buffers_of_all_kinds_go_on_bit_identically(
    build: type[nn.Module], tmp_path: Path
) -> None:
    assert_goes_on(Case("mega-1", build=build), tmp_path / "file")


TASK_FREE = [name for name, learner in SUPPORTED.items() if not learner.needs.boundaries]


@pytest.mark.parametrize("method", TASK_FREE)
@pytest.mark.parametrize("policy", ["class-balanced", "reservoir"])
def test_a_task_free_stream_goes_on_bit_identically(
    method: str, policy: Any, tmp_path: Path
) -> None:
    settings = {"task_free": True, "memory": Memory(examples=9, recent=1, policy=policy)}
    assert_goes_on(Case(method, settings), tmp_path / "file", (0, 1, 2, 5, 9))


@pytest.mark.parametrize("name", [name for name in METHOD if name != "icarl"])
def test_a_loss_of_ones_own_goes_on_bit_identically(name: str, tmp_path: Path) -> None:
    settings = {"labels": "data"} if name.startswith("ewc") else {}
    case = case_of(name, settings=settings, data=values, loss=square)
    assert_goes_on(case, tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("data", [several, by_name], ids=["in order", "by name"])
@pytest.mark.parametrize("method", ["mega-1", "er", "gem", "mas"])
def test_several_inputs_go_on_bit_identically(
    method: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The order of a file's tensors is up to its reader, so this is the most inconvenient one.
    load = safetensors.torch.load

    def backwards(content: bytes) -> dict[str, Tensor]:
        return dict(sorted(load(content).items(), reverse=True))

    monkeypatch.setattr(safetensors.torch, "load", backwards)
    loaded = assert_goes_on(Case(method, build=Several, data=data), tmp_path / "file")
    given = data(0, 0)[0]
    inputs = given.values() if isinstance(given, dict) else given
    for mine, its in zip(loaded._sample, inputs, strict=True):
        assert torch.equal(mine, its[:2]), "examples to export with"


@pytest.mark.parametrize("method", ["van", "er", "a-gem", "gem", "ewc", "pi", "mas", "rwalk"])
@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_a_head_that_has_grown_goes_on_bit_identically(
    method: str, optimizer: str | None, tmp_path: Path
) -> None:
    driven = OPTIMIZERS[optimizer] if optimizer else None
    case = Case(method, {"grow": True}, partial(net, 2), appearing, driven)
    loaded = assert_goes_on(case, tmp_path / "file")
    assert loaded.outputs == 8


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
def test_a_memory_goes_on_bit_identically_when_classes_appeared_in_the_middle_of_a_task(
    policy: Any, tmp_path: Path
) -> None:
    settings = {"grow": True, "memory": Memory(per_task=7, policy=policy)}
    assert_goes_on(Case("mega-1", settings, partial(net, 2), appearing), tmp_path / "file")


def test_a_module_that_is_nothing_but_a_head_grows_and_goes_on_bit_identically(
    tmp_path: Path,
) -> None:
    case = Case("er", {"grow": True}, partial(nn.Linear, FEATURES, 2), appearing)
    assert_goes_on(case, tmp_path / "file")


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
@pytest.mark.parametrize("tasks", [TASKS, None], ids=["head a task", "one head"])
@pytest.mark.parametrize("limit", [None, 9])
def test_every_memory_policy_goes_on_bit_identically(
    policy: Any, tasks: Any, limit: int | None, tmp_path: Path
) -> None:
    memory = Memory(per_task=7, policy=policy, examples=limit)
    assert_goes_on(Case("mega-1", {"memory": memory}, tasks=tasks), tmp_path / "file", (2, MIDDLE))


@pytest.mark.parametrize("limit", [None, 5000])
def test_a_memory_on_disk_goes_on_bit_identically(limit: int | None, tmp_path: Path) -> None:
    memory = Memory(per_task=7, bytes=limit, where="disk", folder=tmp_path / "memory")
    assert_goes_on(Case("mega-1", {"memory": memory}), tmp_path / "file")


@every_method
def test_mixed_precision_goes_on_bit_identically(name: str, tmp_path: Path) -> None:
    case = case_of(name, tasks=TASKS, settings={"precision": "bfloat16"})
    assert_goes_on(case, tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16], ids=str)
def test_modules_of_other_precisions_go_on_bit_identically(
    kind: torch.dtype, tmp_path: Path
) -> None:
    def data(task: int, batch: int) -> tuple[Tensor, Tensor]:
        x, y = classes(task, batch)
        return x.to(kind), y

    assert_goes_on(Case("mega-1", build=lambda: net().to(kind), data=data), tmp_path / "file")


def test_tasks_with_names_go_on_in_whatever_order_they_come(tmp_path: Path) -> None:
    case = Case("mega-1", tasks={"b": [2, 3], 7: [4, 5], "a": [0, 1]})
    names: list[int | str] = ["a", "b", 7]
    events = [event for event in EVENTS if not isinstance(event, str)]

    def run(learner: OnePass, begin: int, end: int) -> list[float]:
        seen = events[begin:end]
        return [learner.observe(*classes(*event), task=names[event[0]]) for event in seen]

    whole = case.start()
    losses = run(whole, 0, 9)
    for stop in (2, 3, 5):
        saved = case.start()
        run(saved, 0, stop)
        saved.save(tmp_path / "file")
        loaded = case.load(tmp_path / "file")
        assert loaded.task == saved.task
        assert run(loaded, stop, 9) == losses[stop:]
        assert packed(loaded) == packed(whole)


def test_what_was_watched_goes_on(tmp_path: Path) -> None:
    whole, cut = list[Any](), list[Any]()
    case = Case(settings={"watch": whole.append, "watch_every": 2})
    case.run(case.start())
    learner = Case(settings={"watch": cut.append, "watch_every": 2}).start()
    case.run(learner, 0, 7)
    learner.save(tmp_path / "file")
    case.run(OnePass.load(tmp_path / "file", net(), watch=cut.append, watch_every=2), 7)
    assert [report["forgetting"] for report in cut] == [report["forgetting"] for report in whole]
    assert len(cut) == 4


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_learner_that_is_copied_or_pickled_says_how_to_do_it(
    how: Callable[[OnePass], object],
) -> None:
    learner = Case().start()
    with pytest.raises(InputError, match="save it, and load the file with a copy of the module"):
        how(learner)
    learner.observe(*classes(0, 0))  # and goes on
