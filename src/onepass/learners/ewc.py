"""EWC: elastic weight consolidation.

Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, PNAS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.learners.anchored import examples, scaled, singly
from onepass.learners.declarations import Capture, Needs
from onepass.learners.fisher import MovingFisher
from onepass.learners.state import over_theta, workspace
from onepass.random_numbers import Purpose, RandomNumbers, uniform_at


@dataclass(frozen=True)
class Options:
    """How the Fisher information is estimated.

    `fisher = "per-task"` is the original: that of each task at its end, from a second pass over its
    data, with one anchor per task. `"moving-average"` is the online form that the A-GEM authors
    compare with: see `MovingFisher` for `fisher_every` and `flush`. `normalise` scales importances
    to [0, 1], as their code does. `labels` for the per-task information are drawn from the model's
    own prediction, which is the definition, or taken from the data (the empirical information).
    """

    fisher: Literal["per-task", "moving-average"] = "per-task"
    normalise: bool = False
    labels: Literal["model", "data"] = "model"
    fisher_every: int = 10
    flush: bool = True


def _is_moving(options: Options) -> bool:
    return options.fisher == "moving-average"


class Ewc(MovingFisher):
    """Gradient of `ℓ(θ) + λ Σ_k Σ_i F_{k,i} (θ_i − θ*_{k,i})²`, over past tasks `k`.

    `θ*_k` are the parameters at the end of task `k`, where
    `F_k = E_x E_{y ~ p_θ(·|x)} (∂ log p_θ(y|x) / ∂θ)²`. A sum of such pulls is one pull with
    `F = Σ_k F_k` towards `θ* = Σ_k F_k θ*_k / F`, so the state does not grow. Our `λ` is half of
    Kirkpatrick's. With a moving average, `F` is that of `MovingFisher`, `θ*` the last task's end.
    """

    hyperparameters = {"strength": (1, 10, 100, 1000, 10000)}
    options = Options
    total: Tensor = over_theta(needed=lambda options: not _is_moving(options))  # Σ_k F_k
    _number: Tensor = workspace(lambda learner: torch.zeros_like(learner.count))  # see `relabelled`

    @classmethod
    def needs_with(cls, options: Options) -> Needs:
        if _is_moving(options):
            return Needs()
        instead = "fisher='moving-average'"
        labels = f"labels='data' or {instead}" if options.labels == "model" else ""
        return Needs(second_pass=True, single_pass_by=instead, classes_unless=labels)

    def capture(self) -> Capture | None:
        return super().capture() if _is_moving(self.option) else Capture(reads_task=False)

    def accept(self) -> None:
        if _is_moving(self.option):
            self.watch(self._g)
            self.average_if_due()

    def begin_review(self) -> None:
        self.squares.zero_()
        self.count.zero_()
        self._number.zero_()

    def review_batch(self, batch: Batch) -> None:
        for one in singly(batch):
            with self.fleet.workspace():
                g, _ = self.fleet.grad(self.relabelled(one, self._number), training=False)
                self.squares.addcmul_(g, g)
            self.count += examples(one, self.count)
            self._number += 1

    def end_review(self) -> None:
        torch.div(self.squares, self.count.clamp(min=1), out=self.fisher)

    @cached_property
    def _labels(self) -> RandomNumbers:
        return RandomNumbers(self.fleet.seeds, Purpose.LABELS)

    def relabelled(self, batch: Batch, number: Tensor) -> Batch:
        """One example per run, number `[R, 1]` of the pass, with a label from the prediction."""
        if self.option.labels == "data":
            return batch
        uniform = uniform_at(self._labels.key(self.fleet.step), number)
        logits = self.fleet.forward(batch).logits
        return replace(batch, slots=self.fleet.competition.sample(logits, batch.slots, uniform))

    def end_task(self) -> None:
        if _is_moving(self.option):
            self.average_rest()
        fisher = scaled(self.fisher, self.fleet.gaps) if self.option.normalise else self.fisher
        if _is_moving(self.option):
            self.protect(fisher)
            return
        before, towards = self.total, self.anchor.clone()
        self.total = before + fisher
        self.protect(self.total)
        mean = torch.lerp(self.anchor, towards, before / self.total)
        self.anchor = torch.where(self.total > 0, mean, self.anchor)
