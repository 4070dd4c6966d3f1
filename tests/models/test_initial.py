"""Initial weights by their formulas."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from onepass.errors import InputError
from onepass.models import Network
from onepass.models.initial import Initialisation, initialise


def test_sizes_of_a_network_are_known_without_values_and_without_torchs_compiler() -> None:
    program = """
import sys, torch
from onepass.models.mlp import mlp
with torch.device("meta"):
    assert sum(values.numel() for values in mlp(784, [256, 256], 10).parameters()) == 269322
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("layer", "bound"),
    [(nn.Conv2d(20, 64, 3), 1 / math.sqrt(3 * 20)), (nn.Linear(160, 100), 1 / math.sqrt(160))],
)
def test_uniform_weights_fill_the_authors_interval(
    layer: nn.Conv2d | nn.Linear, bound: float
) -> None:
    for values in initialise(layer, "uniform").parameters():
        assert float(values.detach().abs().max()) <= bound
        assert float(values.detach().abs().max()) > 0.9 * bound
        assert abs(float(values.detach().mean())) < 0.2 * bound


@pytest.mark.parametrize(("how", "bias"), [("normal", 0.1), ("xavier", 0.0)])
def test_biases_are_constant_where_they_should_be(how: Initialisation, bias: float) -> None:
    assert initialise(nn.Conv2d(3, 4, 3), how).bias.unique().tolist() == [pytest.approx(bias)]  # type: ignore[union-attr]


def test_the_initialisation_of_torch_is_left_alone() -> None:
    torch.manual_seed(1)
    theirs = nn.Linear(5, 4)
    torch.manual_seed(1)
    assert torch.equal(initialise(nn.Linear(5, 4), "torch").weight, theirs.weight)


@pytest.mark.parametrize(
    ("kind", "outputs", "count"),
    [("resnet18-reduced", 100, 1_109_240), ("resnet18", 100, 11_220_132), ("mlp", 10, 855_050)],
)
def test_networks_are_known_by_name(kind: str, outputs: int, count: int) -> None:
    net = Network(kind).build((32, 32, 3), outputs)  # type: ignore[arg-type]
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.parametrize(("stem", "side"), [("3x3", 32), ("7x7", 16), ("7x7-pool", 8)])
def test_a_stem_decides_what_the_first_layer_sees(stem: str, side: int) -> None:
    net, seen = Network("resnet18", stem=stem).build((32, 32, 3), 5), []  # type: ignore[arg-type]
    layer = net.get_submodule("layer1")
    layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert seen == [(2, 64, side, side)]


def test_a_residual_network_needs_images() -> None:
    with pytest.raises(InputError, match="needs a stream of images"):
        Network("resnet18").build((784,), 10)
