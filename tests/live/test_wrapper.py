"""A module of one's own stays what it is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onepass import InputError, Memory, OnePass
from tests.live.modules import CLASSES, alike, equal, partly_frozen, plainly, pure, sgd, stream
from tests.toys import FEATURES, Normed, Tied, small_net


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
    data = [
        ({"left": a, "words": b} if names else (a, b), y)
        for (a, b), (_, y) in zip(pairs, stream(), strict=True)
    ]
    learner = OnePass(module, "a-gem", learning_rate=0.1)
    for x, y in data:
        learner.observe(x, y)
    plainly(twin, sgd(twin.parameters()), data)
    assert alike(module, twin)
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
    learner, quiet = (
        OnePass(m, optimizer=torch.optim.Adam(m.parameters())) for m in (module, twin)
    )
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
    moved = {
        name: not torch.equal(value, before[name]) for name, value in module.state_dict().items()
    }
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


def hook_outputs(module: nn.Module) -> None:
    module[2].register_forward_hook(lambda _, __, outputs: 2 * outputs)  # type: ignore[index,operator]


def hook_parameter(module: nn.Module) -> None:
    module[4].weight.register_hook(lambda gradient: gradient / 2)  # type: ignore[index,union-attr]


def change_slope(module: nn.Module) -> None:
    module[2].negative_slope = 0.5  # type: ignore[index,assignment]


def change_padding(module: nn.Module) -> None:
    module[1].padding_mode = "circular"  # type: ignore[index,assignment]


def change_layer(module: nn.Module) -> None:
    module[2] = nn.Tanh()  # type: ignore[operator]


def change_forward(module: nn.Module) -> None:
    module[2].forward = torch.sin  # type: ignore[index,assignment]


CHANGES = [hook_outputs, hook_parameter, change_slope, change_padding, change_layer, change_forward]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_is_changed_in_the_module_counts_from_the_next_batch_on(
    change: Callable[[nn.Module], None],
) -> None:
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
    assert alike(module, twin)


def test_the_learning_rate_may_be_changed_at_any_time() -> None:
    module = pure()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    optimizer = sgd(twin.parameters())
    assert learner.learning_rate == 0.1
    for step, (x, y) in enumerate(stream()):
        learner.learning_rate = optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        learner.observe(x, y)
        plainly(twin, optimizer, [(x, y)])
    assert alike(module, twin)


def test_a_learning_rate_that_cannot_be_set_is_refused() -> None:
    learner = OnePass(pure(), "van", learning_rate=0.1)
    with pytest.raises(InputError, match="above 0"):
        learner.learning_rate = -1.0
    assert learner.learning_rate == 0.1
    module = pure()
    with pytest.raises(InputError, match="the optimizer's: set it there"):
        OnePass(module, "van", optimizer=sgd(module.parameters())).learning_rate = 0.2


def test_each_parameter_is_saved_and_shared_alone(tmp_path: Path) -> None:
    module = Tied()
    learner = OnePass(module, learning_rate=0.1)
    learner.observe(*stream()[0])
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
    # It takes memory that is shared by others than tied weights for an error.
    safetensors.torch.save_model(module, str(tmp_path / "file"))
    other = Tied()
    safetensors.torch.load_model(other, tmp_path / "file")
    assert equal(module, other)


def test_a_learner_that_is_printed_says_how_far_it_is() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    learner.observe(*stream()[0])
    learner.end_task()
    assert repr(learner) == "OnePass(Sequential, 'a-gem'): 1 batches learnt, 1 tasks ended"


class Rude(nn.Module):
    """It writes into its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mul_(0.5).add_(1))
        return out


def dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(FEATURES, CLASSES))


@pytest.mark.parametrize("where", ["module", "cpu"])
@pytest.mark.parametrize("build", [Rude, dropout], ids=lambda build: build.__name__)
def test_a_module_that_writes_into_its_inputs_does_not_spoil_what_is_remembered(
    build: Callable[[], nn.Module], where: Any
) -> None:
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
    kept = learner.memory.storage.columns["x"][: learner.memory.size]
    assert torch.equal(kept, torch.cat([x for x, _ in data]))


def test_a_module_that_writes_into_its_inputs_learns_as_in_the_plain_loop() -> None:
    module = Rude()
    twin = copy.deepcopy(module)
    learner = OnePass(module, "van", learning_rate=0.1)
    for x, y in stream():
        learner.observe(x.clone(), y)
    plainly(twin, sgd(twin.parameters()), [(x.clone(), y) for x, y in stream()])
    assert alike(module, twin)


def test_a_task_ends_when_the_next_one_begins_and_only_once() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    ended = []
    for number, name in enumerate(("a", "a", "b", "c", "c")):
        for x, y in stream(1):
            learner.observe(x, y, task=name)
        if number == 1:
            learner.end_task()
        ended.append(learner.segment)
    assert ended == [0, 1, 1, 2, 2]
