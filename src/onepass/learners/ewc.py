"""EWC: elastic weight consolidation (Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, PNAS 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.engine.fleet import Fleet
from onepass.learners.anchored import examples, scaled, singly
from onepass.learners.fisher import MovingFisher
from onepass.memory import EpisodicMemory
from onepass.random_numbers import Purpose, RandomNumbers, uniform_at


@dataclass(frozen=True)
class Options:
    """`fisher = "per-task"` is the original: the Fisher information of each task at its end, from a second look at its data, with an anchor a
    task. `"moving-average"` is the online form that the A-GEM authors compare with: see `MovingFisher` for `fisher_every` and `flush`.
    `normalise` scales importances to [0, 1], as their code does. `labels` of the Fisher information a task are drawn from the model's own
    prediction, which is its definition, or taken from the data (the empirical Fisher information).
    """

    fisher: Literal["per-task", "moving-average"] = "per-task"
    normalise: bool = False
    labels: Literal["model", "data"] = "model"
    fisher_every: int = 10
    flush: bool = True


class Ewc(MovingFisher):
    """Gradient of `ℓ(θ) + λ Σ_k Σ_i F_{k,i} (θ_i − θ*_{k,i})²`, over past tasks `k` with `θ*_k` the parameters at the end of task `k`.

    `F_k = E_x E_{y ~ p_θ(·|x)} (∂ log p_θ(y|x) / ∂θ)²` at `θ*_k`. A sum of such pulls is one pull with `F = Σ_k F_k` towards
    `θ* = Σ_k F_k θ*_k / F`, so the state does not grow. Our `λ` is half of Kirkpatrick's. As a moving average, `F` is that of `MovingFisher` and
    `θ*` the end of the last task.
    """

    hyperparameters = {"strength": (1, 10, 100, 1000, 10000)}
    options = Options
    keeps = (*MovingFisher.keeps, "total")

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.moving, self.normalise = options.fisher == "moving-average", options.normalise
        self.from_model = options.labels == "model"
        if not self.moving:
            self.counts, self.period = (), 1
        self.total = torch.zeros_like(fleet.theta[:, : 0 if self.moving else None])  # Σ_k F_k
        self._random = RandomNumbers(fleet.seeds, Purpose.LABELS)
        self._number = torch.zeros_like(self.count)  # of an example in the second look

    @classmethod
    def looks_again(cls, options: object) -> bool:
        assert isinstance(options, Options)
        return options.fisher == "per-task"

    def direction(self, batch: Batch) -> Tensor:
        self._g, _ = self.fleet.grad(batch)
        return self.pulled(self._g)

    def accept(self) -> None:
        if self.moving:
            self.watch(self._g)
            self.count_step()

    def begin_review(self) -> None:
        self.squares.zero_()
        self.count.zero_()
        self._number.zero_()

    def look_again(self, batch: Batch) -> None:
        for one in singly(batch):
            with self.fleet.workspace():
                g, _ = self.fleet.grad(self.relabelled(one, self._number), training=False)
                self.squares.addcmul_(g, g)
            self.count += examples(one, self.count)
            self._number += 1

    def end_review(self) -> None:
        torch.div(self.squares, self.count.clamp(min=1), out=self.fisher)

    def relabelled(self, batch: Batch, number: Tensor) -> Batch:
        """One example a run, number `[R, 1]` of the second look, with a label drawn from the model's own prediction."""
        if not self.from_model:
            return batch
        uniform = uniform_at(self._random.key(self.fleet.step), number)
        return replace(
            batch,
            slots=self.fleet.competition.sample(
                self.fleet.forward(batch).logits, batch.slots, uniform
            ),
        )

    def end_task(self) -> None:
        if self.moving:
            self.rest()
        fisher = scaled(self.fisher, self.fleet.gaps) if self.normalise else self.fisher
        if self.moving:
            self.protect(fisher)
            return
        before, towards = self.total, self.anchor.clone()
        self.total = before + fisher
        self.protect(self.total)
        self.anchor = torch.where(
            self.total > 0, torch.lerp(self.anchor, towards, before / self.total), self.anchor
        )
