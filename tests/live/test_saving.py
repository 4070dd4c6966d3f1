"""A learner that is saved and loaded goes on bit by bit as if nothing had happened, and a file that is not what was saved is refused."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn, optim

from onepass import InputError, Memory, OnePass
from onepass.learners import METHODS
from onepass.live import saving
from onepass.live.saving import packed
from toys import FEATURES, Dropped, Normed, Tied, mutated, small_net

SUPPORTED = {name: found.learner for name, found in METHODS.items() if not (found.joined or found.learner.own_network)}
TASKS = [[0, 1], [2, 3], [4, 5]]
SMALL = Memory(per_task=7)

# What happens: (task, batch), or the end of a task.
EVENTS: list[tuple[int, int] | str] = [(0, 0), (0, 1), (0, 2), "end", (1, 0), (1, 1), (1, 2), "end", (2, 0), (2, 1), (2, 2)]
MIDDLE, BETWEEN = 6, 4

Data = Callable[[int, int], tuple[Any, Tensor]]


def numbers(task: int, batch: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * task + batch)


def classes(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Two classes a task."""
    generator = numbers(task, batch)
    y = torch.randint(2 * task, 2 * task + 2, (6,), generator=generator)
    return torch.randn(6, FEATURES, generator=generator) + y[:, None] / 2, y


