"""Slots: the labels of a stream of tasks.

A slot is a (task, class) pair, one output of the network. The slots that compete for an example are
those of its own task, so a slot alone says which outputs its softmax runs over. One head per task,
one head for all tasks, a fresh head for a recurring class: all are tables of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Slots:
    """Which outputs compete: `table[k]` lists the slots of task `k`.

    With `union`, all slots compete in the loss, whatever the task.
    """

    table: tuple[tuple[int, ...], ...]
    union: bool = False

    @property
    def count(self) -> int:
        return 1 + max(max(row) for row in self.table)

    def on(self, device: torch.device) -> Competition:
        return Competition(self, device)


class Competition:
    """The tables of `Slots` as tensors: competitors and cross-entropy of every slot."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self.slots = slots
        everything = tuple(range(slots.count))
        rows: dict[int, tuple[int, ...]] = {slot: row for row in slots.table for slot in row}
        self.evaluated = _Rivals({s: rows.get(s, (s,)) for s in everything}, device)
        self.trained = self.evaluated
        if slots.union:
            self.trained = _Rivals(dict.fromkeys(everything, everything), device)

    def cross_entropy(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Mean over the batch of `-log softmax(logits of the competitors)[slot]`."""
        rivals, place = self.trained.select(logits, slots), self.trained.place(slots)
        if not logits.is_cuda:
            return functional.cross_entropy(rivals, place)
        loss: Tensor = _CrossEntropy.apply(rivals, place)  # type: ignore[no-untyped-call]
        return loss

    def outputs(self, logits: Tensor, slots: Tensor) -> Tensor:
        """The outputs of each example's own task, `[..., C]`, filled up with zeros."""
        chosen = self.evaluated.select(logits, slots)
        if self.evaluated.ragged:
            chosen = chosen.masked_fill(self.evaluated.competitors[slots] < 0, 0)
        return chosen

    def sample(self, logits: Tensor, slots: Tensor, uniform: Tensor) -> Tensor:
        """A slot per example, drawn from the network's own prediction by a number on [0, 1)."""
        likely = self.trained.select(logits, slots).softmax(-1).cumsum(-1)
        place = (likely < uniform[..., None]).sum(-1)
        if not self.trained.partial:
            return place.clamp(max=likely.shape[-1] - 1)
        rivals = self.trained.competitors[slots]
        return rivals.gather(-1, place.clamp(max=(rivals >= 0).sum(-1) - 1)[..., None])[..., 0]

    def correct(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Whether the best of an example's competitors is its slot; never if a score is NaN."""
        chosen = self.evaluated.select(scores, slots)
        return (chosen.argmax(-1) == self.evaluated.place(slots)) & ~chosen.isnan().any(-1)


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy with its gradient written out, `(softmax(z) − onehot(y)) / B`.

    On a GPU every operation costs as much as a product, and autograd would need more of them.
    """

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
        onehot = place[..., None] == torch.arange(logits.shape[-1], device=logits.device)
        right = onehot.to(logits.dtype) * -share
        return torch.add(right, logits.softmax(-1), alpha=share) * upstream, None


class _Rivals:
    """For every slot its competitors `[S, C]`, and its own position among them `[S]`.

    `partial`: not all outputs compete. `ragged`: some slots have fewer competitors than others.
    """

    def __init__(self, rows: dict[int, tuple[int, ...]], device: torch.device) -> None:
        everything = tuple(range(len(rows)))
        different = list({id(row): row for row in rows.values()}.values())
        width = max(map(len, different))
        self.partial = any(row != everything for row in different)
        self.ragged = False
        # One head needs no table, which would grow with the square of the classes.
        if not self.partial:
            self.position = torch.arange(len(rows), device=device)
            self.competitors = self.position.expand(len(rows), -1)
            return
        table = [list(row) + [-1] * (width - len(row)) for row in rows.values()]
        self.ragged = any(-1 in row for row in table)
        self.competitors = torch.tensor(table, device=device)
        self.position = torch.tensor([row.index(s) for s, row in rows.items()], device=device)

    def place(self, slots: Tensor) -> Tensor:
        """The positions of slots among their competitors."""
        return self.position[slots] if self.partial else slots

    def select(self, logits: Tensor, slots: Tensor) -> Tensor:
        """The outputs that compete, `[..., C]`.

        They are sliced, not masked, so that no constant stands in for minus infinity.
        """
        if not self.partial:
            return logits
        rivals = self.competitors[slots]
        if not self.ragged:
            return logits.gather(-1, rivals)
        return logits.gather(-1, rivals.clamp(min=0)).masked_fill(rivals < 0, -torch.inf)
