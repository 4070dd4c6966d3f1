"""Any module of one's own learns in place: as in a plain loop of PyTorch where a method does nothing else, and by the method where it does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from onepass import Memory, OnePass
from onepass.learners import METHODS
from onepass.models.resnet import ResNet
from toys import FEATURES, Asking, Dropped, Normed, Tied, small_net

CLASSES = 4
LIVE = [name for name, found in METHODS.items() if not found.joined and not found.learner.own_network]
Pair = tuple[Any, Tensor]


def stream(batches: int = 6, size: int = 8, classes: range = range(CLASSES), seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, FEATURES, generator=generator), torch.randint(classes.start, classes.stop, (size,), generator=generator))
        for _ in range(batches)
    ]


def plainly(module: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Pair], loss: Callable[..., Tensor] = cross_entropy) -> list[float]:
    """The loop that everybody writes; the losses before the steps."""
    losses = []
    for x, y in data:
        module.train()
        optimizer.zero_grad()
        outputs = module(**x) if isinstance(x, dict) else module(*x) if isinstance(x, tuple) else module(x)
        value = loss(outputs, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- modules of all kinds


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.unflatten(1, (2, 3)))[0][:, -1])
        return out


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.lift, self.encoder, self.head = nn.Linear(1, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.lift(x[:, :, None])).mean(1))
        return out


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet(2, CLASSES, (1, 1), channels=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unflatten(1, (1, 2, 3)))
        return out


class Counting(nn.Module):
    """Python state that decides what it does: every second pass in training goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.passes = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.one(x) if self.passes % 2 else self.two(x)
        return out


class Half(nn.Module):
    """A part of it gets no gradient on some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.high(x) if x[0, 0] > 0 else self.low(x)
        return out


class Saving(nn.Module):
    """It forgets activations and computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return out


def normed_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, CLASSES))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 5)), nn.Tanh(), nn.Linear(5, CLASSES))


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    module[2].requires_grad_(False)
    return module


def pure() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 3, 3, padding=1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(3 * FEATURES, CLASSES)
    )


MODULES: list[Callable[[], nn.Module]] = [
    small_net,
    Normed,
    Tied,
    Asking,
    Reader,
    Attending,
    Seeing,
    Counting,
    Half,
    Saving,
    normed_weights,
    spectral,
    partly_frozen,
    pure,
]


@pytest.mark.parametrize("build", MODULES, ids=lambda b: b.__name__)
def test_van_is_the_plain_loop_for_any_module(build: Callable[[], nn.Module]) -> None:
    module = build()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    losses = [learner.observe(x, y) for x, y in stream()]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), stream()), rel=1e-6)
    assert equal(module, twin)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("build", [Normed, pure], ids=lambda b: b.__name__)
def test_van_is_the_plain_loop_for_any_optimizer(name: str, build: Callable[[], nn.Module]) -> None:
    module = build()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", optimizer=OPTIMIZERS[name](module.parameters()))
    for x, y in stream():
        learner.observe(x, y)
    plainly(twin, OPTIMIZERS[name](twin.parameters()), stream())
    assert equal(module, twin)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("build", [Tied, Half], ids=lambda b: b.__name__)
@pytest.mark.parametrize("name", ["momentum", "Adam", "AdamW"])
def test_an_optimizer_passes_over_parameters_without_a_gradient_as_in_the_plain_loop(name: str, build: Callable[[], nn.Module]) -> None:
    module = build()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", optimizer=OPTIMIZERS[name](module.parameters()))
    for x, y in stream():
        learner.observe(x, y)
    plainly(twin, OPTIMIZERS[name](twin.parameters()), stream())
    assert equal(module, twin)


