"""Which operations of a traced program become operations with kernels of ours."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from onepass.engine.gpu.convolution import (
    convolve,
    convolve_inputs,
    convolve_norm,
    convolve_weights,
)
from onepass.engine.gpu.graph_nodes import (
    are_contiguous,
    arguments,
    erase,
    is_dense,
    item,
    items,
    only_user,
    shape,
    written,
)
from onepass.engine.gpu.norm import norm, norm_backward

aten = torch.ops.aten
NARROW = 160  # channels up to which convolutions are ours; `benchmarks/kernels.py` compares

# Their arguments: input, weight, bias, running mean and variance, `training`, share and ε.
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


def fuse(graph: fx.Graph) -> None:
    """Fuse the program of a gradient.

    Batch-norm takes in the sum and the ReLU behind it, and their derivatives; convolutions with few
    channels are ours. Parts that do not learn, a frozen column say, are fused as in evaluation.
    """
    fuse_forward(graph)
    for node in list(graph.nodes):
        if node.target in _NORMS:
            _fuse_norm(graph, node)
    for node in list(graph.nodes):
        if node.target in _BACKWARDS:
            _fuse_norm_backward(graph, node)
        elif node.target == aten.convolution.default and _is_ours(node, node):
            _replace_convolution(graph, node)
        elif node.target == aten.convolution_backward.default and _is_ours(node, node.args[0]):
            _replace_convolution_backward(graph, node)


def fuse_forward(graph: fx.Graph) -> None:
    """Fuse the program of a forward pass in evaluation.

    A convolution takes in batch-norm by running statistics and what comes behind it.
    """
    for node in list(graph.nodes):
        if node.target in _NORMS:
            _fuse_convolution(graph, node)


def _fuse_convolution(graph: fx.Graph, node: fx.Node) -> None:
    x, gamma, beta, mean, variance, training, _, eps = arguments(node)
    used = items(node)
    if (
        training is not False
        or None in (gamma, beta, mean, variance)
        or 0 not in used
        or any(used[number].users for number in used if number)
    ):
        return
    if (
        x.target != aten.convolution.default
        or len(x.users) > 1
        or not _is_plain(x, x)
        or written(x, node, *arguments(x)[:2])
    ):
        return
    shortcut, total, relu = _behind(node, used[0])
    images, weight, _, stride, padding, *_ = arguments(x)
    statistics = gamma, beta, mean, variance, eps
    with graph.inserting_before(node):
        made = graph.call_function(
            convolve_norm._opoverload,
            (images, weight, stride[0], padding[0], *statistics, shortcut, relu is not None),
        )
    made.meta = dict(used[0].meta)
    for replaced in (used[0], relu):
        if replaced is not None:
            replaced.replace_all_uses_with(made)
    erase(graph, relu, total, *used.values(), node, x)


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, mean, variance, training, share, eps = arguments(node)
    used = items(node)
    if (
        training is not True
        or weight is None
        or bias is None
        or not is_dense(x)
        or 0 not in used
        or not are_contiguous(mean, variance)
    ):
        return
    shortcut, total, relu = _behind(node, used[0])
    with graph.inserting_before(node):
        made = graph.call_function(
            norm._opoverload,
            (x, weight, bias, shortcut, mean, variance, share, eps, relu is not None),
        )
        new = [item(graph, made, number, used.get(number)) for number in range(3)]
    for number in used.keys() & {0, 1, 2}:
        used[number].replace_all_uses_with(new[number])
    if relu is not None:
        relu.replace_all_uses_with(new[0])
    erase(graph, relu, total, *used.values(), node)


def _behind(node: fx.Node, out: fx.Node) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
    """What is added to the result of a batch-norm, the sum, and the ReLU, if they can be fused."""
    total = only_user(out, aten.add.Tensor)
    relu = None if total is None or total.kwargs else only_user(total, aten.relu.default)
    if total is not None and relu is not None:
        other = next((part for part in total.args if part is not out), None)
        if (
            isinstance(other, fx.Node)
            and is_dense(other)
            and is_dense(total)
            and shape(other) == shape(out)
            and other < node
            and not written(node, total, other)
        ):
            return other, total, relu
    return None, None, only_user(out, aten.relu.default)


def _fuse_norm_backward(graph: fx.Graph, node: fx.Node) -> None:
    g, x, mean = (arguments(node)[place] for place in _BACKWARDS[node.target])
    forward = mean.args[0] if mean.target == getitem else None
    if forward is None or forward.target != norm._opoverload:
        return
    _, weight, bias, shortcut, *_, relu = forward.args
    found, used = items(forward), items(node)
    masked = total = more = out = None
    behind = (
        g.target == aten.threshold_backward.default
        and g.args[2] == 0
        and shape(g.args[1]) == shape(x)
    )
    if behind and not any(user < node for user in g.users) and (len(g.users) == 1 or is_dense(g)):
        masked = g
        g, out, _ = arguments(masked)
        if relu and shortcut is None and out is found[0]:
            out = None  # the input tells it, which is read anyway
        if (
            g.target == aten.add.Tensor
            and not g.kwargs
            and len(g.users) == 1
            and all(shape(part) == shape(x) for part in g.args)
        ):
            total, (g, more) = g, g.args
    keep = masked is not None and len(masked.users) > 1
    statistics = found[1], found[2]
    with graph.inserting_before(node):
        made = graph.call_function(
            norm_backward._opoverload,
            (g, more, x, weight, bias, *statistics, out, masked is not None, keep),
        )
        new = [item(graph, made, number, used.get(number, masked)) for number in range(4)]
    for number, one in used.items():
        one.replace_all_uses_with(new[number])
    reserve = arguments(node)[8] if node.target == aten.cudnn_batch_norm_backward.default else None
    erase(graph, *used.values(), node)
    _erase_reserve(graph, reserve)
    if masked is not None:
        masked.replace_all_uses_with(new[3])
    erase(graph, masked, total)


def _erase_reserve(graph: fx.Graph, node: Any) -> None:
    """Erase what cuDNN keeps for itself, and with it the batch-norm that ours has replaced."""
    while isinstance(node, fx.Node) and not node.users:
        passes_on = node.op == "call_function" and node.target in (getitem, aten.clone.default)
        before = node.args[0] if passes_on else None
        graph.erase_node(node)
        node = before


def _replace_convolution(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, _, stride, padding, *_ = arguments(node)
    with graph.inserting_before(node):
        made = graph.call_function(convolve._opoverload, (x, weight, stride[0], padding[0]))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    erase(graph, node)


def _replace_convolution_backward(graph: fx.Graph, node: fx.Node) -> None:
    g, x, weight, _, (stride, _), (padding, _), *_, wanted = arguments(node)
    side, used, size = shape(weight)[2], items(node), shape(x)[2:]
    with graph.inserting_before(node):
        made = {1: graph.call_function(convolve_weights._opoverload, (g, x, side, stride, padding))}
        if wanted[0]:
            made[0] = graph.call_function(
                convolve_inputs._opoverload, (g, weight, stride, padding, *size)
            )
    for number in made.keys() & used.keys():
        made[number].meta = dict(used[number].meta)
        used[number].replace_all_uses_with(made[number])
    erase(graph, *used.values(), node)


def _is_ours(node: fx.Node, out: Any) -> bool:
    """Whether our kernels are faster at this convolution, or at that of this backward pass.

    Those that make fewer channels of many are left to torch: a progressive network has one of
    another width in every task, and to compile a kernel takes longer than it would save.
    """
    if not _is_plain(node, out):
        return False
    backward = node.target == aten.convolution_backward.default
    outputs, inputs, *_ = shape(node.args[2] if backward else node.args[1])
    return bool(inputs <= outputs <= NARROW)


def _is_plain(node: fx.Node, out: Any) -> bool:
    """Whether our kernels can compute it."""
    backward = node.target == aten.convolution_backward.default
    given = arguments(node)
    x, weight, bias = (*given[1:3], None) if backward else given[:3]
    stride, padding, dilation, transposed, _, groups = given[4:10] if backward else given[3:9]
    if bias is not None or transposed or groups != 1 or not is_dense(x) or not is_dense(out):
        return False
    side = shape(weight)[2]
    square = [side, side, 1, 1, stride[0], stride[0], padding[0], padding[0]]
    if [*shape(weight)[2:], *dilation, *stride, *padding] != square:
        return False
    if side not in (1, 3) or padding[0] >= side or stride[0] > 4:
        return False
    if not backward:
        return True
    # The gradient by the inputs wants images that the stride divides.
    return given[-1][1:] == [True, False] and not any(n % stride[0] for n in shape(x)[2:])
