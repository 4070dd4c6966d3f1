from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.tracing import _add_in_products


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
