"""Methods as other code had them, where that may have made a published number.

They explain the number and are no methods of the package. `sensitivity.py METHOD … --variant NAME`
trains one instead of the method, with its hyper-parameters and options. For streams whose tasks
have equally many classes, and whose batches are of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from onepass.engine.batch import Batch
from onepass.engine.fleet import LOST, Fleet
from onepass.learners import METHODS, Method
from onepass.learners.agem import AGem
from onepass.learners.icarl import ICarl, Options
from onepass.learners.rehearsal import Reference
from onepass.memory import EpisodicMemory


class UnionAGem(AGem):
    """A-GEM with one softmax over the classes of all past tasks in the reference loss.

    That is the authors' code until 2018-12-09, two days after the published runs on CIFAR. In the
    paper, and since then, an example's own task alone competes.
    """

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Reference,
        memory: EpisodicMemory,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        # Slots of tasks that are not past.
        self.closed = torch.ones(fleet.slots.count, dtype=torch.bool, device=fleet.device)

    def begin_task(self, task: int) -> None:
        super().begin_task(task)
        self.closed[[slot for row in self.fleet.slots.table[:task] for slot in row]] = False

    def reference_gradient(self, reference: Batch) -> tuple[Tensor, Tensor]:
        closed = self.closed.expand(*reference.slots.shape, -1)
        batch = replace(reference, extra={"closed": closed})
        return self.fleet.grad(
            batch, loss=among_open, update_buffers=self.option.reference_moves_buffers, limit=LOST
        )


def among_open(logits: Tensor, slots: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """The cross-entropy over all slots that are not closed."""
    closed = extra["closed"]
    return cross_entropy(logits[..., : closed.shape[-1]].masked_fill(closed, -torch.inf), slots)


class GemICarl(ICarl):
    """iCaRL as GEM's code has it, where the published number seems to come from.

    A batch descends the cross-entropy of its task. Then one random exemplar per class of each past
    task pulls the softmax of that task to what it was at the end of the last one,

        ℓ = H(y, p(x)) + λ Σ_{past tasks} mean over one exemplar per class of H(q, p),

    each in a pass, and by a batch-norm, of its own. `q` is stored from passes in training mode too,
    one over the exemplars of each class alone, which move running statistics. Predictions come from
    the nearest mean of outputs as they are, of all tasks; herding compares those of the task alone.
    Unlike there, exemplar sets are trimmed, and outputs that are herded are those of evaluation.
    """

    def __init__(
        self,
        fleet: Fleet,
        columns: Mapping[str, Tensor],
        options: Options,
        memory: EpisodicMemory | None,
    ) -> None:
        super().__init__(fleet, columns, options, memory)
        self.compared = slice(0, fleet.slots.count)  # outputs
        # The softmax of its task for each exemplar, [R, classes seen, places, C].
        self.taught = torch.zeros(0, device=fleet.device)

    def direction(self, batch: Batch) -> Tensor:
        self._means = None
        g, _ = self.fleet.grad(batch)
        for task in range(self.seen):
            g_past, _ = self.fleet.grad(self.one_a_class(task), loss=self.distillation, limit=LOST)
            g = torch.addcmul(g, self.columns["distillation"], g_past)
        return g

    def one_a_class(self, task: int) -> Batch:
        """A random exemplar of each class of a past task, and the softmax stored for it."""
        rows = torch.arange(self.fleet.runs, device=self.fleet.device)[:, None]
        classes = len(self.fleet.slots.table[task])
        mine = slice(task * classes, (task + 1) * classes)
        numbers = self._random.uniform(self.fleet.step, len(self._slots))
        place = (numbers * self.held).long()[:, mine]
        owner = torch.arange(mine.start, mine.stop, device=place.device).expand_as(place)
        wanted = self.taught[rows, owner, place]
        return Batch(self.x[rows, owner, place], self._slots[owner], extra={"wanted": wanted})

    def distillation(self, logits: Tensor, slots: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(self.fleet.competition.outputs(logits, slots), extra["wanted"])

    def begin_review(self) -> None:
        super().begin_review()
        own = self.fleet.slots.table[self.seen]
        self.compared = slice(min(own), max(own) + 1)

    def end_review(self) -> None:
        super().end_review()
        self.compared = slice(0, self.fleet.slots.count)

    @torch.no_grad()
    def end_task(self) -> None:
        super().end_task()
        architecture = self.fleet.architecture
        slots = self._slots[:, None].expand(-1, self.x.shape[2])
        found = self.fleet.theta.new_zeros(*self.x.shape[:3], len(self.fleet.slots.table[0]))
        architecture.module.train()  # so batch-norm sees a class alone, and its statistics move
        for r, parameters in enumerate(zip(*architecture.views(self.fleet.theta), strict=True)):
            mine = {name: buffer[r] for name, buffer in self.fleet.buffers.items()}
            for c, held in enumerate(self.held[r].tolist()):
                logits, _ = architecture.call(list(parameters), mine, self.x[r, c, :held], None)
                found[r, c, :held] = self.fleet.competition.outputs(logits, slots[c, :held])
        self.taught = found.softmax(-1)

    def _features(self, batch: Batch) -> Tensor:
        return self.fleet.forward(batch).logits[..., self.compared]

    def means(self) -> Tensor:
        places = self.x.flatten(1, 2)
        no_slots = torch.zeros(places.shape[:2], dtype=torch.int64, device=places.device)
        outputs = self._features(Batch(places, no_slots)).view(*self.x.shape[:3], -1)
        filled = torch.arange(self.x.shape[2], device=places.device) < self.held[..., None]
        return (outputs * filled[..., None]).sum(2) / self.held[..., None]


VARIANTS: dict[str, dict[str, Method]] = {
    "a-gem": {"union": replace(METHODS["a-gem"], learner=UnionAGem)},
    "icarl": {"gem": replace(METHODS["icarl"], learner=GemICarl)},
}
