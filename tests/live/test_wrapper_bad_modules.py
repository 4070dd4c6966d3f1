"""Modules, losses and optimizers in trouble are refused and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from tests.live.comparing import same
from tests.live.modules import LIVE
from tests.live.refused_calls import CLASSES, Rich, batch, in_a_second_task, refused, snapshot
from tests.toys import FEATURES

# They take the gradient on the memory in a pass of its own.
CORRECTING = ["gem", "s-gem", "a-gem", "mega-1", "mega-2"]
PASSES = dict.fromkeys(CORRECTING, 2)  # of a step in a second task; the batch comes last

# ---- modules and losses in trouble


TROUBLE = {
    "nan": ("the loss of this batch is nan", "smaller steps"),
    "inf": ("the loss of this batch is",),
    "gradient": ("gradient", "not finite", "nothing was learnt"),
    "shape": ("refused the batch",),
    "tuple": ("refused the batch",),
    "runtime": ("refused the batch", "no runtime", "nothing was learnt"),
    "value": ("refused the batch", "no value"),
    "type": ("refused the batch", "no type"),
    "index": ("refused the batch", "no index"),
    "attribute": ("refused the batch", "no attribute"),
    "key": ("refused the batch", "no key"),
    "assertion": ("refused the batch", "no assertion"),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_module_in_trouble_changes_nothing(trouble: str) -> None:
    learner = in_a_second_task()
    learner.module.make(trouble, at=2)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9))
    learner.module.make(None)  # type: ignore[operator]
    learner.observe(*batch(seed=9))


@pytest.mark.parametrize("method", LIVE)
@pytest.mark.parametrize("trouble", ["nan", "gradient", "runtime"])
def test_trouble_changes_nothing_in_any_method(method: str, trouble: str) -> None:
    learner = in_a_second_task(method, adam=False)
    learner.module.make(trouble, at=PASSES.get(method, 1))  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9, classes=range(2, 4)))


@pytest.mark.parametrize("method", CORRECTING)
@pytest.mark.parametrize("trouble", ["nan", "gradient", "runtime"])
def test_trouble_on_the_memory_is_refused_and_changes_nothing(method: str, trouble: str) -> None:
    learner = in_a_second_task(method, adam=False)
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, "memory" if trouble == "nan" else TROUBLE[trouble][0]):
        learner.observe(*batch(seed=9))


@pytest.mark.parametrize("trouble", ["runtime", "attribute", "key", "assertion"])
def test_a_module_that_fails_to_answer_is_one_sentence(trouble: str) -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rich = Rich()

        def forward(self, x: Tensor) -> Any:
            self.rich.make(trouble if not self.training else None)
            self.rich.training = True
            try:
                return self.rich(x)
            finally:
                self.rich.training = self.training

    learner = OnePass(Mute(), learning_rate=0.1, loss=lambda outputs, y: outputs.square().mean())
    x, y = batch()
    learner.observe(x, y)
    for ask in (learner.predict, learner.scores):
        with refused(learner, "refused the batch", f"no {trouble}"):
            ask(x)


def test_a_shape_that_torch_refuses_by_an_assertion_is_one_sentence() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    learner = OnePass(module, "van", learning_rate=0.1, loss=nn.functional.mse_loss)
    x = torch.randn(4, 3, 7)
    with refused(learner, "refused the batch"):
        learner.observe(x, x)


def test_the_mode_of_a_module_in_evaluation_is_not_changed_by_a_refused_batch() -> None:
    learner = in_a_second_task()
    learner.module.eval()
    with refused(learner, "refused the batch"):
        learner.observe(*batch(1))


@pytest.mark.parametrize("method", ["a-gem", "s-gem", "gem"])
def test_a_refused_step_counts_no_violation(method: str) -> None:
    # There is one parameter, so the infinite slope has one sign: its product with the gradient
    # on the memory is minus infinity.
    steep: list[bool] = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        if steep and steep.pop():
            return -(outputs - outputs.detach()).sum().sqrt()
        return (outputs * y).mean()

    one = torch.ones(4, 1)
    learner = OnePass(nn.Linear(1, 1, bias=False), method, learning_rate=0.1, loss=loss)
    learner.observe(one, one)
    learner.end_task()
    learner.observe(one, one)
    steep.append(True)
    with refused(learner, "not finite"):
        learner.observe(one, one)
    assert learner.violations == 0


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str, ...]]] = {
    "nan": (lambda o, y: (o - y).mean() * torch.nan, ("loss of this batch is nan",)),
    "inf": (lambda o, y: (o - y).square().mean() + torch.inf, ("loss of this batch is inf",)),
    "one per row": (lambda o, y: (o - y).square().mean(1), ("one number", "of shape", "mean")),
    "a matrix": (lambda o, y: (o - y).square(), ("one number", "tensor of shape", "mean")),
    "a Python float": (lambda o, y: (o - y).square().mean().item(), ("one number", "float")),
    "nothing": (lambda o, y: None, ("one number", "NoneType")),
    "an array": (lambda o, y: (o - y).square().mean().detach().numpy(), ("one number", "ndarray")),
    "slope at zero": (lambda o, y: (o * 0).sum().sqrt(), ("gradient", "not finite")),
    "wrong arguments": (lambda o: o.mean(), ("refused the batch", "argument")),  # type: ignore[misc]
    "wrong shapes": (lambda o, y: (o[:, :3] - y).mean(), ("refused the batch",)),
    "a missing key": (lambda o, y: o["logits"].mean(), ("refused the batch",)),
    "division": (lambda o, y: o.mean() / 0 if 1 // 0 else o.mean(), ("refused the batch", "zero")),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("method", ["van", "a-gem", "er"])
def test_a_loss_of_ones_own_that_is_no_loss_is_refused(case: str, method: str) -> None:
    loss, words = LOSSES[case]
    bad: list[bool] = []

    def either(*given: Any) -> Any:
        if not bad:
            return (given[0] - given[1]).square().mean()
        return loss(given[0]) if case == "wrong arguments" and len(given) == 1 else loss(*given)  # type: ignore[call-arg]

    learner = in_a_second_task(method, loss=either)
    x, _ = batch(seed=9)
    bad.append(True)
    with refused(learner, *words):
        learner.observe(x, x[:, :CLASSES])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda y: y * torch.nan, ("y has values that are not finite",)),
        (lambda y: y[:-1], ("8 examples", "y has 7")),
        (lambda y: y.double(), ("y is torch.float64", "convert")),
        (lambda y: y[:, :2], ("y has the shape [8, 2]",)),
        (lambda y: None, ("y must be a tensor",)),
    ],
)
def test_bad_targets_of_a_loss_of_ones_own_are_refused(
    spoil: Callable[[Tensor], Any], words: tuple[str, ...]
) -> None:
    learner = in_a_second_task(loss=nn.functional.mse_loss)
    x, _ = batch(seed=9)
    with refused(learner, *words):
        learner.observe(x, spoil(x[:, :CLASSES]))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda o: o[:, :1], ("[batch, classes]", "[8, 1]")),
        (lambda o: o[:, :, None], ("[8, 4, 1]",)),
        (lambda o: (o, o), ("tuple",)),
        (lambda o: o[:3], ("[3, 4]",)),
    ],
)
def test_a_module_whose_outputs_are_no_classes_is_refused(
    outputs: Callable[[Tensor], Any], words: tuple[str, ...]
) -> None:
    class Odd(Rich):
        def forward(self, x: Tensor) -> Any:
            return outputs(super().forward(x))

    learner = OnePass(Odd(), learning_rate=0.1)
    with refused(learner, *words):
        learner.observe(*batch())


def test_learning_inside_inference_mode_learns_or_is_refused() -> None:
    learner = in_a_second_task("van", adam=False)
    before = snapshot(learner)
    with torch.inference_mode():
        try:
            learner.observe(*batch(seed=9))
        except InputError:
            assert same(before, snapshot(learner))
            return
    # A step was counted, so something was learnt.
    assert not same(before["values"], snapshot(learner)["values"])


def test_a_step_that_would_leave_the_numbers_that_there_are_is_refused() -> None:
    module = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    learner = OnePass(module, "van", optimizer=optimizer)
    x, y = batch()
    learner.observe(x, y)
    optimizer.param_groups[0]["lr"] = 1e38
    with refused(learner, "finite"):
        learner.observe(x * 1000, y)


@pytest.mark.parametrize("method", ["van", "a-gem", "rwalk", "pi"])
def test_an_optimizer_that_fails_halfway_changes_nothing(method: str) -> None:
    class Fragile(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.param_groups[0]["params"][0].data.add_(1)
                raise RuntimeError("out of order")
            return super().step(closure)

    module = Rich()
    optimizer = Fragile([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    learner = OnePass(module, method, optimizer=optimizer)
    for seed in range(3):
        learner.observe(*batch(seed=seed))
    optimizer.fails = True
    with refused(learner, "out of order"):
        learner.observe(*batch(seed=9))


# ---- the first batch, and the first one of a task


START = ["nan", "gradient", "runtime"]


@pytest.mark.parametrize("method", LIVE)
@pytest.mark.parametrize("trouble", START)
def test_a_first_batch_that_is_refused_leaves_no_trace(method: str, trouble: str) -> None:
    learner = OnePass(Rich(), method, learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(classes=range(2)))


@pytest.mark.parametrize("trouble", START)
@pytest.mark.parametrize("method", ["van", "a-gem", "s-gem", "rwalk"])
def test_a_refused_first_batch_of_the_next_task_leaves_no_trace(trouble: str, method: str) -> None:
    learner = in_a_second_task(method)
    learner.end_task()
    learner.module.make(trouble, at=PASSES.get(method, 1) + (method == "gem"))  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9))


@pytest.mark.parametrize("trouble", START)
@pytest.mark.parametrize("method", ["van", "a-gem", "gem", "rwalk", "pi"])
def test_a_refused_batch_of_another_task_does_not_end_the_current_one(
    trouble: str, method: str
) -> None:
    learner = in_a_second_task(method)
    learner.module.make(trouble, at=PASSES.get(method, 1) + (method == "gem"))  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9), task="another")


def test_a_refused_batch_with_a_new_class_does_not_grow_the_head() -> None:
    learner = in_a_second_task(grow=True)
    x, y = batch(seed=9)
    learner.module.make("nan")  # type: ignore[operator]
    with refused(learner, "nan"):
        learner.observe(x, y + 2)
    learner.module.make(None)  # type: ignore[operator]
    learner.observe(x, y + 2)
    assert learner.outputs == learner.module.head.out_features == CLASSES + 2  # type: ignore[union-attr]


def test_a_refused_first_batch_does_not_grow_the_head_for_its_tasks() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks=[[0, 1], [4, 5]], grow=True)
    learner.module.make("nan")  # type: ignore[operator]
    with refused(learner, "nan"):
        learner.observe(*batch(classes=range(2)))


def test_a_layer_that_cannot_grow_since_it_is_not_the_last_one_is_refused_and_not_spoilt() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(5, CLASSES), nn.Linear(FEATURES, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.body(x)))
            return out

    learner = OnePass(Backwards(), learning_rate=0.1, grow=True)
    x, y = batch()
    learner.observe(x, y)
    with refused(learner):
        learner.observe(x, y + 3)
    learner.observe(x, y)
