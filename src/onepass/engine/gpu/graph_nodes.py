"""What a node of a traced program computes, reads and writes, and changes of the program."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx


def arguments(node: fx.Node) -> Any:
    return node.args


def shape(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def are_contiguous(*columns: Any) -> bool:
    """Whether the columns that are given are contiguous, so that a kernel can write them."""
    return all(column is None or column.meta["val"].is_contiguous() for column in columns)


def is_dense(x: Any) -> bool:
    """Whether these are images of float32 that lie channels last."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.dtype != torch.float32:
        return False
    return value.is_contiguous(memory_format=torch.channels_last)


def written(first: fx.Node, last: fx.Node, *read: fx.Node) -> bool:
    """Whether an operation between these two writes memory of the nodes `read`."""
    roots, node = {_root(part) for part in read}, first.next
    while node is not last:
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False) and roots & {
            _root(part) for part in node.all_input_nodes
        }:
            return True
        node = node.next
    return False


def _root(node: fx.Node) -> fx.Node:
    """The node that owns this one's memory."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.target != getitem and not any(value.alias_info is not None for value in returns):
            break
        node = node.all_input_nodes[0]
    return node


def items(node: fx.Node) -> dict[int, fx.Node]:
    """The results of an operation that are used, by their number."""
    return {arguments(user)[1]: user for user in node.users if user.target == getitem}


def item(graph: fx.Graph, made: fx.Node, number: int, like: fx.Node | None) -> fx.Node:
    """A new node for one result of an operation."""
    found = graph.call_function(getitem, (made, number))
    if like is not None:
        found.meta = dict(like.meta)
    return found


def only_user(node: fx.Node, target: Any) -> fx.Node | None:
    """The one operation that uses a node, if it is of this kind."""
    if len(node.users) != 1:
        return None
    return next((user for user in node.users if user.target == target), None)


def erase(graph: fx.Graph, *nodes: fx.Node | None) -> None:
    """Erase those nodes that nothing uses any more."""
    for node in nodes:
        if node is not None and not node.users:
            graph.erase_node(node)