def test_learning_rates_of_groups_and_a_schedule_are_those_of_the_plain_loop() -> None:
    def made(module: Normed) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        groups = [{"params": module.conv.parameters(), "lr": 0.3}, {"params": [*module.norm.parameters(), *module.fc.parameters()]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    module = Normed()
    twin = copy.deepcopy(module)
    (optimizer, schedule), (plain, other) = made(module), made(twin)
    learner = OnePass(module, "van", optimizer=optimizer)
    for x, y in stream():
        learner.observe(x, y)
        schedule.step()
        plainly(twin, plain, [(x, y)])
        other.step()
    assert equal(module, twin)


def test_an_optimizer_of_some_parameters_moves_only_these() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", optimizer=torch.optim.Adam(module.fc.parameters(), lr=0.01))
    for x, y in stream():
        learner.observe(x, y)
    plainly(twin, torch.optim.Adam(twin.fc.parameters(), lr=0.01), stream())
    assert equal(module, twin)


def test_van_is_the_plain_loop_for_a_loss_of_ones_own() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    data = [(x, torch.cat([x, x], 1)[:, :8]) for x, _ in stream()]
    learner = OnePass(module, "van", learning_rate=0.1, loss=mse_loss)
    losses = [learner.observe(x, y) for x, y in data]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), data, mse_loss), rel=1e-6)
    assert equal(module, twin)


def test_outputs_may_be_of_any_kind_for_a_loss_of_ones_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"mean": self.mean(x), "spread": self.spread(x)}

    def likelihood(outputs: dict[str, Tensor], y: Tensor) -> Tensor:
        return ((outputs["mean"] - y) / outputs["spread"].exp()).square().mean() + 2 * outputs["spread"].mean()

    module = Two()
    twin = copy.deepcopy(module)
    data = [(x, x[:, :1]) for x, _ in stream()]
    learner = OnePass(module, "van", learning_rate=0.1, loss=likelihood)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data, likelihood)
    assert equal(module, twin)
    answer = learner.predict(data[0][0])
    assert torch.equal(answer["mean"], twin.eval()(data[0][0])["mean"])  # type: ignore[call-overload]


@pytest.mark.parametrize("build", [Normed, pure], ids=lambda b: b.__name__)
def test_van_is_the_plain_loop_in_double_precision(build: Callable[[], nn.Module]) -> None:
    module = build().double()
    twin = copy.deepcopy(module)
    data = [(x.double(), y) for x, y in stream()]
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert equal(module, twin)


def test_a_module_in_half_precision_learns_while_its_gradient_is_finite() -> None:
    module = nn.Linear(FEATURES, CLASSES).half()
    twin = copy.deepcopy(module)
    data = [(300 * x.half(), y) for x, y in stream(2)]  # squares of such gradients are beyond float16
    learner = OnePass(module, "van", learning_rate=0.001)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, torch.optim.SGD(twin.parameters(), lr=0.001), data)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, its, atol=0.01)


def test_batches_may_have_any_size() -> None:
    module = pure()
    twin = copy.deepcopy(module)
    data = [(x[:n], y[:n]) for (x, y), n in zip(stream(7), [8, 1, 5, 8, 8, 2, 1], strict=True)]
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert equal(module, twin)


