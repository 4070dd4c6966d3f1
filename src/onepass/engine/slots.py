"""Slots: the labels of a stream of tasks.

A slot is a (task, class) pair, one output of the network. The slots that compete for an example are those of its own task, so a slot alone
says which outputs its softmax runs over. A head a task, one head shared by all tasks, a fresh head for a recurring class: all are tables
of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Slots:
    """Which outputs compete: `table[k]` lists the slots of task `k`; `union` makes all slots compete in the loss, whatever the task."""

    table: tuple[tuple[int, ...], ...]
    union: bool = False

    @property
    def count(self) -> int:
        return 1 + max(max(row) for row in self.table)

    def on(self, device: torch.device) -> Competition:
        return Competition(self, device)


class Competition:
    """The tables of `Slots` as tensors: for every slot its competitors `[S, C]` and its own position among them `[S]`."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self.slots = slots
        everything = tuple(range(slots.count))
        rows: dict[int, tuple[int, ...]] = {slot: row for row in slots.table for slot in row}
        self.evaluated = _Rivals({s: rows.get(s, (s,)) for s in everything}, device)
        self.trained = (
            _Rivals(dict.fromkeys(everything, everything), device)
            if slots.union
            else self.evaluated
        )

    def cross_entropy(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Mean over the batch of `-log softmax(logits of the competitors)[slot]`."""
        rivals, place = (
            self.trained.select(logits, slots),
            self.trained.position[slots] if self.trained.partial else slots,
        )
        if not logits.is_cuda:
            return functional.cross_entropy(rivals, place)
        surprise: Tensor = _Surprise.apply(rivals, place)  # type: ignore[no-untyped-call]
        return surprise

    def outputs(self, logits: Tensor, slots: Tensor) -> Tensor:
        """The outputs of each example's own task, `[..., C]`; zero where a task has fewer than others."""
        chosen = self.evaluated.select(logits, slots)
        return (
            chosen.masked_fill(self.evaluated.competitors[slots] < 0, 0)
            if self.evaluated.ragged
            else chosen
        )

    def sample(self, logits: Tensor, slots: Tensor, uniform: Tensor) -> Tensor:
        """For each example a slot drawn from the network's own prediction, by `uniform` that is uniform on [0, 1)."""
        likely = self.trained.select(logits, slots).softmax(-1).cumsum(-1)
        place = (likely < uniform[..., None]).sum(-1)
        if not self.trained.partial:
            return place.clamp(max=likely.shape[-1] - 1)
        rivals = self.trained.competitors[slots]
        return rivals.gather(-1, place.clamp(max=(rivals >= 0).sum(-1) - 1)[..., None])[..., 0]

    def correct(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Whether the best of an example's competitors is its slot. A score that is not a number is never right."""
        chosen = self.evaluated.select(scores, slots)
        best = chosen.argmax(-1)
        return (
            best == (self.evaluated.position[slots] if self.evaluated.partial else slots)
        ) & ~chosen.isnan().any(-1)


class _Surprise(torch.autograd.Function):
    """The cross-entropy with its gradient written out, `(softmax(z) − onehot(y)) / B`: on a GPU every operation costs as much as a product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, place: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, place[..., None]).mean().neg()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, place = ctx.saved_tensors
        share = 1 / place.shape[-1]
        right = (place[..., None] == torch.arange(logits.shape[-1], device=logits.device)).to(
            logits.dtype
        ) * -share
        return torch.add(right, logits.softmax(-1), alpha=share) * upstream, None


class _Rivals:
    def __init__(self, rows: dict[int, tuple[int, ...]], device: torch.device) -> None:
        everything, different = (
            tuple(range(len(rows))),
            list({id(row): row for row in rows.values()}.values()),
        )
        width = max(map(len, different))
        self.partial, self.ragged = any(row != everything for row in different), False
        if (
            not self.partial
        ):  # one head: a table of its own would grow with the square of the classes
            self.position = torch.arange(len(rows), device=device)
            self.competitors = self.position.expand(len(rows), -1)
            return
        table = [list(row) + [-1] * (width - len(row)) for row in rows.values()]
        self.ragged = any(-1 in row for row in table)
        self.competitors = torch.tensor(table, device=device)
        self.position = torch.tensor([row.index(s) for s, row in rows.items()], device=device)

    def select(self, logits: Tensor, slots: Tensor) -> Tensor:
        """The outputs that compete, `[..., C]`: sliced, not masked, so that no constant stands in for minus infinity."""
        if not self.partial:
            return logits
        rivals = self.competitors[slots]
        if not self.ragged:
            return logits.gather(-1, rivals)
        return logits.gather(-1, rivals.clamp(min=0)).masked_fill(rivals < 0, -torch.inf)
