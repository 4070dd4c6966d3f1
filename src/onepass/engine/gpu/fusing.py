"""Which operations of a program become kernels of our own."""

from __future__ import annotations

import logging
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from onepass.engine import gpu
from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)
aten = torch.ops.aten
NARROW = 160  # channels up to which convolutions are ours; `benchmarks/kernels.py` compares

# The places of weight, bias, running mean and variance, `training`, share and ε in the arguments; the input comes first.
_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten.cudnn_batch_norm.default,
}
# The places of the gradient, the input and the batch's mean.
_BACKWARDS: dict[Any, tuple[int, int, int]] = {
    aten.native_batch_norm_backward.default: (0, 1, 5),
    aten.cudnn_batch_norm_backward.default: (1, 0, 5),
}
_OURS = {
    operation._opoverload
    for operation in (
        convolve,
        convolve_inputs,
        convolve_norm,
        convolve_weights,
        norm,
        norm_backward,
    )
}


@cache
def usable(device: torch.device) -> bool:
    """Do our kernels run on this device, and rightly? They are for NVIDIA's GPUs from Ampere on."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (8, 0)
        or not gpu.has_triton()
    ):
        return False
    try:
        try_out(device)
    except Exception as reason:  # no compiler for C, say
        if is_out_of_memory(reason):
            raise
        log.warning("kernels of our own are not used: %s", first_line(reason))
        return False
    return True


@torch.inference_mode(False)
def try_out(device: torch.device) -> None:
    """Raise unless a convolution, batch-norm and their gradients come out right, batch-norm of images that one kernel does alone and of others.

    Each is compared with float64 on the CPU and given what ours before it have found: a ReLU next to zero would make rounding look like an error.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def images(*shape: int) -> Tensor:
        return (
            torch.randn(shape, generator=generator, device="cpu")
            .to(device)
            .contiguous(memory_format=torch.channels_last)
        )

    def compare(what: str, *pairs: tuple[Tensor, Tensor]) -> None:
        for found, expected in pairs:
            off = float((found.cpu() - expected).norm() / expected.norm())
            if not off < 5e-3:  # in TF32
                raise ArithmeticError(f"{what} is off by {off:.2g} of its length")

    x, w, gamma, beta = (
        images(5, 4, 4, 4),
        images(4, 4, 3, 3),
        *torch.randn(2, 4, generator=generator, device="cpu").to(device),
    )
    y, g = convolve(x, w, 1, 1), images(5, 4, 4, 4)
    a, b = (t.cpu().double().requires_grad_() for t in (x, w))
    with torch.enable_grad():
        expected = torch.conv2d(a, b, padding=1)
        by_inputs, by_weights = torch.autograd.grad(expected, (a, b), g.cpu().double())
    compare("a convolution", (y, expected.detach()))
    compare("its gradient by the inputs", (convolve_inputs(g, w, 1, 1, 4, 4), by_inputs))
    compare("its gradient by the weights", (convolve_weights(g, x, 3, 1, 1), by_weights))
    for inputs, back in ((y, g), (images(5, 4, 33, 33), images(5, 4, 33, 33))):
        out, mean, inverse = norm(inputs, gamma, beta, None, None, None, 0.1, 1e-5, True)
        *found, _ = norm_backward(back, None, inputs, gamma, beta, mean, inverse, None, True, False)
        leaves = [t.cpu().double().requires_grad_() for t in (inputs, gamma, beta)]
        with torch.enable_grad():
            expected = torch.batch_norm(
                leaves[0], leaves[1], leaves[2], None, None, True, 0.1, 1e-5, False
            )
            gradients = torch.autograd.grad(expected, leaves, (back * (out > 0)).cpu().double())
        compare("batch-norm", (out, expected.detach().relu()))
        compare("its gradient", *zip(found, gradients, strict=True))