@pytest.mark.parametrize("names", [True, False], ids=["dict", "tuple"])
def test_several_inputs_are_passed_as_forward_wants_them(names: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.words = nn.Linear(FEATURES, CLASSES), nn.Embedding(5, CLASSES)

        def forward(self, left: Tensor, words: Tensor, scale: float = 2.0) -> Tensor:
            out: Tensor = self.left(left) + scale * self.words(words).mean(1)
            return out

    module = Both()
    twin = copy.deepcopy(module)
    pairs = [(x, torch.randint(0, 5, (len(x), 3))) for x, _ in stream()]
    data = [({"left": a, "words": b} if names else (a, b), y) for (a, b), (_, y) in zip(pairs, stream(), strict=True)]
    learner = OnePass(module, "a-gem", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert equal(module, twin)
    learner.end_task()
    for x, y in data:  # and from the memory
        learner.observe(x, 3 - y)
    backwards = {"words": pairs[0][1], "left": pairs[0][0]} if names else pairs[0]
    assert torch.equal(learner.scores(backwards), module.eval()(*pairs[0]))


def test_arrays_are_as_good_as_tensors() -> None:
    one = small_net(CLASSES)
    other = copy.deepcopy(one)
    learner, twin = OnePass(one, learning_rate=0.1), OnePass(other, learning_rate=0.1)
    for x, y in stream():
        assert learner.observe(x.numpy(), y.numpy()) == twin.observe(x, y)
    assert equal(one, other)
    x, _ = stream()[0]
    assert torch.equal(learner.predict(x.numpy()), twin.predict(x))


def test_an_array_that_is_read_backwards_is_as_good_as_another() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = stream()[0]
    expected = cross_entropy(learner.module(x), y).item()
    assert learner.observe(x.numpy()[::-1], y.numpy()[::-1]) == pytest.approx(expected, rel=1e-5)


def test_the_module_stays_its_own() -> None:
    module = Tied()
    names, objects = list(module.state_dict()), list(module.parameters())
    before = copy.deepcopy(module.state_dict())
    learner = OnePass(module, learning_rate=0.1)
    assert list(module.state_dict()) == names
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in names)
    for x, y in stream():
        learner.observe(x, y)
    assert learner.module is module
    assert all(a is b for a, b in zip(objects, module.parameters(), strict=True))
    assert module.second.weight is module.first.weight
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in objects)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = Tied()
    fresh.load_state_dict(torch.load(file))
    assert equal(fresh, module)
    copied = copy.deepcopy(module)
    learner.observe(*stream()[0])
    assert equal(copied, fresh)
    assert not equal(copied, module)


def test_what_the_user_does_with_the_module_in_between_does_not_matter() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner, quiet = (OnePass(m, optimizer=torch.optim.Adam(m.parameters())) for m in (module, twin))
    for x, y in stream():
        module.eval()
        module(x).sum().backward()
        learner.observe(x, y)
        quiet.observe(x, y)
    assert equal(module, twin)
    assert module.training


def test_frozen_parameters_do_not_move_and_others_do() -> None:
    module = partly_frozen()
    before = copy.deepcopy(module.state_dict())
    learner = OnePass(module, learning_rate=0.1)
    for task in range(2):
        for x, y in stream(seed=task):
            learner.observe(x, y)
        learner.end_task()
    moved = {name: not torch.equal(value, before[name]) for name, value in module.state_dict().items()}
    assert moved == {name: not name.startswith("2.") for name in before}


def test_hooks_fire() -> None:
    module = pure()
    fired: list[str] = []
    learner = OnePass(module, learning_rate=0.1)
    for x, y in stream(3):
        learner.observe(x, y)
    handles = [
        module[4].register_forward_pre_hook(lambda *_: fired.append("before")),
        module[4].register_forward_hook(lambda *_: fired.append("after")),
        module[4].register_full_backward_hook(lambda *_: fired.append("back")),
    ]
    learner.observe(*stream()[0])
    assert fired == ["before", "after", "back"]
    for handle in handles:
        handle.remove()
    learner.observe(*stream()[0])
    assert len(fired) == 3


def test_a_hook_that_changes_outputs_changes_what_is_learnt() -> None:
    module = pure()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    optimizer = sgd(twin.parameters())
    for step, (x, y) in enumerate(stream()):
        if step == 3:
            for one in (module, twin):
                one[2].register_forward_hook(lambda _, __, outputs: 2 * outputs)
        learner.observe(x, y)
        plainly(twin, optimizer, [(x, y)])
    assert equal(module, twin)


def test_a_hook_of_a_parameter_changes_what_is_learnt() -> None:
    module = pure()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    optimizer = sgd(twin.parameters())
    for step, (x, y) in enumerate(stream()):
        if step == 3:
            for one in (module, twin):
                one[4].weight.register_hook(lambda gradient: gradient / 2)
        learner.observe(x, y)
        plainly(twin, optimizer, [(x, y)])
    assert equal(module, twin)


