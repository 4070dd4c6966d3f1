"""Programs with operations of our own: what becomes one, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from onepass.engine import gpu
from onepass.engine.architecture import Architecture
from onepass.engine.gpu import fusing, kernel_checks
from onepass.engine.gpu.convolution import convolve_inputs
from onepass.engine.gpu.fusing import fuse_forward
from onepass.engine.gradients import _Row
from onepass.engine.tracing import trace
from onepass.models.norm import BatchNorm
from onepass.models.progressive import Progressive
from onepass.models.resnet import ResNet

CLASSES, IMAGES = 6, 5


def loss(outputs: Tensor, slots: Tensor, _: object) -> Tensor:
    return functional.cross_entropy(outputs.flatten(1)[:, :CLASSES], slots)


def program(module: nn.Module) -> tuple[fx.GraphModule, dict[str, int]]:
    """The program of a module's gradient as for a GPU, and how often it has each operation.

    It is compared with autograd.
    """
    torch.manual_seed(1)
    architecture = Architecture(module, lambda x: x, channels_last=True)
    buffers = dict(module.named_buffers())
    row = _Row(architecture, loss, tuple(buffers), False, ())
    x = torch.randn(IMAGES, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    parameters = architecture.views(architecture.flatten(module))
    arguments = [*parameters, *buffers.values(), x, torch.arange(IMAGES)]
    found = architecture.views(torch.zeros(architecture.width))[architecture.frozen :]
    made = trace(row, row.safe(arguments), found, on_gpu=True)
    mine, truth = row.safe(arguments), row.safe(arguments)
    value = made(*mine, *found)
    expected, value_expected = row.autograd(truth)
    assert torch.allclose(value, value_expected, atol=1e-5)
    for one, other in zip([*found, *mine], [*expected, *truth], strict=True):
        assert torch.allclose(one, other, atol=2e-5 * max(1.0, float(other.abs().max())))
    names = [
        str(getattr(node.target, "__name__", node.target))
        for node in made.graph.nodes
        if node.op == "call_function"
    ]
    return made, {name: names.count(name) for name in names}


@pytest.mark.parametrize("constants", [pytest.param("torch", marks=pytest.mark.kernels), "authors"])
def test_batch_norm_of_a_residual_network_takes_in_sums_and_relus_and_their_derivatives(
    constants: str,
) -> None:
    _, count = program(ResNet(4, CLASSES, (2, 2), 4, batch_norm=constants).train())  # type: ignore[arg-type]
    assert count["norm.default"] == count["norm_backward.default"] == 10
    assert not count.keys() & {
        "relu.default",
        "threshold_backward.default",
        "add.Tensor",
        "native_batch_norm.default",
    }


def test_convolutions_with_few_channels_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    net = ResNet(4, CLASSES, (2, 2), 4).train()
    _, all_ = program(deepcopy(net))
    ours = ("convolve.default", "convolve_inputs.default", "convolve_weights.default")
    assert [all_[name] for name in ours] == [10, 9, 10]
    assert not all_.keys() & {"convolution.default", "convolution_backward.default"}
    monkeypatch.setattr(fusing, "NARROW", 4)
    _, narrow = program(deepcopy(net))
    assert [narrow[name] for name in ours] == [5, 4, 5]
    assert narrow["convolution_backward.default"] == 5


@pytest.mark.parametrize(("inputs", "outputs", "ours"), [(4, 4, True), (4, 8, True), (8, 4, False)])
def test_convolutions_that_make_few_channels_of_many_are_left_to_torch(
    inputs: int, outputs: int, ours: bool
) -> None:
    _, count = program(
        nn.Sequential(
            nn.Conv2d(4, inputs, 1, bias=False), nn.Conv2d(inputs, outputs, 3, bias=False)
        )
    )
    assert count["convolve.default"] == 1 + ours


def test_columns_in_which_nothing_is_learnt_are_as_in_evaluation() -> None:
    net = Progressive(
        lambda: ResNet(4, CLASSES, (2, 2), 4), 3, input_laterals=True, lateral_biases=True
    ).train()
    torch.manual_seed(0)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = (
            0.5 + torch.rand(tensor.shape).to(tensor.dtype)
            if tensor.dim() < 2
            else torch.randn(tensor.shape) / 9
        )
    _, count = program(net)
    assert (count["convolve_norm.default"], count["norm.default"]) == (20, 10)
    assert "native_batch_norm.default" not in count


def test_kernels_are_for_float32_on_a_gpu_and_for_what_they_can_count() -> None:
    def images(numbers: int, dtype: torch.dtype = torch.float32, on_gpu: bool = True) -> Any:
        return SimpleNamespace(is_cuda=on_gpu, dtype=dtype, numel=lambda: numbers)

    assert gpu.by_kernels(images(10**9), 2 * 10**9)
    assert not gpu.by_kernels(images(10**9), 2**31 - 2**20)
    assert not gpu.by_kernels(images(2**31))
    assert not gpu.by_kernels(images(10, torch.float64))
    assert not gpu.by_kernels(images(10, on_gpu=False))


def test_kernels_are_tried_out_in_inference_mode_too() -> None:
    with torch.inference_mode():
        kernel_checks.try_out(torch.device("cpu"))


def test_kernels_that_round_otherwise_are_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(t: Tensor) -> Tensor:
        """Cut to ten bits, as matrix units do."""
        return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def coarse(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: operation(
            *(cut(value) if isinstance(value, Tensor) else value for value in given)
        )

    for name in ("convolve", "convolve_inputs", "convolve_weights"):
        monkeypatch.setattr(kernel_checks, name, coarse(getattr(kernel_checks, name)))
    kernel_checks.try_out(torch.device("cpu"))
    monkeypatch.setattr(
        kernel_checks, "convolve_inputs", lambda *given: 1.01 * convolve_inputs(*given)
    )
    with pytest.raises(ArithmeticError, match=r"its gradient by the inputs is off by 0\.01"):
        kernel_checks.try_out(torch.device("cpu"))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "build",
    [
        lambda: ResNet(4, CLASSES, (2, 2), 4),
        lambda: odd(lambda a, b: (a + b).relu(), bias=False),
        lambda: odd(torch.mul, bias=False),
    ],
)
def test_in_evaluation_a_convolution_takes_in_batch_norm_and_what_is_behind_it(
    build: Callable[[], nn.Module],
) -> None:
    module = build().train()
    x = torch.randn(IMAGES, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        module(torch.randn_like(x) + 1)
    module.eval()
    made = make_fx(module)(x)
    fuse_forward(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    names = [str(node.target) for node in made.graph.nodes]
    assert names.count("onepass.convolve_norm.default") == sum(
        isinstance(part, nn.Conv2d) for part in module.modules()
    )
    assert not {
        "aten.relu.default",
        "aten.add.Tensor",
        "aten.native_batch_norm.default",
        "aten.convolution.default",
    } & set(names)
    assert torch.allclose(made(x), module(x), atol=1e-5)


def test_in_evaluation_what_is_not_a_plain_convolution_and_batch_norm_is_left_alone() -> None:
    for net in (
        odd(torch.mul),
        odd(torch.mul, bias=False, groups=2),
        nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)),
    ):
        x = torch.randn(IMAGES, 4, 8, 8).contiguous(memory_format=torch.channels_last)
        made = make_fx(net.eval())(x)
        fuse_forward(made.graph)
        made.recompile()
        assert "convolve_norm" not in made.code
        assert torch.allclose(made(x), net(x), atol=1e-5)


class Odd(nn.Module):
    """Two layers of convolution and batch-norm, and what a function does behind them."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor], **options: object) -> None:
        super().__init__()
        self.conv, self.twin = (nn.Conv2d(4, 4, 3, padding=1, **options) for _ in range(2))  # type: ignore[arg-type]
        self.norm, self.other, self.then = BatchNorm(4), nn.BatchNorm2d(4), then
        self.fc = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        both = self.then(self.norm(self.conv(x)), self.other(self.twin(x)))
        out: Tensor = self.fc(both.flatten(1))
        return out


