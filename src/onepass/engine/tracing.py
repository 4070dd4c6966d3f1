"""Gradient programs: a gradient traced once into a list of tensor operations and replayed without autograd.

A step at batch size 10 spends most of its time in the overhead around its few matrix products: building a graph, walking it back,
allocating gradients, copying them into the flat vector. A traced program has none of that: it calls the operations one after the other
and lets the matrix products of the backward pass write straight into the gradient row.
"""

from __future__ import annotations

import copy
import math
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
    """The model's own layers draw random numbers: a replay would not take them from the run's seed."""


def trace(
    function: Callable[..., tuple[list[Tensor], Tensor]],
    arguments: list[Tensor],
    outputs: list[Tensor],
    on_gpu: bool | None = None,
) -> fx.GraphModule:
    """Trace `function(*arguments) -> (gradients, loss)`; its `forward(*arguments, *outputs) -> loss` is the program.

    Gradient `i` is written into `outputs[i]`. Tracing runs the function once, so the arguments must be ones that may be written to
    (copies of batch-norm statistics). `on_gpu` forces what is done for the sake of a GPU, or its absence.
    """
    module = make_fx(function)(*arguments)
    graph = module.graph
    if any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in graph.nodes
    ):
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


def resized(
    one: fx.GraphModule, its_size: int, other: fx.GraphModule, other_size: int, size: int
) -> fx.GraphModule | None:
    """The program for batches of a third size, from two: numbers that differ in them are multiples of the size, or of one by it; None if not.

    To trace takes a second and this none. What comes out is checked like anything that is traced.
    """

    def fitted(mine: Any, theirs: Any) -> Any:
        if isinstance(mine, (list, tuple)) and len(mine) == len(theirs):
            return type(mine)([fitted(a, b) for a, b in zip(mine, theirs, strict=True)])
        if isinstance(mine, fx.Node) or mine == theirs:
            return mine
        if (
            isinstance(mine, int)
            and mine * other_size == theirs * its_size
            and mine * size % its_size == 0
        ):
            return mine * size // its_size
        if isinstance(mine, float) and math.isclose(mine * its_size, theirs * other_size):
            return mine * its_size / size
        raise ValueError(mine, theirs)

    made = copy.deepcopy(one)
    try:
        for node, twin in zip(made.graph.nodes, other.graph.nodes, strict=True):
            if (node.op, node.name, node.target) != (twin.op, twin.name, twin.target):
                return None
            if node.op == "get_attr" and not _same(
                getattr(one, node.target), getattr(other, node.target)
            ):
                return None
            if node.op == "call_function":
                node.args = fitted(node.args, twin.args)
                node.kwargs = {
                    key: fitted(value, twin.kwargs[key]) for key, value in node.kwargs.items()
                }
    except (ValueError, KeyError):
        return None
    made.recompile()
    return made


def _same(one: Any, other: Any) -> bool:
    """Are these constants of two programs the same? One of them may depend on the size."""
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )


def _write_into(gradient: fx.Node, place: fx.Node, output: Tensor) -> bool:
    """Let the operation behind a gradient (a weight's product, a bias's sum) write into its place; False if it is of another kind."""
    if len(gradient.users) != 1:
        return False
    if gradient.target in _WITH_OUT and gradient.meta["val"].shape == output.shape:
        gradient.target, gradient.kwargs = _WITH_OUT[gradient.target], {"out": place}
        return True
    total = gradient.args[0] if gradient.target == aten.view.default else None
    if (
        isinstance(total, fx.Node)
        and total.target == aten.sum.dim_IntList
        and len(total.users) == 1
        and total.args[2:] == (True,)
    ):
        source, dims = total.args[:2]
        assert isinstance(source, fx.Node)
        assert isinstance(dims, list)
        gone = {d % source.meta["val"].dim() for d in dims}
        if (
            torch.Size(n for d, n in enumerate(source.meta["val"].shape) if d not in gone)
            == output.shape
        ):
            total.target, total.args, total.kwargs = (
                aten.sum.IntList_out,
                (source, dims, False),
                {"out": place},
            )
            return True
    return False


def _writes(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _drop_empty_reshapes(graph: fx.Graph) -> None:
    """Remove transposes of transposes and views that change nothing: they cost a dispatch each and hide the products behind them."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        once = node.target in (aten.mul.Scalar, aten.mul.Tensor) and _is_one(node.args[1])
        if once and all(
            user.target == aten.view.default for user in node.users
        ):  # a reshape may be of a part of theta, whose rows are apart
            for user in node.users:
                user.target = aten.reshape.default
        if once and (
            _layout(node) == _layout(source)
            or all(user.target == aten.reshape.default for user in node.users)
        ):
            node.replace_all_uses_with(source)
            continue
        twice = (
            node.target in (aten.t.default, aten.transpose.int)
            and source.target == node.target
            and source.args[1:] == node.args[1:]
        )
        same = node.target in _RESHAPES and _layout(node) == _layout(source)
        if twice or same:
            original = source.args[0] if twice else source
            node.replace_all_uses_with(original)
    graph.eliminate_dead_code(is_impure_node=_writes)


def _is_one(factor: object) -> bool:
    if isinstance(factor, fx.Node):
        return factor.target == aten.ones_like.default or (
            factor.target in _RESHAPES and _is_one(factor.args[0])
        )
    return factor == 1


def _add_in_products(graph: fx.Graph) -> None:
    """`b + x y` as a product that is added to copies of `b`, which wait for nothing: on a GPU the longest row of operations is what takes time."""
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
                with graph.inserting_before(node):
                    wide = graph.call_function(
                        aten.expand.default, (bias, list(node.meta["val"].shape))
                    )
                    copies = graph.call_function(
                        aten.clone.default, (wide,), {"memory_format": torch.contiguous_format}
                    )
                node.target, node.args = aten.baddbmm_.default, (copies, *product.args)
                break
    graph.eliminate_dead_code(is_impure_node=_writes)


# Small operations of a kind that take a GPU no longer together than each: what they become.
_TOGETHER: dict[Any, Any] = {
    aten.copy_.default: aten._foreach_copy_.default,
    aten.lerp.Scalar: aten._foreach_lerp.Scalar,
    aten.add_.Tensor: aten._foreach_add_.Scalar,
    aten.pow.Tensor_Scalar: aten._foreach_pow.Scalar,
    aten.sub.Tensor: aten._foreach_sub.Scalar,
}


def _write_together(graph: fx.Graph) -> None:
    """Put off what nobody waits for (gradients that are copied to their places, running statistics that move) to the end, and do it there
    all at once, kind by kind."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    late: dict[fx.Node, Hashable] = {}
    for node in reversed(graph.nodes):
        kind = _kind(node)
        if kind is not None and (
            _is_last_to_touch(node, order)
            if _writes(node)
            else node.users and all(user in late for user in node.users)
        ):
            late[node] = kind
    result = next(iter(graph.find_nodes(op="output")))
    with graph.inserting_before(result):
        while late:
            ready = [
                node
                for node in reversed(late)
                if not any(source in late for source in node.all_input_nodes)
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
    """What operations must have in common to be done together: tensors come first, and the rest is the same."""
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
    return (
        node.target,
        *((t.dtype if isinstance(t, Tensor) else None) for t in values[:tensors]),
        *plain,
    )


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
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.stride()