class _OneByOne(fx.Interpreter):
    """Runs a program and raises where an operation of ours finds something else than torch's do in float64, given the same."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in _OURS:
            return super().call_function(target, args, kwargs)
        if target == norm_backward._opoverload:
            args = _without_doubt(args)
        # Before, since running statistics move.
        expected = target(
            *(value.double() if isinstance(value, Tensor) else value for value in args)
        )
        found = super().call_function(target, args, kwargs)
        parts = zip(
            *([part] if isinstance(part, Tensor) else part for part in (found, expected)),
            _floors(target, args),
            strict=False,
        )
        for one, other, floor in parts:
            relative = max(1e-3, 8 * torch.finfo(one.dtype).eps)
            if not float((one - other).norm()) <= relative * float(other.norm()) + floor:
                raise ArithmeticError(f"{target} is wrong")
        return found


def _without_doubt(args: Any) -> Any:
    """Arguments of `norm_backward` without gradients where rounding tells whether a ReLU is on."""
    g, more, x, weight, bias, mean, inverse, out, relu, keep = args
    if not relu or out is not None:
        return args
    exact, gamma, beta, m, scale = (
        t.double() if t is x else t.double()[:, None, None]
        for t in (x, weight, bias, mean, inverse)
    )
    terms = (gamma * scale).abs() * (exact.abs() + m.abs()) + beta.abs()
    doubtful = (gamma * scale * (exact - m) + beta).abs() < 1e-5 * terms
    g, more = (None if t is None else t.masked_fill(doubtful, 0.0) for t in (g, more))
    return g, more, x, weight, bias, mean, inverse, out, relu, keep


def _floors(target: Any, args: Any) -> tuple[float, ...]:
    """What is nothing but rounding in the results of an operation of ours: a sum of which little is left is as exact as its longest terms."""
    if target != norm_backward._opoverload:
        return 1e-12, 1e-12, 1e-12
    total = sum(float(t.double().abs().sum()) for t in args[:2] if t is not None)
    return 1e-12, 1e-12 + 1e-6 * total, 1e-12 + 1e-6 * total, 1e-12


def check_kernels(program: fx.GraphModule, arguments: list[Tensor]) -> None:
    """Raise unless each of the kernels in a program does what it stands for."""
    _OneByOne(program).run(*arguments)


def fuse(graph: fx.Graph) -> None:
    """Batch-norm takes in the sum and the ReLU behind it, and their derivatives; convolutions with few channels are ours. What nothing is learnt in,
    a frozen column say, is as in answers."""
    fuse_answers(graph)
    for node in list(graph.nodes):
        if node.target in _NORMS:
            _forward(graph, node)
    for node in list(graph.nodes):
        if node.target in _BACKWARDS:
            _backward(graph, node)
        elif node.target == aten.convolution.default and _ours(node, node):
            _convolve(graph, node)
        elif node.target == aten.convolution_backward.default and _ours(node, node.args[0]):
            _convolve_backward(graph, node)


def fuse_answers(graph: fx.Graph) -> None:
    """The same for a program of answers: a convolution takes in batch-norm by running statistics and what comes behind it."""
    for node in list(graph.nodes):
        if node.target in _NORMS:
            _answer(graph, node)


def _answer(graph: fx.Graph, node: fx.Node) -> None:
    x, gamma, beta, mean, variance, training, _, eps = _arguments(node)
    items = _items(node)
    if (
        training is not False
        or None in (gamma, beta, mean, variance)
        or 0 not in items
        or any(items[number].users for number in items if number)
    ):
        return
    if (
        x.target != aten.convolution.default
        or len(x.users) > 1
        or not _is_plain(x, x)
        or _written(x, node, *_arguments(x)[:2])
    ):
        return
    shortcut, total, relu = _behind(node, items[0])
    images, weight, _, stride, padding, *_ = _arguments(x)
    with graph.inserting_before(node):
        arguments = (
            images,
            weight,
            stride[0],
            padding[0],
            gamma,
            beta,
            mean,
            variance,
            eps,
            shortcut,
            relu is not None,
        )
        made = graph.call_function(convolve_norm._opoverload, arguments)
    made.meta = dict(items[0].meta)
    for replaced in (items[0], relu):
        if replaced is not None:
            replaced.replace_all_uses_with(made)
    _erase(graph, relu, total, *items.values(), node, x)


def _forward(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, mean, variance, training, share, eps = _arguments(node)
    items = _items(node)
    if (
        training is not True
        or weight is None
        or bias is None
        or not _is_dense(x)
        or 0 not in items
        or not _are_rows(mean, variance)
    ):
        return
    shortcut, total, relu = _behind(node, items[0])
    with graph.inserting_before(node):
        made = graph.call_function(
            norm._opoverload,
            (x, weight, bias, shortcut, mean, variance, share, eps, relu is not None),
        )
        new = [_item(graph, made, number, items.get(number)) for number in range(3)]
    for number in items.keys() & {0, 1, 2}:
        items[number].replace_all_uses_with(new[number])
    if relu is not None:
        relu.replace_all_uses_with(new[0])
    _erase(graph, relu, total, *items.values(), node)


def _behind(node: fx.Node, out: fx.Node) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
    """What is added to the result of a batch-norm, the sum, and the ReLU behind; all that can be done with it."""
    total = _only_user(out, aten.add.Tensor)
    relu = None if total is None or total.kwargs else _only_user(total, aten.relu.default)
    if total is not None and relu is not None:
        other = next((part for part in total.args if part is not out), None)
        alike = (
            isinstance(other, fx.Node)
            and _is_dense(other)
            and _is_dense(total)
            and _shape(other) == _shape(out)
        )
        if (
            isinstance(other, fx.Node)
            and alike
            and other < node
            and not _written(node, total, other)
        ):
            return other, total, relu
    return None, None, _only_user(out, aten.relu.default)


def _written(first: fx.Node, last: fx.Node, *read: fx.Node) -> bool:
    """Is something between two operations written that shares memory with what is read?"""
    roots, node = {_root(part) for part in read}, first.next
    while node is not last:
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False) and roots & {
            _root(part) for part in node.all_input_nodes
        }:
            return True
        node = node.next
    return False


def _root(node: fx.Node) -> fx.Node:
    """Whose memory it is."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.target != getitem and not any(value.alias_info is not None for value in returns):
            break
        node = node.all_input_nodes[0]
    return node


