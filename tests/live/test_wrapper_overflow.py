"""A step beyond the largest number of a kind is refused, and one up to it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from onepass.live.saving import packed
from tests.live.refused_calls import CLASSES, batch, refused
from tests.live.saved_learners import OPTIMIZERS
from tests.toys import FEATURES, small_net

KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def pulling(slope: float, start: float) -> nn.Module:
    """Each weight has this gradient, and the output is zero."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), start, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.weight - self.weight.detach()) * slope).sum() + 0 * x.sum()

    return Weight()


def learner_of(
    kind: torch.dtype, method: str, slope: float, rate: float, start: float = 0.0
) -> tuple[OnePass, Tensor]:
    module = pulling(slope, start).to(kind)
    learner = OnePass(module, method, learning_rate=rate, loss=lambda outputs, y: outputs)
    return learner, torch.ones(4, 1, dtype=kind)


@pytest.mark.parametrize("method", ["van", "a-gem", "er", "mega-1", "pi", "rwalk"])
def test_a_step_of_half_precision_to_infinity_is_refused_and_leaves_no_trace(method: str) -> None:
    learner, one = learner_of(torch.float16, method, 100.0, 1.0)
    learner.observe(one, one)
    learner.learning_rate = 700.0
    says = "this step leads to parameters that are not finite"
    with refused(learner, says, "nothing was learnt"):
        learner.observe(one, one)
    learner.learning_rate = 1.0
    learner.observe(one, one)
    assert learner.steps == 2


@pytest.mark.parametrize(
    ("kind", "scale"), [(torch.float16, 3e3), (torch.bfloat16, 1e25), (torch.float32, 1e25)]
)
@pytest.mark.parametrize("method", ["van", "er"])
def test_a_batch_that_takes_the_statistics_of_batch_norm_to_infinity_is_refused(
    method: str, kind: torch.dtype, scale: float
) -> None:
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).to(kind)
    learner = OnePass(module, method, learning_rate=0.1)
    x, y = batch()
    learner.observe(x.to(kind), y)
    with refused(learner, "running statistics of batch-norm are not finite", "nothing was learnt"):
        learner.observe((x * scale).to(kind), y)
    learner.observe(x.to(kind), y)
    assert learner.steps == 2


@pytest.mark.parametrize(
    ("name", "rate", "says"),
    [
        ("momentum", 3e38, "parameters that are not finite"),
        *((name, 1e300, "overflow") for name in ("momentum", "Adam", "RMSprop", "Adagrad")),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
def test_a_step_that_is_refused_leaves_the_optimizer_as_it_was(
    name: str, rate: float, says: str, first: bool
) -> None:
    module = small_net(CLASSES)
    optimizer = OPTIMIZERS[name](module.parameters())

    def steep(outputs: Tensor, y: Tensor) -> Tensor:
        return 1e6 * (outputs * y).sum()

    learner = OnePass(module, optimizer=optimizer, loss=steep)
    x, y = torch.randn(8, FEATURES), torch.ones(8, CLASSES)
    if not first:
        learner.observe(x, y)
    before, usual = packed(learner), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = rate
    with refused(learner, says, "nothing was learnt"):
        learner.observe(x, y)
    optimizer.param_groups[0]["lr"] = usual
    assert packed(learner) == before


def test_an_optimizer_that_fails_after_its_step_is_as_it_was() -> None:
    class Failing(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise RuntimeError("of its own")

    module = small_net(CLASSES)
    learner = OnePass(module, optimizer=Failing(module.parameters()))
    with refused(learner, "of its own"):
        learner.observe(*batch())
    assert not learner.fleet.optimizer.state  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_last_number_can_be_reached_and_not_passed(kind: torch.dtype, optimizer: bool) -> None:
    most, half = torch.finfo(kind).max, kind == torch.float16
    for slope, rate, fits in ((1.0, 1.0, True), (most / 1e4 if half else 1e18, 1e4, not half)):
        learner, one = learner_of(kind, "van", slope, rate, -most)
        if optimizer:
            module = learner.module
            sgd = torch.optim.SGD(module.parameters(), lr=rate)
            learner = OnePass(module, "van", optimizer=sgd, loss=lambda o, y: o)
        if fits:
            learner.observe(one, one)
            assert bool(learner.fleet.theta.isfinite().all())
        else:
            with refused(learner, "not finite"):
                learner.observe(one, one)


def test_half_precision_that_accumulates_is_refused_at_its_end() -> None:
    learner, one = learner_of(torch.float16, "van", 100.0, 50.0)
    steps = 0
    with pytest.raises(InputError, match="not finite"):  # noqa: PT012 - it is counted
        for _ in range(100):
            learner.observe(one, one)
            steps += 1
    assert steps == 13  # 13 · 5000 = 65000, and 65504 is the largest number
    assert bool(learner.fleet.theta.isfinite().all())


def test_the_device_is_asked_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.GELU())
    learner = OnePass(module, "van", learning_rate=0.1)
    asked = []
    original = Tensor.abs
    monkeypatch.setattr(Tensor, "abs", lambda self: (asked.append(1), original(self))[1])
    for seed in range(20):
        learner.observe(*batch(seed=seed))
    assert len(asked) == 1


def test_a_learning_rate_beyond_the_kind_of_number_is_refused() -> None:
    module = nn.Linear(FEATURES, CLASSES).half()
    with pytest.raises(InputError, match=r"more than torch\.float16 can hold"):
        OnePass(module, learning_rate=1e5)
    learner = OnePass(module, learning_rate=1e4)
    with refused(learner, "more than torch.float16 can hold"):
        learner.learning_rate = 1e5
    assert learner.learning_rate == 1e4


@pytest.mark.parametrize("method", ["ewc", "pi", "rwalk", "mas"])
def test_a_task_whose_importances_are_not_finite_does_not_end(method: str) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"learning_rate": 0.01, "strength": 1e9}
    settings |= {"fisher": "moving-average"} if method == "ewc" else {}
    learner = OnePass(small_net(CLASSES).half(), method, **settings)
    x, y = batch()
    batches = [(x.half(), y)] * 12
    for one in batches:
        learner.observe(*one)
    says = f"what {method} keeps of this task is not finite"
    with refused(learner, says, "float32", "the task has not ended"):
        learner.end_task(again=batches if method == "mas" else None)
    learner.observe(*batches[0])
    assert (learner.segment, learner.steps) == (0, 13)
