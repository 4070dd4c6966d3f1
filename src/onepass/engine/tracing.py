"""Traced programs: a gradient as a list of tensor operations, run without autograd.

A step at batch size 10 spends most of its time in the overhead around its few matrix products:
building a graph, walking it back, allocating gradients, copying them into the flat vector. A traced
program has none of that. It calls one operation after the other, and the matrix products of the
backward pass write straight into the gradient row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.engine.gpu.fusing import fuse
from onepass.engine.gpu.kernel_checks import usable

aten = torch.ops.aten
_WITH_OUT = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.detach.default,
    aten.alias.default,
}

Program = Callable[..., Tensor]


class DrawsRandomNumbersError(Exception):
    """The model's own layers draw random numbers, which a program cannot seed for each run."""


def trace(
    function: Callable[..., tuple[list[Tensor], Tensor]],
    arguments: list[Tensor],
    outputs: list[Tensor],
    on_gpu: bool | None = None,
) -> fx.GraphModule:
    """Trace `function(*arguments) -> (gradients, loss)` into a program.

    The program is `forward(*arguments, *outputs) -> loss`, which writes gradient `i` into
    `outputs[i]`. Tracing runs the function once, so the arguments must be ones that may be written
    to (copies of batch-norm statistics). `on_gpu` forces what is done for a GPU, or its absence.
    """
    module = make_fx(function)(*arguments)
    graph = module.graph
    random = torch.Tag.nondeterministic_seeded
    if any(random in getattr(node.target, "tags", ()) for node in graph.nodes):
        raise DrawsRandomNumbersError("the model draws random numbers (dropout?)")
    _drop_empty_reshapes(graph)
    on_gpu = arguments[0].is_cuda if on_gpu is None else on_gpu
    if on_gpu:
        _add_in_products(graph)
        if usable(arguments[0].device) or not arguments[0].is_cuda:
            fuse(graph)
    result = next(node for node in graph.nodes if node.op == "output")
    gradients, loss = result.args[0]
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    places: list[fx.Node] = []
    for i in reversed(range(len(outputs))):
        with graph.inserting_after(last_input):
            places.insert(0, graph.placeholder(f"out_{i}"))
    with graph.inserting_before(result):
        for gradient, place, output in zip(gradients, places, outputs, strict=True):
            if not _write_into(gradient, place, output):
                graph.call_function(aten.copy_.default, (place, gradient))
    result.args = (loss,)
    if on_gpu:
        _write_together(graph)
    graph.eliminate_dead_code(is_impure_node=_writes)
    graph.lint()
    module.recompile()
    return module


def _write_into(gradient: fx.Node, place: fx.Node, output: Tensor) -> bool:
    """Let the operation behind a gradient write into its place, and say whether it can.

    A weight's product and a bias's sum can.
    """
    if len(gradient.users) != 1:
        return False
    if gradient.target in _WITH_OUT and gradient.meta["val"].shape == output.shape:
        gradient.target, gradient.kwargs = _WITH_OUT[gradient.target], {"out": place}
        return True
    total = gradient.args[0] if gradient.target == aten.view.default else None
    if not isinstance(total, fx.Node) or len(total.users) != 1:
        return False
    if total.target != aten.sum.dim_IntList or total.args[2:] != (True,):
        return False
    source, dims = total.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(dims, list)
    shape = source.meta["val"].shape
    gone = {d % len(shape) for d in dims}
    if torch.Size(n for d, n in enumerate(shape) if d not in gone) != output.shape:
        return False
    total.target, total.kwargs = aten.sum.IntList_out, {"out": place}
    total.args = (source, dims, False)
    return True


