"""The residual network of the paper: its parameters, its forward pass and its gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.engine.gradients import Mode
from onepass.engine.slots import Slots
from onepass.models.resnet import ResNet
from onepass.models.stages import stages
from onepass.streams.base import separate_heads

Values = dict[str, Tensor]
small = partial(ResNet, 4, 6, blocks=(1, 2), channels=2)


def stirred(net: nn.Module) -> nn.Module:
    """No parameter and no statistic that hides a mistake by being 0 or 1."""
    with torch.no_grad():
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.2)
    return net


def norm(v: Values, name: str, x: Tensor, training: bool) -> Tensor:
    """Batch-norm by its formula."""
    mean, var = v[f"{name}.running_mean"], v[f"{name}.running_var"]
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    gain, bias = v[f"{name}.weight"] / (var + 1e-5).sqrt(), v[f"{name}.bias"]
    return (x - mean[:, None, None]) * gain[:, None, None] + bias[:, None, None]


def by_hand(v: Values, x: Tensor, blocks: tuple[int, ...], training: bool) -> Tensor:
    """A residual network with torchvision's names, a ReLU behind every block."""
    h = norm(v, "bn1", conv2d(x, v["conv1.weight"], padding=1), training).relu()
    for level, count in enumerate(blocks, start=1):
        for b in range(count):
            name, stride = f"layer{level}.{b}", 2 if level > 1 and b == 0 else 1
            inner = conv2d(h, v[f"{name}.conv1.weight"], stride=stride, padding=1)
            inner = norm(v, f"{name}.bn1", inner, training).relu()
            inner = conv2d(inner, v[f"{name}.conv2.weight"], padding=1)
            inner = norm(v, f"{name}.bn2", inner, training)
            if f"{name}.downsample.0.weight" in v:
                h = conv2d(h, v[f"{name}.downsample.0.weight"], stride=stride)
                h = norm(v, f"{name}.downsample.1", h, training)
            h = (inner + h).relu()
    return h.flatten(2).mean(2) @ v["fc.weight"].T + v["fc.bias"]


def test_the_network_of_the_paper_has_its_parameters_and_the_names_of_torchvision() -> None:
    names = dict(ResNet(20, 100).named_parameters())
    assert sum(p.numel() for p in names.values()) == 1_109_240

    def convolution(at: str, norm: str) -> list[str]:
        return [f"{at}.weight", f"{norm}.weight", f"{norm}.bias"]

    expected = convolution("conv1", "bn1")
    for level in (1, 2, 3, 4):
        for b in (0, 1):
            block = f"layer{level}.{b}"
            for i in (1, 2):
                expected += convolution(f"{block}.conv{i}", f"{block}.bn{i}")
            if level > 1 and b == 0:
                expected += convolution(f"{block}.downsample.0", f"{block}.downsample.1")
    assert list(names) == [*expected, "fc.weight", "fc.bias"]
    assert names["conv1.weight"].shape == (20, 3, 3, 3)
    assert names["layer3.0.downsample.0.weight"].shape == (80, 40, 1, 1)
    assert names["fc.weight"].shape == (100, 160)


def test_images_of_the_paper_end_as_four_by_four_maps_before_pooling() -> None:
    net = ResNet(20, 100)
    seen: list[torch.Size] = []
    layer = net.get_submodule("layer4")
    layer.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert seen == [(2, 160, 4, 4)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("blocks", [(1, 2), (2, 2, 2, 2)])
def test_the_forward_pass_is_the_one_by_hand(training: bool, blocks: tuple[int, ...]) -> None:
    net = stirred(ResNet(4, 6, blocks, channels=2)).train(training)
    x = torch.randn(5, 2, 8, 8)
    values = dict(net.named_parameters()) | {name: b.clone() for name, b in net.named_buffers()}
    expected = by_hand(values, x, blocks, training)
    found = net(x)
    assert torch.allclose(found, expected, atol=1e-4)
    assert float(found.detach().std()) > 0.1


def test_training_moves_running_statistics_and_evaluation_does_not() -> None:
    net, x = stirred(small()), torch.randn(5, 2, 8, 8)
    before = {name: b.clone() for name, b in net.named_buffers()}
    net.eval()
    net(x)
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    net.train()
    net(x)
    assert not any(torch.equal(b, before[name]) for name, b in net.named_buffers())


def test_stages_are_stem_layers_and_head_and_make_up_the_network() -> None:
    net, x = stirred(small()).eval(), torch.randn(5, 2, 8, 8)
    made = stages(net)
    assert len(made) == 4
    in_stages = {id(p) for stage in made for p in stage.body.parameters()}
    assert in_stages == {id(p) for p in net.parameters()}
    h = x
    for stage in made:
        h = stage.then(stage.body(h))
    assert torch.equal(h, net(x))


def test_lateral_connections_fit_what_they_are_added_to() -> None:
    made, h = stages(small()), torch.randn(3, 2, 8, 8)
    for stage in made:
        body = stage.body(h)
        for columns in (1, 3):
            lateral = stage.lateral(columns)
            assert lateral(torch.cat([h] * columns, 1)).shape == body.shape
            assert [name for name, _ in lateral.named_parameters()] == ["weight"]
        h = stage.then(body)


@pytest.mark.parametrize("mode", ["looped", "stacked"])
@pytest.mark.parametrize("sizes", [None, (6, 4)], ids=["equal", "unequal"])
def test_gradients_and_statistics_of_a_fleet_are_those_of_plain_autograd(
    mode: Mode, sizes: tuple[int, ...] | None
) -> None:
    slots = Slots(separate_heads(3, 2))
    fleet = Fleet(lambda: stirred(small()), [3, 4], slots, [0.1, 0.1], gradients=mode)
    batch = Batch(torch.randn(2, 6, 2, 8, 8), torch.randint(0, 6, (2, 6)), sizes)
    before = {name: b.clone() for name, b in fleet.buffers.items()}
    g, loss = fleet.grad(batch)
    names, views = fleet.architecture.names, fleet.architecture.views
    for r, size in enumerate(batch.lengths()):
        net = small()
        values = dict(zip(names, views(fleet.theta[r]), strict=True))
        net.load_state_dict(values | {name: b[r] for name, b in before.items()})
        logits = net(batch.x[r, :size])
        own = batch.slots[r, :size] // 2 * 2
        pairs = torch.stack([logits.gather(1, own[:, None] + i)[:, 0] for i in (0, 1)], 1)
        expected = cross_entropy(pairs, batch.slots[r, :size] - own)
        expected.backward()
        assert torch.allclose(loss[r], expected, atol=1e-5)
        assert net.fc.weight.grad is not None
        assert net.fc.weight.grad.norm() > 0.01
        for name, view in zip(names, views(g[r]), strict=True):
            assert torch.allclose(view, net.get_parameter(name).grad, atol=1e-5), name  # type: ignore[arg-type]
        for name, b in net.named_buffers():
            assert torch.allclose(fleet.buffers[name][r], b, atol=1e-5), name