def _backward(graph: fx.Graph, node: fx.Node) -> None:
    g, x, mean = (_arguments(node)[place] for place in _BACKWARDS[node.target])
    forward = mean.args[0] if mean.target == getitem else None
    if forward is None or forward.target != norm._opoverload:
        return
    _, weight, bias, shortcut, *_, relu = forward.args
    found, items = _items(forward), _items(node)
    masked = total = more = out = None
    behind = (
        g.target == aten.threshold_backward.default
        and g.args[2] == 0
        and _shape(g.args[1]) == _shape(x)
    )
    if behind and not any(user < node for user in g.users) and (len(g.users) == 1 or _is_dense(g)):
        masked = g
        g, out, _ = _arguments(masked)
        if relu and shortcut is None and out is found[0]:
            out = None  # the input tells it, which is read anyway
        if (
            g.target == aten.add.Tensor
            and not g.kwargs
            and len(g.users) == 1
            and all(_shape(part) == _shape(x) for part in g.args)
        ):
            total, (g, more) = g, g.args
    keep = masked is not None and len(masked.users) > 1
    with graph.inserting_before(node):
        arguments = (g, more, x, weight, bias, found[1], found[2], out, masked is not None, keep)
        made = graph.call_function(norm_backward._opoverload, arguments)
        new = [_item(graph, made, number, items.get(number, masked)) for number in range(4)]
    for number, item in items.items():
        item.replace_all_uses_with(new[number])
    rest = _arguments(node)[8] if node.target == aten.cudnn_batch_norm_backward.default else None
    _erase(graph, *items.values(), node)
    while (
        isinstance(rest, fx.Node) and not rest.users
    ):  # what cuDNN keeps for itself, and with it the batch-norm that ours replaced
        before = (
            rest.args[0]
            if rest.op == "call_function" and rest.target in (getitem, aten.clone.default)
            else None
        )
        graph.erase_node(rest)
        rest = before
    if masked is not None:
        masked.replace_all_uses_with(new[3])
    _erase(graph, masked, total)


