"""iCaRL: incremental classifier and representation learning (Rebuffi, Kolesnikov, Sperl, Lampert, CVPR 2017)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from onepass.engine.batch import Batch, joined
from onepass.engine.fleet import LOST, Fleet
from onepass.errors import InputError
from onepass.learners.base import Example, Learner
from onepass.memory import EpisodicMemory
from onepass.random_numbers import Purpose, RandomNumbers


def herd(features: Tensor, members: Tensor, count: int) -> Tensor:
    """Exemplars in order of their worth, `[R, count]`: each brings the mean of those chosen so far closest to the mean of all members.

    `p_k = argmin_x ‖μ − (φ(x) + Σ_{j<k} φ(p_j)) / k‖` over the members not chosen yet; `features [R, N, D]`, `members [R, N]`. A row with
    fewer members than `count` repeats some at its end.

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
    """`exemplars` in all, shared evenly by the classes seen so far; `reference_batch` of them join each batch. `all_classes` lets the classes
    of all tasks seen so far compete for an answer, not only those of the given task."""

    exemplars: int = 1300
    reference_batch: int = 10
    all_classes: bool = False


class ICarl(Learner):
    """Nearest mean of exemplars on features that are learnt with distillation.

    With `σ_y` the sigmoid of output `y`, `q` the outputs of the network at the end of the last task, and `λ` the strength of `distillation`,
    a batch joined with random exemplars descends the mean over its examples of
    `Σ_{y new} H(1[y = y_i], σ_y(x_i)) + λ Σ_{y old} H(q_y(x_i), σ_y(x_i))`, `H` the binary cross-entropy (`λ = 1` in the paper). At the end of a task
    each of its classes keeps `exemplars / classes seen` by herding on normalised features, and older classes keep their first ones.
    An answer is the class whose exemplars' mean is nearest, so there is none while a class is being learnt: no learning curve.
    """

    hyperparameters = {"distillation": (0.3, 1, 3)}
    options = Options
    keeps = ("x", "held", "teacher", "seen")
    needs_own_classes = True
    one_input = True
    has_curve = False
    reads_task = False

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        slots = [slot for row in fleet.slots.table for slot in row]
        if len(set(slots)) < len(slots):
            raise InputError(
                "icarl keeps exemplars a class, so it needs a stream whose tasks have classes of their own, such as split-digits"
            )
        if options.exemplars < len(slots):
            raise InputError(
                f"icarl needs at least one exemplar a class of the stream: with {len(slots)} classes, exemplars={options.exemplars} is not enough"
            )
        self.budget, self.reference_batch, self.all_classes = (
            options.exemplars,
            options.reference_batch,
            options.all_classes,
        )
        self.x = torch.zeros(
            fleet.runs, 0, 0, device=fleet.device
        )  # exemplars, [R, classes seen, places, …]
        self.held = torch.zeros(
            fleet.runs, 0, dtype=torch.int64, device=fleet.device
        )  # how many of its places a class has filled
        self.teacher = fleet.theta.clone()
        self.seen = 0  # tasks
        self._teacher_buffers = {name: buffer.clone() for name, buffer in fleet.buffers.items()}
        self._random = RandomNumbers(fleet.seeds, Purpose.REFERENCE)
        self._strength = columns["distillation"][..., None]
        self._means: Tensor | None = None  # of the exemplars' features, until the next step
        self._divide()

    @classmethod
    def looks_again(cls, options: object) -> bool:
        return True

    @classmethod
    def examples_a_step(cls, options: object, tasks: int, memory_per_task: int) -> int:
        assert isinstance(options, Options)
        return 2 * options.reference_batch  # the teacher looks at them too

    def largest_batch(self, batch_size: int) -> int:
        return max(batch_size + self.reference_batch, self.budget)

    def examples_held(self) -> int:
        return self.budget

    def kept(self) -> tuple[dict[int, int], int]:
        ends = [0]
        for row in self.fleet.slots.table[: self.seen]:
            ends.append(ends[-1] + len(row))
        held: list[int] = self.held[0].tolist()
        return {
            task: sum(held[first:last]) for task, (first, last) in enumerate(pairwise(ends))
        }, self.x.nbytes + self.held.nbytes

    def _divide(self) -> None:
        """Which slots are old, in the order of `x`, and which are new in the task that is learnt now."""
        table, device = self.fleet.slots.table, self.fleet.device
        self._slots = torch.tensor(
            [slot for row in table[: self.seen] for slot in row], dtype=torch.int64, device=device
        )
        self._old, self._new = torch.zeros(2, self.fleet.slots.count, device=device)
        self._old[self._slots] = 1
        self._new[list(table[self.seen]) if self.seen < len(table) else []] = 1

    # ---- learning

    def direction(self, batch: Batch) -> Tensor:
        self._means = None
        both = joined(batch, self.exemplars()) if self.seen else batch
        g, _ = self.fleet.grad(
            replace(both, extra=both.extra | self.targets(both)), loss=distillation, limit=LOST
        )
        return g

    def exemplars(self) -> Batch:
        """A random batch of exemplars, drawn independently: not more than there are places for."""
        count = min(self.reference_batch, self.x.shape[1] * self.x.shape[2])
        place = (
            self._random.uniform(self.fleet.step, count) * self.held.sum(1, keepdim=True)
        ).long()
        ends = self.held.cumsum(1)
        owner = torch.searchsorted(ends, place, right=True)
        within = place - (ends - self.held).gather(1, owner)
        rows = torch.arange(self.fleet.runs, device=self.fleet.device)[:, None]
        return Batch(self.x[rows, owner, within], self._slots[owner])

    def targets(self, batch: Batch) -> dict[str, Tensor]:
        """For every example what each output should be, and how much that matters: `[R, B, S]` each."""
        wanted = (
            batch.slots[..., None] == torch.arange(self.fleet.slots.count, device=self.fleet.device)
        ).to(self.fleet.theta.dtype)
        if self.seen:
            taught = (
                self.fleet.forward(batch, theta=self.teacher, buffers=self._teacher_buffers)
                .logits[..., : wanted.shape[-1]]
                .sigmoid()
            )
            wanted = torch.where(self._old > 0, taught, wanted)
        return {
            "wanted": wanted,
            "weight": (self._new + self._strength * self._old).expand_as(wanted),
        }

    # ---- exemplars

    def review(self, batches: Iterable[Batch]) -> None:
        pieces = list(batches)
        x, slots = torch.cat([b.x for b in pieces], 1), torch.cat([b.slots for b in pieces], 1)
        real = torch.cat(
            [torch.arange(b.x.shape[1]) < torch.tensor(b.lengths())[:, None] for b in pieces], 1
        ).to(x.device)
        features = torch.cat([self._features(b) for b in pieces], 1)
        classes = self.fleet.slots.table[self.seen]
        room = self.budget // (len(self._slots) + len(classes))
        places = min(room, max(self.x.shape[2], x.shape[1]))  # not more than there can be examples
        kept, held = x.new_zeros(len(x), len(self._slots) + len(classes), places, *x.shape[2:]), []
        if self.seen:
            kept[:, : len(self._slots), : self.x.shape[2]] = self.x[:, :, :places]
        rows = torch.arange(len(x), device=x.device)[:, None]
        for c, slot in enumerate(classes, start=len(self._slots)):
            members = (slots == slot) & real
            held.append(members.sum(1, keepdim=True).clamp(max=room))
            order = herd(features, members, int(held[-1].max()))
            kept[:, c, : order.shape[1]] = x[rows, order]
        self.x = kept
        self.held = torch.cat([self.held.clamp(max=room), *held], 1)

    def end_task(self) -> None:
        self.teacher = self.fleet.theta.clone()
        self._teacher_buffers = {
            name: buffer.clone() for name, buffer in self.fleet.buffers.items()
        }
        self.seen += 1
        self._means = None
        self._divide()

    # ---- answers

    def _features(self, batch: Batch) -> Tensor:
        """In 32 bits at least: distances in half precision are not to be had everywhere."""
        features = self.fleet.forward(batch).features
        return normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)

    def means(self) -> Tensor:
        """The mean of each class's exemplars on normalised features, normalised, `[R, classes seen, D]`."""
        places = self.x.flatten(1, 2)
        features = self._features(
            Batch(places, torch.zeros(places.shape[:2], dtype=torch.int64, device=places.device))
        )
        filled = torch.arange(self.x.shape[2], device=places.device) < self.held[..., None]
        return normalize((features.view(*self.x.shape[:3], -1) * filled[..., None]).sum(2), dim=-1)

    def scores(self, batch: Batch) -> Tensor:
        shape = (*batch.slots.shape, self.fleet.slots.count)
        if not self.seen:
            return torch.full(
                shape, torch.nan, device=self.fleet.device
            )  # no answer is no right answer
        self._means = self.means() if self._means is None else self._means
        distance = torch.cdist(self._features(batch), self._means)
        scores = torch.full(shape, -torch.inf, dtype=distance.dtype, device=self.fleet.device)
        scores[..., self._slots] = -distance.masked_fill(self.held[:, None] == 0, torch.inf)
        if self.all_classes:  # whoever is beaten by a class of another task is wrong
            own = self.fleet.competition.evaluated.select(scores, batch.slots).amax(
                -1, keepdim=True
            )
            scores = torch.where(own < scores.amax(-1, keepdim=True), torch.nan, scores)
        return scores.masked_fill(self._old == 0, torch.nan)

    # ---- saving

    def state(self) -> dict[str, Tensor]:
        return super().state() | {
            f"teacher.{name}": buffer for name, buffer in self._teacher_buffers.items()
        }

    def accepts(
        self, state: Mapping[str, Tensor], counters: Mapping[str, int], example: Example | None
    ) -> bool:
        table, seen = self.fleet.slots.table, counters.get("seen", -1)
        if not {"x", "held"} <= state.keys() or not 0 <= seen <= len(table):
            return False
        x, held, classes = state["x"], state["held"], sum(map(len, table[:seen]))
        if classes:
            kind, shape = example or (None, ())
            places = x.shape[2] if x.dim() > 2 else 0
            sound = (
                x.dtype == kind
                and x.shape == (self.fleet.runs, classes, places, *shape)
                and places <= self.budget // classes
            )
            sound = (
                sound
                and bool(x.isfinite().all())
                and held.dtype == self.held.dtype
                and held.shape == (self.fleet.runs, classes)
            )
            if not sound or not bool(
                (held >= 0).all() and (held <= places).all() and (held.sum(1) > 0).all()
            ):
                return False
        # What a class has is as large as the classes that were seen; all else is as in a learner that has seen none.
        return super().accepts(
            {**state, **({"x": self.x, "held": self.held} if classes else {})}, counters, example
        )

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        super().restore(state, counters)
        self._teacher_buffers = {
            name: state[f"teacher.{name}"].to(self.fleet.device) for name in self._teacher_buffers
        }
        self._means = None
        self._divide()


def distillation(logits: Tensor, _: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """The mean over examples of the weighted binary cross-entropies of their outputs."""
    logits = logits[
        ..., : extra["wanted"].shape[-1]
    ]  # a network may have more outputs than there are classes
    return binary_cross_entropy_with_logits(
        logits, extra["wanted"], extra["weight"], reduction="sum"
    ) / len(logits)