def odd(then: Callable[[Tensor, Tensor], Tensor], **options: object) -> Odd:
    net = Odd(then, **options)
    net(torch.randn(2, 4, 8, 8))
    return net.train()


THEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, int]]] = {
    "a sum without relu": (lambda a, b: a + b, {"norm.default": 2}),
    "a relu of a sum": (
        lambda a, b: (a + b).relu(),
        {"norm.default": 2, "norm_backward.default": 2},
    ),
    "a sum that is used twice": (
        lambda a, b: (a + b).relu() * (a + b),
        {"norm.default": 2, "relu.default": 1},
    ),
    "a relu beside the sum": (lambda a, b: a.relu() + b, {"norm.default": 2, "add.Tensor": 1}),
    "a norm that is used twice": (
        lambda a, b: a.relu() + a * b.relu(),
        {"norm.default": 2, "relu.default": 1},
    ),
    "a relu that is used twice": (lambda a, b: a.relu() * a.relu() + b.relu(), {"norm.default": 2}),
    "a norm added to itself": (
        lambda a, b: (a + a).relu() + b,
        {"norm.default": 2, "relu.default": 1},
    ),
    "a sum with a factor": (
        lambda a, b: torch.add(a, b, alpha=2).relu(),
        {"norm.default": 2, "relu.default": 1},
    ),
    "a sum with a number": (
        lambda a, b: (a + 1).relu() + b,
        {"norm.default": 2, "relu.default": 1},
    ),
    "a sum with a row": (lambda a, b: (a + b[:1]).relu(), {"norm.default": 2, "relu.default": 1}),
    "another activation": (
        lambda a, b: torch.nn.functional.leaky_relu(a) + torch.tanh(b),
        {"norm.default": 2},
    ),
    "a relu of a relu": (lambda a, b: a.relu().relu() + b, {"norm.default": 2}),
    "one behind the other": (lambda a, b: (a.relu() + b).relu(), {"norm.default": 2}),
    "written over": (lambda a, b: a.relu_() + b, {}),
    "a clamp": (
        lambda a, b: a.clamp(min=0.5) + nn.functional.threshold(b, 0.2, 0),
        {"norm.default": 2, "threshold_backward.default": 1},
    ),
}


