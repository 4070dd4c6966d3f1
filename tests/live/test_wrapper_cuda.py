"""A module of one's own on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onepass import InputError, Memory, OnePass
from onepass.learners import METHODS
from tests.toys import FEATURES, Dropped, Normed, small_net

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

TASKS = [[0, 1], [2, 3], [4, 5]]
ABLE = [
    name
    for name, method in METHODS.items()
    if not method.joined and not method.learner.needs.own_network
]


def stream(device: str = "cuda") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def batch(task: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (
            torch.randn(10, FEATURES, generator=generator),
            torch.randint(0, 2, (10,), generator=generator) + 2 * task,
        )
        return x.to(device), y.to(device)

    return [[batch(task) for _ in range(12)] for task in range(3)]


def learn(learner: OnePass, device: str = "cuda") -> None:
    for task, batches in enumerate(stream(device)):
        for x, y in batches:
            learner.observe(x, y, task)
        learner.end_task(again=batches)


def wrapped(module: nn.Module, method: str, memory: Memory | None = None) -> OnePass:
    settings = {"exemplars": 30} if method == "icarl" else {"memory": memory or Memory(per_task=20)}
    return OnePass(module, method, learning_rate=0.05, tasks=TASKS, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ABLE)
def test_a_module_on_the_gpu_learns_what_it_learns_on_the_cpu(method: str) -> None:
    start = small_net().state_dict()
    ended = []
    for device in ("cpu", "cuda"):
        module = small_net()
        module.load_state_dict(start)
        learner = wrapped(module.to(device), method)
        learn(learner, device)
        ended.append(
            (
                torch.cat([p.detach().cpu().flatten() for p in module.parameters()]),
                learner.violations,
            )
        )
    assert torch.allclose(ended[0][0], ended[1][0], atol=2e-3)
    assert ended[0][1] == ended[1][1] or abs(ended[0][1] - ended[1][1]) <= 2  # type: ignore[operator]


@pytest.mark.parametrize("where", ["module", "cpu", "disk"])
def test_where_the_memory_lies_does_not_matter(where: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    start = Normed().state_dict()
    ended = []
    for place in ("module", where):
        module = Normed()
        module.load_state_dict(start)
        memory = Memory(per_task=20, where=place, folder=tmp_path if place == "disk" else None)  # type: ignore[arg-type]
        learner = wrapped(module.cuda(), "a-gem", memory)
        learn(learner)
        assert learner.memory is not None
        assert learner.memory.storage is not None
        assert learner.memory.storage.columns["x"].device.type == (
            "cuda" if place == "module" else "cpu"
        )
        ended.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(*ended, atol=1e-4)


def test_batches_may_come_from_the_cpu() -> None:
    module = small_net().cuda()
    learn(wrapped(module, "a-gem"), device="cpu")
    assert all(p.is_cuda for p in module.parameters())


def test_mixed_precision_steps_on_full_precision_parameters() -> None:
    module = small_net().cuda()
    learner = OnePass(module, "a-gem", learning_rate=0.05, tasks=TASKS, precision="bfloat16")
    learn(learner)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_module_that_was_moved_is_noticed_and_nothing_is_lost() -> None:
    module = small_net()
    learner = OnePass(module, "a-gem", learning_rate=0.05)
    x, y = torch.randn(4, FEATURES), torch.tensor([0, 1, 2, 3])
    learner.observe(x, y)
    module.cuda()
    with pytest.raises(InputError, match="moved from cpu to cuda"):
        learner.observe(x, y)
    module.cpu()
    with pytest.raises(InputError, match="created anew"):
        learner.observe(x, y)
    assert learner.steps == 1


@pytest.mark.parametrize("build", [Dropped, Normed])
def test_what_was_saved_on_the_gpu_goes_on_there_and_on_the_cpu(
    build: type[nn.Module], tmp_path: Path
) -> None:
    module = build().cuda()
    learner = OnePass(
        module,
        "a-gem",
        tasks=TASKS,
        optimizer=torch.optim.Adam(module.parameters()),
        memory=Memory(per_task=20),
    )
    batches = stream()
    for x, y in batches[0]:
        learner.observe(x, y)
    learner.end_task()
    learner.save(tmp_path / "saved")
    for device in ("cuda", "cpu"):
        twin = build().to(device)
        other = OnePass.load(
            tmp_path / "saved", twin, optimizer=torch.optim.Adam(twin.parameters())
        )
        losses = [other.observe(x, y) for x, y in batches[1]]
        assert len(losses) == 12
        if device == "cuda":
            assert losses == pytest.approx([learner.observe(x, y) for x, y in batches[1]], rel=1e-4)