def change_slope(module: nn.Module) -> None:
    module[2].negative_slope = 0.5  # type: ignore[index,assignment]


def change_padding(module: nn.Module) -> None:
    module[1].padding_mode = "circular"  # type: ignore[index,assignment]


def change_layer(module: nn.Module) -> None:
    module[2] = nn.Tanh()  # type: ignore[operator]


def change_forward(module: nn.Module) -> None:
    module[2].forward = torch.sin  # type: ignore[index,assignment]


@pytest.mark.parametrize("change", [change_slope, change_padding, change_layer, change_forward], ids=lambda f: f.__name__)
def test_what_is_changed_in_the_module_counts_from_the_next_batch_on(change: Callable[[nn.Module], None]) -> None:
    module = pure()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    optimizer = sgd(twin.parameters())
    for step, (x, y) in enumerate(stream()):
        if step == 3:
            change(module)
            change(twin)
        learner.observe(x, y)
        plainly(twin, optimizer, [(x, y)])
    assert equal(module, twin)


class Rude(nn.Module):
    """It writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mul_(0.5).add_(1))
        return out


@pytest.mark.parametrize("where", ["module", "cpu"])
@pytest.mark.parametrize("build", [Rude, lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(FEATURES, CLASSES))], ids=["Rude", "dropout"])
def test_a_module_that_writes_into_its_inputs_does_not_spoil_what_is_remembered(build: Callable[[], nn.Module], where: Any) -> None:
    learner = OnePass(build(), learning_rate=0.1, memory=Memory(per_task=100, where=where))
    data = stream()
    for x, y in data[:3]:
        learner.observe(x.clone(), y)
    learner.end_task()
    for x, y in data[3:]:
        learner.observe(x.clone(), y)
    learner.end_task()
    assert learner.memory is not None
    assert learner.memory.storage is not None
    assert torch.equal(learner.memory.storage.columns["x"][: learner.memory.size], torch.cat([x for x, _ in data]))


def test_a_module_that_writes_into_its_inputs_learns_as_in_the_plain_loop() -> None:
    module = Rude()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in stream():
        learner.observe(x.clone(), y)
    plainly(twin, sgd(twin.parameters()), [(x.clone(), y) for x, y in stream()])
    assert equal(module, twin)


# ---- chance


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


@pytest.mark.parametrize(
    "build", [Normed, Dropped, lambda: Attending(0.3), Noisy, spectral], ids=["Normed", "Dropped", "Attending", "Noisy", "spectral"]
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
        before, luck, given = copy.deepcopy(module.state_dict()), torch.get_rng_state(), x.clone()
        learner.predict(x)
        learner.scores(x)
        learner.report()
        assert [part.training for part in module.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert torch.equal(luck, torch.get_rng_state())
        assert torch.equal(x, given)
        module.train()


def test_a_first_batch_leaves_torchs_generator_alone() -> None:
    luck = torch.get_rng_state()
    module = Noisy()
    torch.set_rng_state(luck)
    OnePass(module, learning_rate=0.1).observe(*stream()[0])
    assert torch.equal(luck, torch.get_rng_state())


def test_answers_are_those_of_the_module_in_evaluation() -> None:
    module = Normed()
    learner = OnePass(module, learning_rate=0.1)
    for x, y in stream():
        learner.observe(x, y)
    twin = copy.deepcopy(module).eval()
    assert torch.equal(learner.scores(x), twin(x))
    assert torch.equal(learner.predict(x), twin(x).argmax(1))


# ---- A-GEM


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    twin = copy.deepcopy(module).train()
    found = torch.autograd.grad(cross_entropy(twin(x), y), list(twin.parameters()))
    return torch.cat([g.reshape(-1) for g in found])


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


@pytest.mark.parametrize("method", ["a-gem", "gem", "s-gem", "er", "mega-1", "mega-2", "ewc", "pi", "mas", "rwalk"])
def test_without_a_past_every_method_is_plain_sgd(method: str) -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, method, learning_rate=0.1)
    losses = [learner.observe(x, y) for x, y in stream()]
    assert losses == pytest.approx(plainly(twin, sgd(twin.parameters()), stream()), rel=1e-6)
    assert equal(module, twin)


def contrary(batches: int, task: int, hint: float = 0.5) -> list[tuple[Tensor, Tensor]]:
    """Tasks whose labels contradict each other, but for a hint in one feature."""
    data = []
    for x, _ in stream(batches, seed=task):
        y = (x[:, 0] > 0).long()
        x[:, 1] = hint if task else -hint
        data.append((x, 1 - y if task else y))
    return data


@pytest.mark.parametrize("build", [small_net, Asking], ids=lambda b: b.__name__)
def test_a_step_of_a_gem_is_its_formula_and_does_not_raise_the_loss_on_the_memory(build: Callable[[], nn.Module]) -> None:
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
        past = learner.memory.take(torch.tensor(sorted(learner.memory._visible)))  # all of it is drawn, since it is smaller than a reference batch
        reference, g = gradient(module, past.x[0], past.slots[0]), gradient(module, x, y)
        product = float(g @ reference)
        expected = g - product / float(reference @ reference) * reference if product < 0 else g
        before, loss = flat(module), cross_entropy(module(past.x[0]), past.slots[0]).item()
        learner.observe(x, y)
        corrected += product < 0
        step = before - flat(module)
        assert torch.allclose(step, rate * expected, atol=1e-6)
        assert float(step @ reference) >= -1e-7 * float(reference.norm())  # a step is a difference of rounded numbers
        assert cross_entropy(module(past.x[0]), past.slots[0]).item() <= loss + 1e-5
    assert 5 < corrected < 30
    assert learner.violations == corrected


def test_a_gem_remembers_what_van_forgets() -> None:
    right = {}
    for method in ("van", "a-gem"):
        torch.manual_seed(1)
        learner = OnePass(nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, 2)), method, learning_rate=0.1)
        for task in range(2):
            for x, y in contrary(150, task):
                learner.observe(x, y)
            learner.end_task()
        right[method] = sum((learner.predict(x) == y).float().mean().item() for x, y in contrary(150, 0)) / 150
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


@pytest.mark.parametrize("method", ["van", "a-gem"])
def test_only_the_outputs_of_the_task_learn(method: str) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6))
    learner = OnePass(module, method, learning_rate=0.1, tasks={"a": [0, 1], "b": [2, 3], "c": [4, 5]})
    before = copy.deepcopy(module[2].state_dict())
    for x, y in stream(classes=range(2, 4)):
        learner.observe(x, y, task="b")
    for name, value in module[2].state_dict().items():
        moved = [not torch.equal(row, old) for row, old in zip(value, before[name], strict=True)]
        assert moved == [False, False, True, True, False, False]


def test_a_task_with_a_head_is_the_plain_loop_on_its_outputs() -> None:
    module = Normed()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1, tasks=[[0, 1], [2, 3, 4]])
    data = stream(classes=range(2, 5))
    losses = [learner.observe(x, y, task=1) for x, y in data]
    expected = plainly(twin, sgd(twin.parameters()), data, lambda outputs, y: cross_entropy(outputs[:, 2:5], y - 2))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("method", LIVE)
def test_an_answer_for_a_task_is_one_of_its_classes(method: str) -> None:
    learner = OnePass(small_net(6), method, learning_rate=0.1, tasks={"a": [0, 1], "b": [4, 2], "c": [5, 3]})
    for name, classes in (("a", [0, 1]), ("b", [4, 2])):
        data = [(x, torch.tensor(classes)[y]) for x, y in stream(classes=range(2))]
        for x, y in data:
            learner.observe(x, y, task=name)
        learner.end_task(again=data if learner.learner.needs_review else None)
    for name, classes in (("a", {0, 1}), ("b", {2, 4})):
        assert set(learner.predict(x, task=name).tolist()) <= classes
        if method != "icarl":
            assert torch.equal(learner.scores(x, task=name), learner.module(x))


@pytest.mark.parametrize("method", LIVE)
def test_a_module_may_have_more_outputs_than_the_tasks_have_classes(method: str) -> None:
    module = small_net(7)
    before = copy.deepcopy(module[2].state_dict())  # type: ignore[index]
    learner = OnePass(module, method, learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    for classes in (range(2), range(2, 4)):
        data = stream(3, classes=classes)
        for x, y in data:
            learner.observe(x, y)
        learner.end_task(again=data if learner.learner.needs_review else None)
    assert set(learner.predict(x, task=1).tolist()) <= {2, 3}
    assert all(torch.equal(value[4:], before[name][4:]) for name, value in module[2].state_dict().items())  # type: ignore[index]


@pytest.mark.parametrize("policy", ["class-balanced", "class-reservoir", "ring", "reservoir"])
def test_every_policy_goes_with_heads(policy: Any) -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, tasks=[[0, 1], [2, 3]], memory=Memory(per_task=10, policy=policy))
    for classes in (range(2), range(2, 4)):
        for x, y in stream(classes=classes):
            learner.observe(x, y)
        learner.end_task()
    assert learner.memory is not None
    assert learner.memory.counts() == {0: 10, 1: 10}


def test_a_new_task_ends_the_one_before() -> None:
    one, other = small_net(CLASSES), small_net(CLASSES)
    other.load_state_dict(one.state_dict())
    named, counted = OnePass(one, learning_rate=0.1), OnePass(other, learning_rate=0.1)
    for task in ("first", "second", "third"):
        for x, y in stream(seed=len(task)):
            named.observe(x, y, task=task)
            counted.observe(x, y)
        assert (named.segment, named.task) == (counted.segment, task)
        counted.end_task()
    assert equal(one, other)


# ---- precision, places


@pytest.mark.parametrize("method", LIVE)
def test_mixed_precision_keeps_parameters_in_full_precision(method: str) -> None:
    module = small_net(CLASSES)
    seen: list[torch.dtype] = []
    module[0].register_forward_hook(lambda _, __, outputs: seen.append(outputs.dtype))  # type: ignore[index]
    twin = copy.deepcopy(small_net(CLASSES))
    twin.load_state_dict(module.state_dict())
    mixed, full = (OnePass(m, method, learning_rate=0.1, precision=p, tasks=[[0, 1], [2, 3]]) for m, p in ((module, "bfloat16"), (twin, "float32")))
    for classes in (range(2), range(2, 4)):
        data = stream(4, classes=classes)
        for x, y in data:
            assert mixed.observe(x, y) == pytest.approx(full.observe(x, y), rel=0.1)
        for learner in (mixed, full):
            learner.end_task(again=data if learner.learner.needs_review else None)
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
    learner, other = (
        OnePass(module, method, learning_rate=0.1, memory=elsewhere),
        OnePass(twin, method, learning_rate=0.1, memory=Memory(per_task=12)),
    )
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
    assert (learner.steps, learner.violations, learner.segment, learner.batches, learner.task) == (0, 0, 0, 0, None)
    for x, y in stream(3):
        learner.observe(x, y, task="a")
    assert (learner.steps, learner.segment, learner.batches, learner.task) == (3, 0, 3, "a")
    learner.observe(x, y, task="b")
    assert (learner.steps, learner.segment, learner.batches, learner.task) == (4, 1, 1, "b")
    learner.end_task()
    assert (learner.steps, learner.segment, learner.batches, learner.task) == (4, 2, 0, None)
    assert OnePass(small_net(), "van", learning_rate=0.1).violations is None