def _writes(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _drop_empty_reshapes(graph: fx.Graph) -> None:
    """Remove transposes of transposes, products with one, and views that change nothing.

    They cost a dispatch each, and hide the products behind them.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if node.target in (aten.mul.Scalar, aten.mul.Tensor) and _is_one(node.args[1]):
            # A view may be of a part of theta, whose rows are apart: then it has to be a reshape.
            if all(user.target == aten.view.default for user in node.users):
                for user in node.users:
                    user.target = aten.reshape.default
            reshaped = all(user.target == aten.reshape.default for user in node.users)
            if reshaped or _layout(node) == _layout(source):
                node.replace_all_uses_with(source)
            continue
        twice = (
            node.target in (aten.t.default, aten.transpose.int)
            and source.target == node.target
            and source.args[1:] == node.args[1:]
        )
        same = node.target in _RESHAPES and _layout(node) == _layout(source)
        if twice or same:
            node.replace_all_uses_with(source.args[0] if twice else source)
    graph.eliminate_dead_code(is_impure_node=_writes)


def _is_one(factor: object) -> bool:
    if isinstance(factor, fx.Node):
        return factor.target == aten.ones_like.default or (
            factor.target in _RESHAPES and _is_one(factor.args[0])
        )
    return factor == 1


def _add_in_products(graph: fx.Graph) -> None:
    """Turn `b + x y` into a product that is added to copies of `b`.

    The copies wait for nothing: on a GPU the longest chain of operations takes the time.
    """
    for node in graph.nodes:
        if node.target != aten.add.Tensor or node.kwargs:
            continue
        for bias, product in (node.args[:2], node.args[1::-1]):
            if (
                isinstance(product, fx.Node)
                and product.target == aten.bmm.default
                and len(product.users) == 1
                and isinstance(bias, fx.Node)
                and _layout(node) == _layout(product)
            ):
                shape, contiguous = list(node.meta["val"].shape), torch.contiguous_format
                with graph.inserting_before(node):
                    wide = graph.call_function(aten.expand.default, (bias, shape))
                    copies = graph.call_function(
                        aten.clone.default, (wide,), {"memory_format": contiguous}
                    )
                node.target, node.args = aten.baddbmm_.default, (copies, *product.args)
                break
    graph.eliminate_dead_code(is_impure_node=_writes)


# Small operations that take a GPU no longer together than each alone, and what they become.
_TOGETHER: dict[Any, Any] = {
    aten.copy_.default: aten._foreach_copy_.default,
    aten.lerp.Scalar: aten._foreach_lerp.Scalar,
    aten.add_.Tensor: aten._foreach_add_.Scalar,
    aten.pow.Tensor_Scalar: aten._foreach_pow.Scalar,
    aten.sub.Tensor: aten._foreach_sub.Scalar,
}


def _write_together(graph: fx.Graph) -> None:
    """Put off what no operation waits for to the end, and do it there all at once, kind by kind.

    These are gradients that are copied to their places, and running statistics that move.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    late: dict[fx.Node, Hashable] = {}
    for node in reversed(graph.nodes):
        kind = _kind(node)
        if kind is None:
            continue
        if _writes(node):
            can_wait = _is_last_to_touch(node, order)
        else:
            can_wait = bool(node.users) and all(user in late for user in node.users)
        if can_wait:
            late[node] = kind
    result = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(result):
        while late:
            ready = [
                node for node in reversed(late) if late.keys().isdisjoint(node.all_input_nodes)
            ]
            alike = [node for node in ready if late[node] == late[ready[0]]]
            count = sum(isinstance(argument, fx.Node) for argument in alike[0].args)
            lists = [[node.args[i] for node in alike] for i in range(count)]
            together = graph.call_function(
                _TOGETHER[alike[0].target], (*lists, *alike[0].args[count:])
            )
            for number, node in enumerate(alike):
                if node.users:
                    node.replace_all_uses_with(graph.call_function(getitem, (together, number)))
                del late[node]
                graph.erase_node(node)


def _kind(node: fx.Node) -> Hashable | None:
    """What operations must have in common to be done together; None if they cannot be.

    Tensors come first, and the other arguments are the same.
    """
    if node.target not in _TOGETHER or node.kwargs:
        return None
    values = [
        argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        for argument in node.args
    ]
    tensors = 2 if node.target in (aten.copy_.default, aten.lerp.Scalar) else 1
    plain = values[tensors:]
    if any(isinstance(value, Tensor) for value in plain) or len(values) < tensors:
        return None
    dtypes = [t.dtype if isinstance(t, Tensor) else None for t in values[:tensors]]
    return (node.target, *dtypes, *plain)


def _is_last_to_touch(node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    place = node.args[0]
    return (
        not node.users
        and isinstance(place, fx.Node)
        and place.op == "placeholder"
        and all(order[user] <= order[node] for user in place.users)
    )


def _layout(node: fx.Node) -> tuple[torch.Size, tuple[int, ...]] | None:
    value = node.meta.get("val")
    return (value.shape, value.stride()) if isinstance(value, Tensor) else None