def _convolve(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, _, stride, padding, *_ = _arguments(node)
    with graph.inserting_before(node):
        made = graph.call_function(convolve._opoverload, (x, weight, stride[0], padding[0]))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    _erase(graph, node)


def _convolve_backward(graph: fx.Graph, node: fx.Node) -> None:
    g, x, weight, _, (stride, _), (padding, _), *_, wanted = _arguments(node)
    side, items, size = _shape(weight)[2], _items(node), _shape(x)[2:]
    with graph.inserting_before(node):
        made = {1: graph.call_function(convolve_weights._opoverload, (g, x, side, stride, padding))}
        if wanted[0]:
            made[0] = graph.call_function(
                convolve_inputs._opoverload, (g, weight, stride, padding, *size)
            )
    for number in made.keys() & items.keys():
        made[number].meta = dict(items[number].meta)
        items[number].replace_all_uses_with(made[number])
    _erase(graph, *items.values(), node)


def _ours(node: fx.Node, out: Any) -> bool:
    """Is this convolution, or that of this backward pass, one of those that our kernels do faster?

    Those that make fewer channels of many are left to torch: a progressive network has one of another width in every task, and to compile a
    kernel takes longer than it would save.
    """
    if not _is_plain(node, out):
        return False
    outputs, inputs, *_ = _shape(
        node.args[2] if node.target == aten.convolution_backward.default else node.args[1]
    )
    return bool(inputs <= outputs <= NARROW)


def _is_plain(node: fx.Node, out: Any) -> bool:
    """Is it one of those that they do?"""
    backward = node.target == aten.convolution_backward.default
    x, weight, bias = (*_arguments(node)[1:3], None) if backward else _arguments(node)[:3]
    stride, padding, dilation, transposed, _, groups = (
        _arguments(node)[4:10] if backward else _arguments(node)[3:9]
    )
    if bias is not None or transposed or groups != 1 or not _is_dense(x) or not _is_dense(out):
        return False
    side = _shape(weight)[2]
    square = [*_shape(weight)[2:], *dilation, *stride, *padding] == [
        side,
        side,
        1,
        1,
        stride[0],
        stride[0],
        padding[0],
        padding[0],
    ]
    whole = not backward or not any(
        n % stride[0] for n in _shape(x)[2:]
    )  # the gradient by the inputs wants that
    plain = side in (1, 3) and padding[0] < side and stride[0] <= 4 and square and whole
    return plain and (not backward or node.args[-1][1:] == [True, False])  # type: ignore[index]


def _arguments(node: fx.Node) -> Any:
    return node.args


def _shape(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def _are_rows(*columns: Any) -> bool:
    """Do the numbers of these, where they are given, lie one behind the other? They are written where they are."""
    return all(column is None or column.meta["val"].is_contiguous() for column in columns)


def _is_dense(x: Any) -> bool:
    """Are these images of float32 that lie channels last?"""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.dtype != torch.float32:
        return False
    return value.is_contiguous(memory_format=torch.channels_last)


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {_arguments(user)[1]: user for user in node.users if user.target == getitem}


def _item(graph: fx.Graph, made: fx.Node, number: int, like: fx.Node | None) -> fx.Node:
    item = graph.call_function(getitem, (made, number))
    if like is not None:
        item.meta = dict(like.meta)
    return item


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    return next(
        (user for user in node.users if len(node.users) == 1 and user.target == target), None
    )


def _erase(graph: fx.Graph, *nodes: fx.Node | None) -> None:
    for node in nodes:
        if node is not None and not node.users:
            graph.erase_node(node)
