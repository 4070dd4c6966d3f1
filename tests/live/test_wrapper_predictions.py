"""What a learner predicts, what it draws, and the steps that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onepass import Memory, OnePass
from tests.live.modules import (
    CLASSES,
    LIVE,
    Attending,
    alike,
    equal,
    gradient,
    plainly,
    sgd,
    spectral,
    stream,
)
from tests.toys import FEATURES, Asking, Dropped, Normed, small_net

# ---- random numbers


@pytest.mark.parametrize("build", [Dropped, lambda: Attending(0.3)], ids=["dropout", "transformer"])
def test_layers_that_draw_depend_on_the_seed_alone(build: Callable[[], nn.Module]) -> None:
    first = build()
    same, other = copy.deepcopy(first), copy.deepcopy(first)
    for module, seed in ((first, 3), (same, 3), (other, 4)):
        torch.manual_seed(id(module))
        learner = OnePass(module, learning_rate=0.1, seed=seed)
        before = torch.get_rng_state()
        for task in range(2):
            for x, y in stream(seed=task):
                learner.observe(x, y)
            learner.end_task()
        assert torch.equal(before, torch.get_rng_state())
    assert equal(first, same)
    assert not equal(first, other)


class Noisy(nn.Module):
    """It draws in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + 0.1 * torch.randn_like(x))
        return out


def attending() -> nn.Module:
    return Attending(0.3)


@pytest.mark.parametrize(
    "build", [Normed, Dropped, attending, Noisy, spectral], ids=lambda build: build.__name__
)
def test_questions_change_nothing(build: Callable[[], nn.Module]) -> None:
    module = build()
    learner = OnePass(module, optimizer=torch.optim.Adam(module.parameters()))
    x, y = stream()[0]
    for mode in (True, False):
        learner.observe(x, y)
        module.train(mode)
        next(iter(module.children())).train(not mode)
        modes = [part.training for part in module.modules()]
        before, given = copy.deepcopy(module.state_dict()), x.clone()
        rng_state = torch.get_rng_state()
        learner.predict(x)
        learner.scores(x)
        learner.report()
        assert [part.training for part in module.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert torch.equal(rng_state, torch.get_rng_state())
        assert torch.equal(x, given)
        module.train()


def test_a_first_batch_leaves_torchs_generator_alone() -> None:
    rng_state = torch.get_rng_state()
    module = Noisy()
    torch.set_rng_state(rng_state)
    OnePass(module, learning_rate=0.1).observe(*stream()[0])
    assert torch.equal(rng_state, torch.get_rng_state())


def test_answers_are_those_of_the_module_in_evaluation() -> None:
    module = Normed()
    learner = OnePass(module, learning_rate=0.1)
    for x, y in stream():
        learner.observe(x, y)
    twin = copy.deepcopy(module).eval()
    assert torch.equal(learner.scores(x), twin(x))
    assert torch.equal(learner.predict(x), twin(x).argmax(1))


# ---- A-GEM


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


@pytest.mark.parametrize(
    "method", ["a-gem", "gem", "s-gem", "er", "mega-1", "mega-2", "ewc", "pi", "mas", "rwalk"]
)
def test_without_a_past_every_method_is_plain_sgd(method: str) -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, method, learning_rate=0.1)
    losses = [learner.observe(x, y) for x, y in stream()]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), stream()), rel=1e-6)
    assert alike(module, twin)


def contrary(batches: int, task: int, hint: float = 0.5) -> list[tuple[Tensor, Tensor]]:
    """Tasks whose labels contradict each other, but for a hint in one feature."""
    data = []
    for x, _ in stream(batches, seed=task):
        y = (x[:, 0] > 0).long()
        x[:, 1] = hint if task else -hint
        data.append((x, 1 - y if task else y))
    return data


@pytest.mark.parametrize("build", [small_net, Asking], ids=lambda b: b.__name__)
def test_a_step_of_a_gem_is_its_formula_and_does_not_raise_the_loss_on_the_memory(
    build: Callable[[], nn.Module],
) -> None:
    module, rate = build(), 1e-3
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    learner = OnePass(module, optimizer=optimizer, memory=Memory(per_task=30))
    for x, y in contrary(20, 0):
        learner.observe(x, y)
    learner.end_task()
    assert learner.memory is not None
    optimizer.param_groups[0]["lr"] = rate
    corrected = 0
    for x, y in [*contrary(20, 1), *contrary(10, 0)]:
        # All of it is drawn, since it is smaller than a reference batch.
        past = learner.memory.take(torch.tensor(sorted(learner.memory.rows.visible)))
        reference, g = gradient(module, past.x[0], past.slots[0]), gradient(module, x, y)
        product = float(g @ reference)
        expected = g - product / float(reference @ reference) * reference if product < 0 else g
        before, loss = flat(module), cross_entropy(module(past.x[0]), past.slots[0]).item()
        learner.observe(x, y)
        corrected += product < 0
        step = before - flat(module)
        assert torch.allclose(step, rate * expected, atol=1e-6)
        # A step is a difference of rounded numbers.
        assert float(step @ reference) >= -1e-7 * float(reference.norm())
        assert cross_entropy(module(past.x[0]), past.slots[0]).item() <= loss + 1e-5
    assert 5 < corrected < 30
    assert learner.violations == corrected