class Free(nn.Module):
    """Layers, and a function that uses them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def free(use: Callable[[Any, Tensor], Tensor], **options: Any) -> Free:
    window = {"kernel_size": 3, "padding": 1, "bias": False} | options
    layers = {
        "a": nn.Conv2d(4, 4, **window),
        "b": nn.Conv2d(4, 4, **window),
        "n": nn.BatchNorm2d(4),
        "m": nn.BatchNorm2d(4),
    }
    net = Free(use, **layers, flat=nn.Linear(256, 256), fc=nn.LazyLinear(CLASSES))
    net(torch.randn(3, 4, 8, 8).contiguous(memory_format=torch.channels_last))
    return net


def written_in_between(net: Any, x: Tensor) -> Tensor:
    t = x * 2
    y = net.n(net.a(x))
    t[:, 0] = 0
    return net.fc((y + t).relu().flatten(1))  # type: ignore[no-any-return]


def written_before_the_norm(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    h = net.b(x)
    x.relu_()
    return net.fc((net.n(h) + x).flatten(1))  # type: ignore[no-any-return]


def shortcut_of_another_layout(net: Any, x: Tensor) -> Tensor:
    t = net.flat(x.flatten(1)).view(-1, 4, 8, 8)
    return net.fc((t + net.n(net.a(x))).relu().flatten(1))  # type: ignore[no-any-return]


def shared_norm(net: Any, x: Tensor) -> Tensor:
    return net.fc((net.n(net.b(net.n(net.a(x)).relu())) + x).relu().flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "use",
    [written_in_between, written_before_the_norm, shortcut_of_another_layout, shared_norm],
    ids=lambda use: use.__name__,
)
def test_nothing_is_moved_past_what_it_depends_on(
    use: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = free(use)
    if use is not written_before_the_norm:  # which autograd refuses
        program(deepcopy(net).train())
    x = torch.randn(IMAGES, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    made = make_fx(net.eval())(x.clone(memory_format=torch.preserve_format))
    fuse_forward(made.graph)
    made.recompile()
    assert torch.allclose(made(x.clone(memory_format=torch.preserve_format)), net(x), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 1, "padding": 1},
        {"kernel_size": 3, "padding": 3},
        {"kernel_size": 3, "padding": 2},
    ],
    ids=str,
)
def test_a_padding_as_wide_as_the_window_is_left_to_torch(options: dict[str, int]) -> None:
    _, count = program(
        free(lambda net, x: net.fc(net.n(net.b(net.a(x))).flatten(1)), **options).train()
    )
    assert ("convolve.default" in count) == (options["padding"] < options["kernel_size"])


@pytest.mark.parametrize(("stride", "forward", "backward"), [(2, 1, 1), (3, 1, 0), (5, 0, 0)])
def test_a_stride_that_does_not_divide_the_image_leaves_the_gradient_to_torch_and_a_long_one_all(
    stride: int, forward: int, backward: int
) -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, stride, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    net(torch.randn(2, 4, 8, 8))
    _, count = program(net.train())
    found = count.get("convolve.default", 0), count.get("convolve_weights.default", 0)
    assert found == (forward, backward)


def test_batch_norm_of_cudnn_is_replaced_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten

    def as_on_a_gpu(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target == aten.native_batch_norm.default:
                node.target = aten.cudnn_batch_norm.default
                with graph.inserting_after(list(node.users)[-1]):
                    kept[node] = graph.call_function(getitem, (node, 3))
            elif node.target == aten.native_batch_norm_backward.default:
                g, x, weight, running_mean, running_var, mean, inverse, _, eps, _ = node.args
                node.target = aten.cudnn_batch_norm_backward.default
                assert isinstance(mean, fx.Node)
                statistics = (running_mean, running_var, mean, inverse)
                node.args = (x, g, weight, *statistics, eps, kept[mean.args[0]])
        fusing.fuse(graph)

    kept: dict[Any, fx.Node] = {}
    monkeypatch.setattr("onepass.engine.tracing.fuse", as_on_a_gpu)
    made, count = program(ResNet(4, CLASSES, (1, 1), 4).train())
    assert count["norm.default"] == 6
    assert "cudnn" not in made.code


@pytest.mark.kernels
@pytest.mark.parametrize("name", THEN)
def test_programs_compute_everything_that_may_come_behind_batch_norm(name: str) -> None:
    then, expected = THEN[name]
    _, count = program(odd(then))
    assert {key: count.get(key, 0) for key in expected} == expected


@pytest.mark.kernels
@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"groups": 2},
        {"dilation": 2, "padding": 2},
        {"stride": 2},
        {"stride": (1, 2)},
        {"padding": 0},
    ],
    ids=str,
)
def test_programs_compute_convolutions_of_every_kind(options: dict[str, object]) -> None:

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            window: Any = {"kernel_size": 3, "padding": 1, "bias": False} | options
            self.conv = nn.Conv2d(4, 4, **window)
            self.norm = nn.BatchNorm2d(4)  # whose gradient lies channels last
            self.fc = nn.LazyLinear(CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.norm(self.conv(self.conv(x))).flatten(1))
            return out

    net = Net()
    net(torch.randn(2, 4, 8, 8))
    _, count = program(net.train())
    plain = options.keys() <= {"stride", "padding"} and options.get("stride") != (1, 2)
    found = count.get("convolve.default", 0), count.get("convolve_inputs.default", 0)
    assert found == ((2, 1) if plain else (0, 0))


@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm2d(4, affine=False), lambda: nn.BatchNorm2d(4).eval()]
)
def test_batch_norm_without_weights_or_by_running_statistics_is_left_alone(
    norm: Callable[[], nn.Module],
) -> None:
    net = odd(lambda a, _: a.relu())
    net.norm = norm()  # type: ignore[assignment]
    program(net)


def test_images_that_do_not_lie_channels_last_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Sequential(
        nn.ReLU(),
        nn.Flatten(),
        nn.Unflatten(1, (4, 8, 8)),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(144, 6),
    )
    program(net.train())
