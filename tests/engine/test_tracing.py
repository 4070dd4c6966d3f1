from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.tracing import _add_in_products, resized


def test_a_bias_that_a_product_is_added_to_stays_as_it_was() -> None:
    bias, x, y = torch.randn(3, 5), torch.randn(3, 4, 6), torch.randn(3, 6, 5)
    module = make_fx(lambda b, x, y: b[:, None] + torch.bmm(x, y))(bias, x, y)
    before = bias.clone()
    _add_in_products(module.graph)
    module.recompile()
    assert not any(node.target == torch.ops.aten.add.Tensor for node in module.graph.nodes)
    for _ in range(2):
        assert torch.allclose(module(bias, x, y), before[:, None] + torch.bmm(x, y), atol=1e-6)
    assert torch.equal(bias, before)


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (lambda x: (x * (1 / len(x))).sum(), True),
        (lambda x: x.view(3 * len(x), 2).expand(2, 3 * len(x), 2) * len(x), True),
        (lambda x: x * len(x) ** 2, False),
        (lambda x: x * (len(x) / (len(x) - 1)), False),
        (lambda x: x.relu() if len(x) > 5 else x, False),
        (lambda x: x / torch.tensor(3.0), True),
        (lambda x: x / torch.tensor(float(len(x))), False),
    ],
    ids=[
        "one by the size",
        "multiples of the size",
        "its square",
        "another number",
        "another operation",
        "a constant",
        "another constant",
    ],
)
def test_a_program_for_a_third_size_is_the_one_that_would_be_traced_or_there_is_none(
    function: Callable[[Tensor], Tensor], right: bool
) -> None:
    four, six, nine = (torch.randn(size, 6) for size in (4, 6, 9))
    made = resized(make_fx(function)(four), 4, make_fx(function)(six), 6, 9)
    assert (made is not None) == right
    assert made is None or torch.allclose(made(nine), function(nine))