def values(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Something to predict that changes from task to task."""
    generator = numbers(task, batch)
    x = torch.randn(6, FEATURES, generator=generator)
    return x, (x[:, :2] * (1 - task)).repeat(1, 3)


def several(task: int, batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs of several shapes and kinds."""
    generator, (x, y) = numbers(task, batch), classes(task, batch)
    return (x, torch.randint(0, 9, (6,), generator=generator), torch.randn(6, 3, generator=generator), torch.randn(6, 3, generator=generator)), y


def by_name(task: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs, y = several(task, batch)
    return dict(zip(("word", "x", "third", "fourth"), (inputs[1], inputs[0], *inputs[2:]), strict=True)), y


def appearing(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Classes that appear in the middle of tasks."""
    generator = numbers(task, batch)
    y = torch.randint(0, 2 + 2 * task + batch, (6,), generator=generator)
    return torch.randn(6, FEATURES, generator=generator) + y[:, None] / 2, y


class Own(nn.Sequential):
    """A class of somebody's own, which is called as it is."""


def net(outputs: int = 6) -> nn.Module:
    return Own(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs))


def normed() -> nn.Module:
    module = Normed()
    module.fc = nn.Linear(3 * FEATURES, 6)
    return module


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


def square(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean()


@dataclass(frozen=True)
class Case:
    """A learner and its stream."""

    method: str = "a-gem"
    settings: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = net
    data: Data = classes
    optimizer: Callable[[Any], optim.Optimizer] | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    tasks: Any = None

    def start(self) -> OnePass:
        torch.manual_seed(1)
        module = self.build()
        own = {"strength": 0.5, "reference_batch": 4, "exemplars": 12, "fisher_every": 2, "margin": 0.1}
        known = {*SUPPORTED[self.method].hyperparameters, *SUPPORTED[self.method].options.__dataclass_fields__}
        rate = {"learning_rate": 0.2} if self.optimizer is None else {}
        chosen = (
            {"memory": SMALL, "seed": 3, "tasks": self.tasks} | {name: value for name, value in own.items() if name in known} | dict(self.settings)
        )
        return OnePass(module, self.method, **rate, **self.given(module), **chosen)

    def given(self, module: nn.Module) -> dict[str, Any]:
        """What a file cannot hold."""
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer(module.parameters())}
        return optimizer if self.loss is None else optimizer | {"loss": self.loss}

    def load(self, path: Path) -> OnePass:
        torch.manual_seed(2)  # a module with other values
        module = self.build()
        return OnePass.load(path, module, **self.given(module))

    def run(self, learner: OnePass, begin: int = 0, end: int = len(EVENTS)) -> list[float]:
        """The losses of these events."""
        losses = []
        for place in range(begin, end):
            event = EVENTS[place]
            if not isinstance(event, str):
                losses.append(learner.observe(*self.data(*event)))
            elif not learner.task_free:
                learner.end_task(again=[self.data(*before) for before in EVENTS[place - 3 : place] if not isinstance(before, str)])
        return losses

    def answers(self, learner: OnePass) -> Tensor:
        """Outputs for examples of the tasks that have ended."""
        return torch.cat([learner.scores(self.data(task, 9)[0]) for task in (0, 1)]).nan_to_num()


def assert_goes_on(case: Case, path: Path, stops: tuple[int, ...] = (0, 2, BETWEEN, MIDDLE, 8)) -> OnePass:
    """A learner that is saved at these places goes on, in other modules too, as one does that nobody disturbs."""
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
    assert torch.equal(case.answers(loaded[-1][0]), case.answers(whole))
    return loaded[-1][0]


def torch_optimizer(kind: type[optim.Optimizer], **settings: Any) -> Callable[[Any], optim.Optimizer]:
    return partial(kind, **settings)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": torch_optimizer(optim.SGD, lr=0.2),
    "momentum": torch_optimizer(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": torch_optimizer(optim.Adam, lr=0.02),
    "AdamW": torch_optimizer(optim.AdamW, lr=0.02, amsgrad=True),
    "RMSprop": torch_optimizer(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": torch_optimizer(optim.Adagrad, lr=0.05, lr_decay=0.1),
}
MORE_OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": torch_optimizer(optim.Adadelta, lr=0.5),
    "Adamax": torch_optimizer(optim.Adamax, lr=0.02),
    "ASGD": torch_optimizer(optim.ASGD, lr=0.1, t0=2),
    "NAdam": torch_optimizer(optim.NAdam, lr=0.02),
    "RAdam": torch_optimizer(optim.RAdam, lr=0.02),
    "Rprop": torch_optimizer(optim.Rprop, lr=0.02),
    "Adafactor": torch_optimizer(optim.Adafactor, lr=0.02),
    "a rate that is a tensor": lambda parameters: optim.Adam(parameters, lr=torch.tensor(0.02), foreach=False),
    "two groups": lambda parameters: optim.SGD([{"params": [p], "lr": 0.1 / (1 + i)} for i, p in enumerate(parameters)], lr=0.1, momentum=0.9),
    "some parameters": lambda parameters: optim.Adam(list(parameters)[-2:], lr=0.05),
}
METHOD: dict[str, dict[str, Any]] = {name: {} for name in SUPPORTED} | {"ewc, online": {"fisher": "moving-average"}}
every_method = pytest.mark.parametrize("name", METHOD)


def case_of(name: str, **more: Any) -> Case:
    more["settings"] = METHOD[name] | more.get("settings", {})
    return Case(name.partition(",")[0], **more)


@every_method
def test_every_method_goes_on_bit_identically_wherever_it_was_saved(name: str, tmp_path: Path) -> None:
    loaded = assert_goes_on(case_of(name, tasks=TASKS), tmp_path / "file")
    if loaded.violations is not None:
        assert loaded.violations > 0


@pytest.mark.parametrize("method", ["er", "gem", "a-gem", "icarl"])
def test_what_is_traced_goes_on_bit_identically(method: str, tmp_path: Path) -> None:
    loaded = assert_goes_on(Case(method, build=partial(small_net, 6), tasks=TASKS), tmp_path / "file", (MIDDLE,))
    assert loaded.fleet.gradients._programs or method == "icarl"


@every_method
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_method_goes_on_bit_identically_with_a_torch_optimizer(name: str, optimizer: str, tmp_path: Path) -> None:
    case = case_of(name, tasks=TASKS, optimizer=OPTIMIZERS[optimizer])
    assert_goes_on(case, tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_other_optimizers_go_on_bit_identically(optimizer: str, tmp_path: Path) -> None:
    assert_goes_on(Case(optimizer=MORE_OPTIMIZERS[optimizer]), tmp_path / "file")


@every_method
@pytest.mark.parametrize("build", [normed, dropped], ids=lambda build: build.__name__)
def test_batch_norm_and_dropout_go_on_bit_identically(name: str, build: Callable[[], nn.Module], tmp_path: Path) -> None:
    assert_goes_on(case_of(name, tasks=TASKS, build=build), tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("build", [Tied, Buffered], ids=lambda build: build.__name__)
def test_tied_weights_and_buffers_of_all_kinds_go_on_bit_identically(build: type[nn.Module], tmp_path: Path) -> None:
    assert_goes_on(Case("mega-1", build=build), tmp_path / "file")


@pytest.mark.parametrize("method", [name for name, learner in SUPPORTED.items() if learner.task_free])
@pytest.mark.parametrize("policy", ["class-balanced", "reservoir"])
def test_a_task_free_stream_goes_on_bit_identically(method: str, policy: Any, tmp_path: Path) -> None:
    settings = {"task_free": True, "memory": Memory(examples=9, recent=1, policy=policy)}
    assert_goes_on(Case(method, settings), tmp_path / "file", (0, 1, 2, 5, 9))


@pytest.mark.parametrize("name", [name for name in METHOD if name != "icarl"])
def test_a_loss_of_ones_own_goes_on_bit_identically(name: str, tmp_path: Path) -> None:
    settings = {"labels": "data"} if name.startswith("ewc") else {}
    assert_goes_on(case_of(name, settings=settings, data=values, loss=square), tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("data", [several, by_name], ids=["in order", "by name"])
@pytest.mark.parametrize("method", ["mega-1", "er", "gem", "mas"])
def test_several_inputs_go_on_bit_identically(method: str, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order in which a file's tensors come is up to the reader, so make it the most inconvenient one.
    load = safetensors.torch.load
    monkeypatch.setattr(safetensors.torch, "load", lambda content: dict(sorted(load(content).items(), reverse=True)))
    loaded = assert_goes_on(Case(method, build=Several, data=data), tmp_path / "file")
    given = data(0, 0)[0]
    for mine, its in zip(loaded._sample, given.values() if isinstance(given, dict) else given, strict=True):
        assert torch.equal(mine, its[:2]), "examples to export with"


@pytest.mark.parametrize("method", ["van", "er", "a-gem", "gem", "ewc", "pi", "mas", "rwalk"])
@pytest.mark.parametrize("optimizer", [None, "Adam"])
def test_a_head_that_has_grown_goes_on_bit_identically(method: str, optimizer: str | None, tmp_path: Path) -> None:
    case = Case(method, {"grow": True}, partial(net, 2), appearing, OPTIMIZERS[optimizer] if optimizer else None)
    loaded = assert_goes_on(case, tmp_path / "file")
    assert loaded.outputs == 8


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
def test_a_memory_goes_on_bit_identically_when_classes_appeared_in_the_middle_of_a_task(policy: Any, tmp_path: Path) -> None:
    case = Case("mega-1", {"grow": True, "memory": Memory(per_task=7, policy=policy)}, partial(net, 2), appearing)
    assert_goes_on(case, tmp_path / "file")


def test_a_module_that_is_nothing_but_a_head_grows_and_goes_on_bit_identically(tmp_path: Path) -> None:
    assert_goes_on(Case("er", {"grow": True}, partial(nn.Linear, FEATURES, 2), appearing), tmp_path / "file")


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
@pytest.mark.parametrize("tasks", [TASKS, None], ids=["head a task", "one head"])
@pytest.mark.parametrize("limit", [None, 9])
def test_every_memory_policy_goes_on_bit_identically(policy: Any, tasks: Any, limit: int | None, tmp_path: Path) -> None:
    memory = Memory(per_task=7, policy=policy, examples=limit)
    assert_goes_on(Case("mega-1", {"memory": memory}, tasks=tasks), tmp_path / "file", (2, MIDDLE))


@pytest.mark.parametrize("limit", [None, 5000])
def test_a_memory_on_disk_goes_on_bit_identically(limit: int | None, tmp_path: Path) -> None:
    memory = Memory(per_task=7, bytes=limit, where="disk", folder=tmp_path / "memory")
    assert_goes_on(Case("mega-1", {"memory": memory}), tmp_path / "file")


@every_method
def test_mixed_precision_goes_on_bit_identically(name: str, tmp_path: Path) -> None:
    assert_goes_on(case_of(name, tasks=TASKS, settings={"precision": "bfloat16"}), tmp_path / "file", (BETWEEN, MIDDLE))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16], ids=str)
def test_modules_of_other_precisions_go_on_bit_identically(kind: torch.dtype, tmp_path: Path) -> None:
    def data(task: int, batch: int) -> tuple[Tensor, Tensor]:
        x, y = classes(task, batch)
        return x.to(kind), y

    assert_goes_on(Case("mega-1", build=lambda: net().to(kind), data=data), tmp_path / "file")


def test_tasks_with_names_go_on_in_whatever_order_they_come(tmp_path: Path) -> None:
    case = Case("mega-1", tasks={"b": [2, 3], 7: [4, 5], "a": [0, 1]})
    names = ["a", "b", 7]

    def run(learner: OnePass, begin: int, end: int) -> list[float]:
        seen = [event for event in EVENTS if not isinstance(event, str)]
        return [learner.observe(*classes(*event), task=names[event[0]]) for event in seen[begin:end]]  # type: ignore[arg-type]

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


# ---- the file


@cache
def content_of_a_file() -> bytes:
    case = Case(tasks=TASKS)
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    return packed(learner)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(content_of_a_file())
    return tmp_path / "file"


def about_in(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", content[:8])
    about: dict[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["onepass"])
    return about


def with_about(content: bytes, about: Any) -> bytes:
    return safetensors.torch.save(safetensors.torch.load(content), metadata={"onepass": about if isinstance(about, str) else json.dumps(about)})


def test_the_file_is_plain_safetensors_with_a_json_header(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safetensors.safe_open(saved, "pt") as file:
        about = json.loads(file.metadata()["onepass"])
        names = set(file.keys())
        weight = file.get_tensor("module.0.weight")
    assert about["format"] == saving.FORMAT == 1
    assert about["settings"]["method"] == "a-gem"
    assert {name.partition(".")[0] for name in names} == {"module", "learner", "memory", "sample"}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("somebody unpickles")

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


# A child that imports once and then forks, for each delay, one that saves over and over until it is killed.
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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
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


# ---- what is refused


def refusal(path: Path, module: nn.Module | None = None, **given: Any) -> str:
    """The sentence with which a load is refused, which must leave the module alone."""
    module = net() if module is None else module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(InputError) as caught:
        OnePass.load(path, module, **given)
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) > 15
    return sentence


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_file_is_refused_and_never_loads_wrongly(seed: int, saved: Path) -> None:
    content = saved.read_bytes()
    damaged = mutated(content, random.Random(seed))
    saved.write_bytes(damaged)
    if damaged != content:
        refusal(saved)


def test_a_header_with_one_wrong_digit_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    digits = [place for place in range(8, 8 + length) if chr(content[place]).isdigit()]
    for place in random.Random(1).sample(digits, 60):
        damaged = bytearray(content)
        damaged[place] = ord("1") if content[place] != ord("1") else ord("2")
        saved.write_bytes(damaged)
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
        saved.write_bytes(with_about(content, about | {"settings": {name: value for name, value in about["settings"].items() if name != key}}))
        refusal(saved)


@pytest.mark.parametrize("about", ["", "null", "[]", "7", "{}", '{"format": 1}', "[" * 5000], ids=lambda text: text[:5] or "empty")
def test_a_safetensors_file_that_is_not_ours_is_refused(about: str, saved: Path) -> None:
    saved.write_bytes(with_about(saved.read_bytes(), about))
    assert "save()" in refusal(saved) or "damaged" in refusal(saved)


def test_a_file_without_a_header_of_ours_or_no_file_at_all_is_refused(saved: Path) -> None:
    saved.write_bytes(safetensors.torch.save({"weight": torch.zeros(3)}))
    assert "damaged or not a file that save() wrote" in refusal(saved)
    for content in (b"", b"\x00" * 8, b"\xff" * 8, b"\xff" * 200, b"PK\x03\x04", b"{}", os.urandom(300)):
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


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 9)),
            "is torch.float32 of shape [9",
        ),
        (nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6, bias=False)), "'2.bias' is only in the file"),
        (nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6), nn.BatchNorm1d(6)), "is only in the module"),
        (net().double(), "torch.float64"),
        (Normed(), "only in"),
    ],
    ids=["other shape", "less", "more", "other precision", "quite another"],
)
def test_a_module_that_does_not_fit_is_refused(module: nn.Module, words: str, saved: Path) -> None:
    sentence = refusal(saved, module)
    assert sentence.startswith("the module does not fit the file")
    assert words in sentence


