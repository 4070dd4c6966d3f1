"""Initial weights of a fully connected network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from onepass.models.mlp import mlp


def layers(network: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in network if isinstance(layer, nn.Linear)]


def test_weights_are_normal_and_cut_off_at_twice_their_standard_deviation() -> None:
    torch.manual_seed(0)
    for layer in layers(mlp(784, [256, 256], 10)):
        assert layer.weight.abs().max() <= 0.2
        assert float(layer.weight.detach().std()) == pytest.approx(0.088, abs=0.002)
        assert layer.bias.tolist() == pytest.approx([0.1] * layer.out_features)


def test_xavier_is_uniform_within_a_bound_that_both_sides_of_a_layer_decide() -> None:
    torch.manual_seed(0)
    for layer in layers(mlp(784, [256, 256], 10, "xavier")):
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert layer.weight.abs().max() <= bound
        assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
        assert not layer.bias.any()
