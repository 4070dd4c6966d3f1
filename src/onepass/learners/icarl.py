"""iCaRL: incremental classifier and representation learning.

Rebuffi, Kolesnikov, Sperl, Lampert: iCaRL, CVPR 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from onepass.engine.batch import Batch, joined
from onepass.engine.fleet import LOST, Fleet
from onepass.errors import InputError
from onepass.learners.base import Example, Learner
from onepass.learners.declarations import Capture, Cost, Needs, Workload
from onepass.learners.state import counter, point, tensor
from onepass.memory import EpisodicMemory
from onepass.random_numbers import Purpose, RandomNumbers


def herd(features: Tensor, members: Tensor, count: int) -> Tensor:
    """Exemplars in order of their worth, `[R, count]`.

    Each brings the mean of those chosen so far closest to the mean of all members:
    `p_k = argmin_x ‖μ − (φ(x) + Σ_{j<k} φ(p_j)) / k‖` over the members not chosen yet, with
    `features [R, N, D]` and `members [R, N]`. A row with fewer members than `count` repeats some.

    >>> features = torch.tensor([[[0.0], [1.0], [4.0], [9.0]]])
    >>> herd(features, torch.tensor([[True, True, True, False]]), 3).tolist()
    [[1, 2, 0]]
    """
    mean = (features * members[..., None]).sum(1) / members.sum(1, keepdim=True).clamp(min=1)
    total, left, order = torch.zeros_like(mean), members.clone(), []
    for k in range(1, count + 1):
        distance = (mean[:, None] - (features + total[:, None]) / k).square().sum(-1)
        best = distance.masked_fill(~left, torch.inf).argmin(1, keepdim=True)
        total += features.gather(1, best[..., None].expand(-1, -1, features.shape[-1]))[:, 0]
        left.scatter_(1, best, False)
        order.append(best)
    return torch.cat(order, 1) if order else members.new_zeros(len(members), 0, dtype=torch.int64)


@dataclass(frozen=True)
class Options:
    """`exemplars` in all, shared evenly by the classes seen so far.

    `reference_batch` of them join each batch. `all_classes` lets the classes of all tasks seen so
    far compete for a prediction, not only those of the given task.
    """

    exemplars: int = 1300
    reference_batch: int = 10
    all_classes: bool = False


class ICarl(Learner):
    """Nearest mean of exemplars on features that are learnt with distillation.

    With `σ_y` the sigmoid of output `y`, `q` the outputs of the network at the end of the last
    task, and `λ` the strength of `distillation` (1 in the paper), a batch joined with random
    exemplars descends the mean over its examples of
    `Σ_{y new} H(1[y = y_i], σ_y(x_i)) + λ Σ_{y old} H(q_y(x_i), σ_y(x_i))`, `H` the binary
    cross-entropy. At the end of a task each of its classes keeps `exemplars / classes seen` by
    herding on normalised features, and older classes keep their first ones. The class whose
    exemplars' mean is nearest is predicted, so none is while it is learnt: no learning curve.
    """

    hyperparameters = {"distillation": (0.3, 1, 3)}
    options = Options
    needs = Needs(second_pass=True, own_classes=True, ended_task=True, own_examples=True)
    # Exemplars [R, classes seen, places, …], and how many of its places a class has filled.
    x: Tensor = tensor(
        lambda learner: torch.zeros(learner.fleet.runs, 0, 0, device=learner.fleet.device)
    )
    held: Tensor = tensor(lambda learner: learner.fleet.seeds.new_zeros(learner.fleet.runs, 0))
    teacher: Tensor = point()
    seen: int = counter()  # tasks

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None = None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        slots = [slot for row in fleet.slots.table for slot in row]
        if len(set(slots)) < len(slots):
            raise InputError(
                "icarl keeps exemplars a class, so it needs a stream whose tasks have classes of"
                " their own, such as split-digits"
            )
        if options.exemplars < len(slots):
            raise InputError(
                "icarl needs at least one exemplar a class of the stream: with"
                f" {len(slots)} classes, exemplars={options.exemplars} is not enough"
            )
        self._teacher_buffers = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
        self._means: Tensor | None = None  # cached means of the exemplars' features
        self._again: list[tuple[Batch, Tensor]] = []  # second pass: batches, and their features
        self._divide()

    @classmethod
    def cost(cls, options: Any, work: Workload) -> Cost:
        return Cost(
            examples=2 * options.reference_batch,  # the teacher sees them too
            largest_batch=max(work.batch_size + options.reference_batch, options.exemplars),
            held=options.exemplars,
        )

    def capture(self) -> Capture | None:
        return Capture(reads_task=False, second_pass=False)

    def kept(self) -> tuple[dict[int, int], int]:
        ends = [0]
        for row in self.fleet.slots.table[: self.seen]:
            ends.append(ends[-1] + len(row))
        held: list[int] = self.held[0].tolist()
        by_task = {task: sum(held[a:b]) for task, (a, b) in enumerate(pairwise(ends))}
        return by_task, self.x.nbytes + self.held.nbytes

    def _divide(self) -> None:
        """Note which slots are old, in the order of `x`, and which the current task has."""
        table, device = self.fleet.slots.table, self.fleet.device
        old = [slot for row in table[: self.seen] for slot in row]
        self._slots = torch.tensor(old, dtype=torch.int64, device=device)
        self._old, self._new = torch.zeros(2, self.fleet.slots.count, device=device)
        self._old[self._slots] = 1
        self._new[list(table[self.seen]) if self.seen < len(table) else []] = 1

    # ---- learning

    def direction(self, batch: Batch) -> Tensor:
        self._means = None
        both = joined(batch, self.exemplars()) if self.seen else batch
        wanted = replace(both, extra=both.extra | self.targets(both))
        g, _ = self.fleet.grad(wanted, loss=distillation, limit=LOST)
        return g

    @cached_property
    def _random(self) -> RandomNumbers:
        return RandomNumbers(self.fleet.seeds, Purpose.REFERENCE)

    def exemplars(self) -> Batch:
        """A random batch of exemplars, drawn independently: not more than there are places for."""
        count = min(self.option.reference_batch, self.x.shape[1] * self.x.shape[2])
        uniform = self._random.uniform(self.fleet.step, count)
        place = (uniform * self.held.sum(1, keepdim=True)).long()
        ends = self.held.cumsum(1)
        owner = torch.searchsorted(ends, place, right=True)
        within = place - (ends - self.held).gather(1, owner)
        rows = torch.arange(self.fleet.runs, device=self.fleet.device)[:, None]
        return Batch(self.x[rows, owner, within], self._slots[owner])

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        """What each output should be for each example, and its weight: `[R, B, S]` each."""
        slots = torch.arange(self.fleet.slots.count, device=self.fleet.device)
        wanted = (batch.slots[..., None] == slots).to(self.fleet.theta.dtype)
        if self.seen:
            there = {"theta": self.teacher, "buffers": self._teacher_buffers}
            logits = self.fleet.forward(batch, **there).logits  # type: ignore[arg-type]
            wanted = torch.where(self._old > 0, logits[..., : wanted.shape[-1]].sigmoid(), wanted)
        weight = self._new + self.columns["distillation"][..., None] * self._old
        return {"wanted": wanted, "weight": weight.expand_as(wanted)}

    # ---- exemplars

    def begin_review(self) -> None:
        self._again = []

    def review_batch(self, batch: Batch) -> None:
        self._again.append((batch, self._features(batch)))

    def end_review(self) -> None:
        batches, features = zip(*self._again, strict=True)
        self._again = []
        self._keep(
            torch.cat([b.x for b in batches], 1),
            torch.cat([b.slots for b in batches], 1),
            torch.cat([_is_real(b) for b in batches], 1),
            torch.cat(features, 1),
        )

    def _keep(self, x: Tensor, slots: Tensor, real: Tensor, features: Tensor) -> None:
        """Herd exemplars of the task's classes, and shrink the sets of older ones."""
        classes, old = self.fleet.slots.table[self.seen], len(self._slots)
        room = self.option.exemplars // (old + len(classes))
        places = min(room, max(self.x.shape[2], x.shape[1]))  # not more than there are examples
        kept, held = x.new_zeros(len(x), old + len(classes), places, *x.shape[2:]), []
        if self.seen:
            kept[:, :old, : self.x.shape[2]] = self.x[:, :, :places]
        rows = torch.arange(len(x), device=x.device)[:, None]
        for c, slot in enumerate(classes, start=old):
            members = (slots == slot) & real
            held.append(members.sum(1, keepdim=True).clamp(max=room))
            order = herd(features, members, int(held[-1].max()))
            kept[:, c, : order.shape[1]] = x[rows, order]
        self.x = kept
        self.held = torch.cat([self.held.clamp(max=room), *held], 1)

    def end_task(self) -> None:
        self.teacher = self.fleet.theta.clone()
        self._teacher_buffers = {n: buffer.clone() for n, buffer in self.fleet.buffers.items()}
        self.seen += 1
        self._means = None
        self._divide()

    # ---- predictions

    def _features(self, batch: Batch) -> Tensor:
        """Normalised features, in 32 bits at least: not all devices have distances in half."""
        features = self.fleet.forward(batch).features
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)

    def means(self) -> Tensor:
        """The normalised mean of each class's exemplars, `[R, classes seen, D]`."""
        places = self.x.flatten(1, 2)
        unknown = torch.zeros(places.shape[:2], dtype=torch.int64, device=places.device)
        features = self._features(Batch(places, unknown)).view(*self.x.shape[:3], -1)
        filled = torch.arange(self.x.shape[2], device=places.device) < self.held[..., None]
        return normalize((features * filled[..., None]).sum(2), dim=-1)

    def scores(self, batch: Batch) -> Tensor:
        shape = (*batch.slots.shape, self.fleet.slots.count)
        if not self.seen:
            return torch.full(shape, torch.nan, device=self.fleet.device)  # NaN is never right
        self._means = self.means() if self._means is None else self._means
        distance = torch.cdist(self._features(batch), self._means)
        scores = torch.full(shape, -torch.inf, dtype=distance.dtype, device=self.fleet.device)
        scores[..., self._slots] = -distance.masked_fill(self.held[:, None] == 0, torch.inf)
        if self.option.all_classes:  # wrong where a class of another task is nearer
            own = self.fleet.competition.evaluated.select(scores, batch.slots)
            beaten = own.amax(-1, keepdim=True) < scores.amax(-1, keepdim=True)
            scores = torch.where(beaten, torch.nan, scores)
        return scores.masked_fill(self._old == 0, torch.nan)

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        buffers = {f"teacher.{name}": buffer for name, buffer in self._teacher_buffers.items()}
        return super().state() | buffers

    def accepts(
        self, state: Mapping[str, Tensor], counters: Mapping[str, int], example: Example | None
    ) -> bool:
        table, seen = self.fleet.slots.table, counters.get("seen", -1)
        if not {"x", "held"} <= state.keys() or not 0 <= seen <= len(table):
            return False
        x, held, classes = state["x"], state["held"], sum(map(len, table[:seen]))
        if not classes:
            return super().accepts(state, counters, example)
        kind, shape = example or (None, ())
        places = x.shape[2] if x.dim() > 2 else 0
        sound = (
            x.dtype == kind
            and x.shape == (self.fleet.runs, classes, places, *shape)
            and places <= self.option.exemplars // classes
            and bool(x.isfinite().all())
            and held.dtype == self.held.dtype
            and held.shape == (self.fleet.runs, classes)
            and bool((held >= 0).all() and (held <= places).all() and (held.sum(1) > 0).all())
        )
        # All but the exemplars is as in a learner that has seen no class.
        rest = {**state, "x": self.x, "held": self.held}
        return sound and super().accepts(rest, counters, example)

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        super().restore(state, counters)
        device = self.fleet.device
        names = self._teacher_buffers
        self._teacher_buffers = {name: state[f"teacher.{name}"].to(device) for name in names}
        self._means = None
        self._divide()


def _is_real(batch: Batch) -> Tensor:
    """Which places of a batch hold an example, `[R, B]`."""
    lengths = torch.tensor(batch.lengths())[:, None]
    return (torch.arange(batch.x.shape[1]) < lengths).to(batch.x.device)


def distillation(logits: Tensor, _: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """The mean over examples of the weighted binary cross-entropies of their outputs."""
    wanted = extra["wanted"]
    logits = logits[..., : wanted.shape[-1]]  # a network may have more outputs than classes
    total = binary_cross_entropy_with_logits(logits, wanted, extra["weight"], reduction="sum")
    return total / len(logits)