def test_a_gem_remembers_what_van_forgets() -> None:
    right = {}
    for method in ("van", "a-gem"):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, 2))
        learner = OnePass(module, method, learning_rate=0.1)
        for task in range(2):
            for x, y in contrary(150, task):
                learner.observe(x, y)
            learner.end_task()
        shares = [(learner.predict(x) == y).float().mean().item() for x, y in contrary(150, 0)]
        right[method] = sum(shares) / 150
    assert right["a-gem"] > right["van"] + 0.1


@pytest.mark.parametrize("method", ["van", "a-gem", "gem", "s-gem", "mega-1", "mega-2", "pi"])
def test_the_loss_is_that_of_the_batch_before_the_step(method: str) -> None:
    module = small_net(CLASSES)
    learner = OnePass(module, method, learning_rate=0.1)
    for task in range(2):
        for x, y in stream(seed=task):
            expected = cross_entropy(module(x), y).item()
            assert learner.observe(x, y) == pytest.approx(expected, rel=1e-5)
        learner.end_task()


# ---- tasks with heads


# ---- precision, places


@pytest.mark.parametrize("method", LIVE)
def test_mixed_precision_keeps_parameters_in_full_precision(method: str) -> None:
    module = small_net(CLASSES)
    seen: list[torch.dtype] = []
    module[0].register_forward_hook(lambda _, __, outputs: seen.append(outputs.dtype))  # type: ignore[index]
    twin = copy.deepcopy(small_net(CLASSES))
    twin.load_state_dict(module.state_dict())
    mixed, full = (
        OnePass(m, method, learning_rate=0.1, precision=p, tasks=[[0, 1], [2, 3]])
        for m, p in ((module, "bfloat16"), (twin, "float32"))
    )
    for classes in (range(2), range(2, 4)):
        data = stream(4, classes=classes)
        for x, y in data:
            assert mixed.observe(x, y) == pytest.approx(full.observe(x, y), rel=0.1)
        for learner in (mixed, full):
            learner.end_task(again=data if learner.learner.needs.second_pass else None)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert torch.allclose(flat(module), flat(twin), atol=0.05)
    assert not torch.equal(flat(module), flat(twin))
    assert set(mixed.predict(x, task=1).tolist()) <= {2, 3}


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("method", ["a-gem", "gem", "er"])
def test_where_the_memory_lies_makes_no_difference(method: str, where: Any, tmp_path: Path) -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    elsewhere = Memory(per_task=12, where=where, folder=tmp_path if where == "disk" else None)
    learner = OnePass(module, method, learning_rate=0.1, memory=elsewhere)
    other = OnePass(twin, method, learning_rate=0.1, memory=Memory(per_task=12))
    for task in range(3):
        for x, y in stream(seed=task):
            assert learner.observe(x, y) == other.observe(x, y)
        learner.end_task()
        other.end_task()
    assert equal(module, twin)
    assert learner.memory is not None
    assert learner.memory.size == 36


def test_inputs_of_all_kinds_of_numbers_are_remembered_as_they_are(tmp_path: Path) -> None:
    class Any8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x.float())
            return out

    for dtype in (torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64):
        learner = OnePass(Any8(), learning_rate=0.1, memory=Memory(where="disk", folder=tmp_path))
        data = [((x > 0).to(dtype), y) for x, y in stream(2)]
        for x, y in data:
            learner.observe(x, y)
        assert learner.memory is not None
        assert learner.memory.storage is not None
        kept = learner.memory.storage.columns["x"][: learner.memory.size]
        assert kept.dtype == dtype
        assert torch.equal(kept, torch.cat([x for x, _ in data]))


def test_a_batch_may_be_overwritten_afterwards() -> None:
    one = small_net(CLASSES)
    other = copy.deepcopy(one)
    learner, twin = OnePass(one, learning_rate=0.1), OnePass(other, learning_rate=0.1)
    buffer, labels = np.zeros((8, FEATURES), np.float32), np.zeros(8, np.int64)
    for task in range(2):
        for x, y in stream(seed=task):
            buffer[:], labels[:] = x.numpy(), y.numpy()
            learner.observe(buffer, labels)
            twin.observe(x, y)
        learner.end_task()
        twin.end_task()
    assert equal(one, other)


def test_counters_count() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)

    def counted() -> tuple[object, ...]:
        return learner.steps, learner.segment, learner.batches, learner.task

    assert learner.violations == 0
    assert counted() == (0, 0, 0, None)
    for x, y in stream(3):
        learner.observe(x, y, task="a")
    assert counted() == (3, 0, 3, "a")
    learner.observe(x, y, task="b")
    assert counted() == (4, 1, 1, "b")
    learner.end_task()
    assert counted() == (4, 2, 0, None)
    assert OnePass(small_net(), "van", learning_rate=0.1).violations is None
