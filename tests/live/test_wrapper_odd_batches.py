"""Batches of rare kinds are learnt as if they were plain, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from onepass import OnePass
from onepass.live.inputs import KEPT, LABELS
from tests.live.odd_values import Marked
from tests.live.refused_calls import CLASSES, batch, refused
from tests.toys import FEATURES, small_net


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


BATCHES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nested": (lambda x: torch.nested.nested_tensor([x[:3], x[3:]]), "nested"),
    "nested, jagged": (
        lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged),
        "NestedTensor",
    ),
    "sparse rows": (lambda x: x.to_sparse_csr() if x.dim() == 2 else x.to_sparse(), "sparse"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        "quantized",
    ),
    "masked": (lambda x: masked_tensor(x, torch.ones_like(x, dtype=torch.bool)), "MaskedTensor"),
    "masked array": (lambda x: np.ma.masked_array(x.numpy(), mask=x.numpy() > 0), "masked array"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "FakeTensor"),
    "for MKL": (lambda x: x.float().to_mkldnn(), "mkldnn"),
    "four bits": (lambda x: torch.zeros(x.shape, dtype=torch.uint8).view(torch.uint4), "uint4"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_batch_of_a_kind_that_cannot_be_learnt_is_refused(case: str, first: bool) -> None:
    spoil, word = BATCHES[case]
    one, other = (nn.Sequential(small_net(CLASSES), nn.GELU()) for _ in range(2))
    learner = OnePass(one, learning_rate=0.1)
    own = OnePass(other, learning_rate=0.1, loss=nn.functional.mse_loss)
    x, y = batch()
    if not first:
        learner.observe(x, y)
        own.observe(x, x[:, :CLASSES])
    with refused(learner, word):
        learner.observe(spoil(x), y)
    with refused(learner):
        learner.observe({"input": spoil(x)}, y)
    with refused(learner, word):
        learner.predict(spoil(x))
    with refused(learner, "y is", word):
        learner.observe(x, spoil(x) if case.startswith("nested") else spoil(y + 1))
    with refused(own, "y is", word):
        own.observe(x, spoil(x))


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a class of its own": lambda x: x.as_subclass(Marked),
    "needs a gradient": lambda x: x.clone().requires_grad_(),
    "has a past": lambda x: x.clone().requires_grad_() * 1,
    "a parameter": nn.Parameter,
    "made in inference mode": in_inference_mode,
    "transposed": lambda x: x.t().contiguous().t(),
    "backwards": lambda x: np.ascontiguousarray(x.numpy()[::-1])[::-1],
    "read only": lambda x: np.frombuffer(x.numpy().tobytes(), dtype=np.float32).reshape(x.shape),
    "a matrix": lambda x: np.matrix(x.numpy()),
    "masked in name only": lambda x: np.ma.masked_array(x.numpy()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", KINDS)
def test_a_batch_of_a_rare_kind_is_learnt_as_if_it_were_plain(case: str) -> None:
    found = []
    for make in (KINDS[case], torch.clone):
        torch.manual_seed(0)
        learner = OnePass(small_net(CLASSES), learning_rate=0.1)
        for seed in range(4):
            x, y = batch(seed=seed)
            learner.observe(make(x), y)
            if seed == 1:
                learner.end_task()
        found.append(learner.scores(make(batch()[0])))
    torch.testing.assert_close(*found)
    assert type(found[0]) is Tensor


def test_expanded_batches_are_learnt() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1)
    x, y = batch()
    for _ in range(2):
        learner.observe(x[:1].expand(8, FEATURES), y[:1].expand(8))
        learner.end_task()
    assert learner.steps == 2


@pytest.mark.parametrize("dtype", sorted(LABELS | {torch.float8_e5m2}, key=str))
def test_numbers_of_any_kind_are_kept_and_drawn_or_refused_before_the_step(
    dtype: torch.dtype,
) -> None:
    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net(CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x.float())
            return out

    learner = OnePass(Converting(), learning_rate=0.1)
    x, y = batch()
    if dtype not in KEPT:
        with refused(learner, str(dtype), "convert it"):
            learner.observe(x.abs().to(dtype), y)
        return
    for _ in range(2):
        learner.observe(x.abs().to(dtype), y)
        learner.end_task()
    learner.observe(x.abs().to(dtype), y)
