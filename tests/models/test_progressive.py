"""Progressive networks: every column is the formula, and only the last one learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from onepass.errors import InputError
from onepass.models.mlp import mlp
from onepass.models.progressive import Progressive
from onepass.models.resnet import ResNet
from onepass.models.stages import stages

Values = dict[str, Tensor]
fully_connected = partial(mlp, 5, [4, 3], 6)
residual = partial(ResNet, 4, 6, blocks=(1, 1))
FLAT, IMAGES = (5,), (3, 8, 8)
both = pytest.mark.parametrize(
    ("build", "shape"), [(fully_connected, FLAT), (residual, IMAGES)], ids=["mlp", "resnet"]
)
inputs_or_not = pytest.mark.parametrize("inputs", [False, True], ids=["", "input-laterals"])


def filled(network: Progressive) -> Progressive:
    """Frozen columns are built without values: give every column some."""
    with torch.no_grad():
        for name, value in [*network.named_parameters(), *network.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif value.is_floating_point():
                value.normal_(0, 0.4)
            else:
                value.zero_()
    return network


def values_of(network: nn.Module) -> Values:
    return {
        name: value.detach().clone()
        for name, value in [*network.named_parameters(), *network.named_buffers()]
    }


def slices(v: Values, k: int, s: int, width: int) -> list[Tensor]:
    """The lateral matrices of earlier columns `j < k` into stage `s` of column `k`, if any."""
    name = f"columns.{k}.laterals.{s}.weight"
    return [v[name][:, j * width : (j + 1) * width] for j in range(k)] if name in v else []


def mlp_by_hand(v: Values, x: Tensor, column: int) -> Tensor:
    """`h_s^k = relu(W_s^k h_{s−1}^k + Σ_{j<k} U_s^{kj} h_{s−1}^j)`, no ReLU behind the last."""
    levels = {(0, k): x for k in range(column + 1)}
    for s in range(3):
        for k in range(column + 1):
            name = f"columns.{k}.bodies.{s}"
            out = levels[s, k] @ v[f"{name}.weight"].T + v[f"{name}.bias"]
            for j, u in enumerate(slices(v, k, s, levels[s, 0].shape[1])):
                out = out + levels[s, j] @ u.T
            levels[s + 1, k] = out.relu() if s < 2 else out
    return levels[3, column]


def norm(v: Values, name: str, x: Tensor, training: bool) -> Tensor:
    mean, var, weight, bias = (
        v[f"{name}.{what}"] for what in ("running_mean", "running_var", "weight", "bias")
    )
    return batch_norm(x, mean.clone(), var.clone(), weight, bias, training)


def resnet_by_hand(v: Values, x: Tensor, column: int, learning: int | None = None) -> Tensor:
    """The same with a stem and two layers of one block each.

    Column `learning` uses the statistics of the batch.
    """
    levels = {(0, k): x for k in range(column + 1)}
    for s, stride in enumerate((1, 1, 2)):
        for k in range(column + 1):
            name, h, training = f"columns.{k}.bodies.{s}", levels[s, k], k == learning
            if s == 0:
                out = norm(v, f"{name}.1", conv2d(h, v[f"{name}.0.weight"], padding=1), training)
            else:
                first, second = (v[f"{name}.0.conv{i}.weight"] for i in (1, 2))
                out = conv2d(h, first, stride=stride, padding=1)
                out = norm(v, f"{name}.0.bn1", out, training).relu()
                out = conv2d(out, second, padding=1)
                out = norm(v, f"{name}.0.bn2", out, training)
                if stride == 2:
                    h = conv2d(h, v[f"{name}.0.downsample.0.weight"], stride=2)
                    h = norm(v, f"{name}.0.downsample.1", h, training)
                out = out + h
            for j, u in enumerate(slices(v, k, s, levels[s, 0].shape[1])):
                out = out + conv2d(levels[s, j], u, stride=stride)
            levels[s + 1, k] = out.relu()
    name, pooled = f"columns.{column}", [levels[3, k].mean((2, 3)) for k in range(column + 1)]
    head = pooled[column] @ v[f"{name}.bodies.3.weight"].T + v[f"{name}.bodies.3.bias"]
    for j, u in enumerate(slices(v, column, 3, pooled[0].shape[1])):
        head = head + pooled[j] @ u.T
    return head


@inputs_or_not
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_every_column_of_an_mlp_is_the_formula(columns: int, inputs: bool) -> None:
    network, x = filled(Progressive(fully_connected, columns, inputs)).eval(), torch.randn(7, 5)
    assert network.shown == columns - 1
    for k in range(columns):
        network.shown = k
        assert torch.allclose(network(x), mlp_by_hand(values_of(network), x, k), atol=1e-5)


@inputs_or_not
@pytest.mark.parametrize("columns", [1, 3])
def test_every_column_of_a_residual_network_is_the_formula(columns: int, inputs: bool) -> None:
    network, x = filled(Progressive(residual, columns, inputs)).eval(), torch.randn(4, *IMAGES)
    for k in range(columns):
        network.shown = k
        assert torch.allclose(network(x), resnet_by_hand(values_of(network), x, k), atol=1e-4)


def test_in_training_only_the_last_column_uses_the_statistics_of_the_batch() -> None:
    network, x = filled(Progressive(residual, 3)), torch.randn(4, *IMAGES)
    v = values_of(network)
    expected = resnet_by_hand(v, x, 2, learning=2)
    assert torch.allclose(network(x), expected, atol=1e-4), "as it was built"
    network.load_state_dict(v)
    assert torch.allclose(network.eval().train()(x), expected, atol=1e-4)
    assert not torch.allclose(network(x), resnet_by_hand(v, x, 2), atol=1e-2)


@both
@inputs_or_not
def test_a_column_puts_out_the_same_bits_after_more_were_added(
    build: Callable[[], nn.Module], shape: tuple[int, ...], inputs: bool
) -> None:
    x, outputs, values = torch.randn(4, *shape), [], {}
    for columns in (1, 2, 3, 4):
        network = filled(Progressive(build, columns, inputs))
        network.load_state_dict(values, strict=False)
        values = values_of(network)
        network.eval()
        outputs.append(network(x))
        for j, before in enumerate(outputs):
            network.shown = j
            assert torch.equal(network(x), before)


@both
def test_a_column_depends_on_itself_and_on_earlier_columns_alone(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    network, x = filled(Progressive(build, 4)).eval(), torch.randn(4, *shape)
    for j in range(4):
        network.shown = j
        before = network(x)
        for k, column in enumerate(network.columns):
            values = values_of(network)
            with torch.no_grad():
                for parameter in column.parameters():
                    parameter.mul_(1.5)
            assert torch.equal(network(x), before) == (k > j)
            network.load_state_dict(values)


@both
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_only_the_last_column_learns(
    build: Callable[[], nn.Module], shape: tuple[int, ...], columns: int
) -> None:
    network = filled(Progressive(build, columns, True))
    for name, parameter in network.named_parameters():
        assert parameter.requires_grad == name.startswith(f"columns.{columns - 1}.")
    network(torch.randn(4, *shape)).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert (parameter.grad is not None) == name.startswith(f"columns.{columns - 1}.")


def flags(network: Progressive) -> list[set[bool]]:
    return [
        {m.training for m in column.modules() if isinstance(m, nn.BatchNorm2d)}
        for column in network.columns
    ]


def test_frozen_batch_norm_is_as_in_evaluation_from_the_start_and_whatever_mode_is_set() -> None:
    network = Progressive(residual, 3)
    assert flags(network) == [{False}, {False}, {True}]
    network.eval()
    assert flags(network) == [{False}] * 3
    assert not network.training
    network.train()
    assert flags(network) == [{False}, {False}, {True}]
    assert network.training
    assert network.train(False) is network
    assert flags(Progressive(residual, 1)) == [{True}]


@pytest.mark.parametrize("toggled", [False, True], ids=["as built", "after evaluation"])
def test_a_pass_in_training_moves_the_statistics_of_the_last_column_alone(toggled: bool) -> None:
    network = filled(Progressive(residual, 3))
    if toggled:
        network.eval()
        network.train()
    before = {name: b.clone() for name, b in network.named_buffers()}
    network(torch.randn(4, *IMAGES))
    for name, b in network.named_buffers():
        assert torch.equal(b, before[name]) == (not name.startswith("columns.2.")), name


def test_a_new_column_takes_its_values_from_the_random_state_and_frozen_ones_take_none() -> None:
    def last(columns: int) -> list[Tensor]:
        torch.manual_seed(5)
        return [
            p.detach()
            for name, p in Progressive(residual, columns).columns[-1].named_parameters()
            if name.startswith("bodies")
        ]

    torch.manual_seed(5)
    alone = [p.detach() for p in residual().parameters()]
    for columns in (1, 3):
        assert all(torch.equal(a, b) for a, b in zip(alone, last(columns), strict=True))


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@inputs_or_not
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_parameters_grow_with_the_square_of_the_columns(columns: int, inputs: bool) -> None:
    """`T` columns are `T` networks and `T (T − 1) / 2` times what connects two of them."""
    pairs = columns * (columns - 1) // 2
    for build, between, of_inputs in (
        (fully_connected, 4 * 3 + 3 * 6, 5 * 4),
        (residual, 4 * 4 + 4 * 8 + 8 * 6, 3 * 4),
    ):
        between += of_inputs if inputs else 0
        expected = columns * count(build()) + pairs * between
        assert count(Progressive(build, columns, inputs)) == expected


NOT_STAGES = {
    "no sequence": nn.Linear(3, 2),
    "another activation": nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)),
    "nested": nn.Sequential(nn.Sequential(nn.Linear(3, 2))),
}


@pytest.mark.parametrize("module", NOT_STAGES.values(), ids=NOT_STAGES)
def test_what_cannot_be_taken_apart_is_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match="take apart"):
        stages(module)


UNUSUAL = {
    "no ReLU between": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
    "ReLU first": nn.Sequential(nn.ReLU(), nn.Linear(3, 2)),
    "ReLU last": nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()),
    "empty": nn.Sequential(),
}


@pytest.mark.parametrize("module", UNUSUAL.values(), ids=UNUSUAL)
def test_stages_compute_what_the_module_does_or_it_is_refused(module: nn.Sequential) -> None:
    x = torch.randn(9, 3)
    try:
        made = stages(module)
    except InputError:
        return
    h = x
    for stage in made:
        h = stage.then(stage.body(h))
    assert made
    assert torch.equal(h, module(x))


@both
@inputs_or_not
def test_lateral_connections_may_have_biases_of_their_own(
    build: Callable[[], nn.Module], shape: tuple[int, ...], inputs: bool
) -> None:
    biased = Progressive(build, 3, inputs, lateral_biases=True)
    plain = Progressive(build, 3, inputs)
    assert all(value.eq(0.1).all() for value in biased.columns[2].biases.values())  # type: ignore[union-attr, operator]
    with torch.no_grad():
        for name, value in [*filled(plain).named_parameters(), *plain.named_buffers()]:
            dict([*biased.named_parameters(), *biased.named_buffers()])[name].copy_(value)
        for name, value in biased.named_parameters():
            if ".biases." in name:  # they add up to nothing
                opposite = torch.tensor([0.3, -0.3] if len(value) == 2 else [0.0])
                value.copy_(opposite[:, None].expand_as(value))
    x = torch.randn(4, *shape)
    biased.eval(), plain.eval()
    assert torch.allclose(biased(x), plain(x), atol=1e-5)
    biases = cast(nn.ParameterDict, biased.columns[2].biases)
    with torch.no_grad():
        biases[max(biases)][1, 0] += 1  # of the last stage, which is the output
    assert torch.allclose(biased(x)[:, 0], plain(x)[:, 0] + 1, atol=1e-5)