def test_what_the_file_holds_cannot_be_given_again(saved: Path) -> None:
    for name, value in {"seed": 3, "method": "er", "learning_rate": 0.1, "memory": Memory(), "nonsense": 1}.items():
        assert f"'{name}'" in refusal(saved, **{name: value})


def test_a_loss_or_an_optimizer_that_is_missing_or_too_much_is_refused(saved: Path) -> None:
    assert "leave out loss=" in refusal(saved, loss=square)
    module = net()
    assert "leave out optimizer=" in refusal(saved, module, optimizer=optim.SGD(module.parameters(), lr=0.1))
    case = Case(data=values, loss=square, optimizer=OPTIMIZERS["Adam"])
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(saved)
    module = net()
    adam = optim.Adam(module.parameters(), lr=0.1)
    assert "give loss=" in refusal(saved, module, optimizer=adam)
    assert "give optimizer=" in refusal(saved, loss=square)
    assert "not the module's" in refusal(saved, loss=square, optimizer=adam)


@pytest.mark.parametrize(("other", "words"), [(partial(optim.SGD, lr=0.1), "Adam"), (grouped, "groups"), (partial(optim.AdamW, lr=0.1), "Adam")])
def test_another_optimizer_is_refused(other: Callable[[Any], optim.Optimizer], words: str, saved: Path) -> None:
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


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("call", "code"), [("os.fsync", errno.ENOSPC), ("os.replace", errno.EACCES), ("tempfile.mkstemp", errno.EROFS), ("os.fsync", errno.EIO)]
)
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
    for path in (saved / "below a file", saved.parent / "missing" / "file", saved.parent, Path("/dev/full")):
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
