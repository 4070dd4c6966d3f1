"""The fleet: R runs of one architecture trained side by side.

`theta [R, P]` holds all parameters of all runs, one row per run. A learner is vector algebra on
`[R, P]`; learning rates and strengths are columns `[R, 1]`, so seeds and hyper-parameters are just
rows. The fleet knows parameters, gradients and devices, and nothing of any method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from onepass.engine.architecture import Architecture, Prepare, aligned, fill
from onepass.engine.batch import Batch
from onepass.engine.cuda_streams import lane
from onepass.engine.forward import ForwardGraphs, TracedForward
from onepass.engine.gradients import Gradients, Loss, Mode, Point
from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.random_numbers import Purpose, RandomNumbers, torch_seeded

Build = Callable[[], nn.Module]
# In numbers. From such addresses matrix products on a GPU take half the time, and batch-norm fails
# from some others.
ALIGN = 32
LOST = 1e4  # a uniform guess among a million classes has a cross-entropy of 14


class Carry(Protocol):
    """Moves a `[R, P]` tensor of an old parameter layout into the new one."""

    def __call__(self, old: Tensor, into: Tensor | None = None) -> Tensor: ...


class Output(NamedTuple):
    """What a forward pass gives: logits `[R, B, S]` and features `[R, B, D]`.

    Features enter the last linear layer.
    """

    logits: Tensor
    features: Tensor


class WithDelta(Protocol):
    """Whether a learner needs the step that was really taken."""

    @property
    def delta(self) -> bool: ...


class Steps(Protocol):
    """What the fleet needs of a learner."""

    @property
    def needs(self) -> WithDelta: ...
    def direction(self, batch: Batch) -> Tensor: ...
    def accept(self) -> None: ...
    def after_step(self, delta: Tensor) -> None: ...


def identity(x: Tensor) -> Tensor:
    return x


class Fleet:
    """R runs side by side: `theta [R, P]`, buffers `[R, …]` and learning rates `[R, 1]`.

    `build` makes the module. It is called once per run under that run's own random seed, so
    initial parameters depend on the seed alone. `active [R, 1]` says which runs take part in the
    current step; it gates every write. A run has diverged when its loss is not finite or its
    cross-entropy is beyond `LOST`: it is never active again, and other runs are not affected.

    Steps are counted here alone: `step [R]` on the device, the active steps of each run; on the
    host `steps`, all steps so far, and `steps_in_task`, those since `Learner.begin_task`. The last
    two grow when a step ends; `in_step` says that one is being taken.
    """

    def __init__(
        self,
        build: Build,
        seeds: Sequence[int],
        slots: Slots,
        learning_rate: Sequence[float],
        *,
        device: torch.device | str = "cpu",
        prepare: Prepare = identity,
        descriptors: Tensor | None = None,
        gradients: Mode = "auto",
        head: str | None = None,
    ) -> None:
        if not seeds or len(learning_rate) != len(seeds):
            given = f"{len(seeds)} and {len(learning_rate)}"
            raise InputError(f"a fleet needs a seed and a learning rate for each run, got {given}")
        self.device = torch.device(device)
        self.seeds = torch.tensor(list(seeds), device=self.device)
        self.slots = slots
        self.competition = slots.on(self.device)
        self.learning_rate = torch.tensor(list(learning_rate), device=self.device)[:, None]
        self.step = torch.zeros(self.runs, dtype=torch.int64, device=self.device)
        self.steps = self.steps_in_task = 0
        self.in_step = False
        self._partial = False  # some runs sat the last step out
        self._alive = torch.ones(self.runs, dtype=torch.bool, device=self.device)  # not diverged
        self._active = torch.ones(self.runs, dtype=torch.bool, device=self.device)
        self.active = self._active[:, None]
        self.descriptors = None if descriptors is None else descriptors.to(self.device)
        self._prepare, self._mode, self._head = prepare, gradients, head
        self.build, self._generation = build, 0
        self._assemble([self._build(build, seed) for seed in seeds])

    # ---- parameters

    @property
    def runs(self) -> int:
        return len(self.seeds)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Batch-norm statistics and the like, `[R, …]` each."""
        return self._buffers

    @property
    def trainable(self) -> slice:
        """The columns of theta that learn; for the frozen others no gradient is computed."""
        return self.architecture.trainable

    def rebuild(self, build: Build) -> Carry:
        """Change the architecture between tasks (a new column, a larger head, something frozen).

        A parameter or buffer that keeps its name keeps its values. Where its shape grew, the old
        values fill the leading corner and the rest is initialised by the new module. Returns a
        function that carries `[R, P]` tensors from the old layout to the new, zero for what is new.
        """
        before, theta, buffers = self.architecture, self.theta, self.buffers
        self._generation += 1
        self._assemble([self._build(build, int(seed)) for seed in self.seeds])
        after = self.architecture

        def carry(old: Tensor, into: Tensor | None = None) -> Tensor:
            new = old.new_zeros(len(old), after.width) if into is None else into
            fill(before.named_views(old), after.named_views(new))
            return new

        carry(theta, self.theta)
        fill(buffers, self.buffers)
        return carry

    def _build(self, build: Build, seed: int) -> nn.Module:
        bits = RandomNumbers([seed], Purpose.INITIAL).bits(self._generation, 1)
        with torch_seeded(int(bits), torch.device("cpu")):
            return build()

    def _assemble(self, modules: list[nn.Module]) -> None:
        align = ALIGN if self.device.type == "cuda" else 1
        layout = Architecture(modules[0], self._prepare, self._head, align, channels_last=True)
        self.architecture = layout
        self.theta = torch.stack([layout.flatten(m) for m in modules]).to(self.device)
        gaps = layout.gaps()
        self.gaps = None if gaps is None else gaps.to(self.device)
        buffers = [dict(m.named_buffers()) for m in modules]
        stacks = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}
        self._buffers = {n: aligned(stack.to(self.device), align) for n, stack in stacks.items()}
        self._learning = self.theta[:, self.architecture.trainable]
        modules[0].to(self.device)
        self.gradients = Gradients(self.architecture, self._mode, self.runs)
        self._traced = TracedForward(self.architecture, traces=self.device.type == "cuda")
        self._forward_graphs = ForwardGraphs()

    # ---- what learners call

    def grad(
        self,
        batch: Batch,
        *,
        loss: Loss | None = None,
        theta: Tensor | None = None,
        update_buffers: bool = True,
        training: bool = True,
        limit: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients `[R, P]` and losses `[R]` of every run on its own batch.

        By default of the cross-entropy over the competing slots. Another `loss(logits, slots,
        extra)` must be the same function in every step and depend on its arguments alone, since it
        is traced once; what changes from step to step goes into the batch's `extra`.

        Inside a step the gradient is a workspace that the next step writes over: a learner that
        keeps one keeps a copy. Columns of frozen parameters are zero, and so are rows whose batch
        is empty. `update_buffers` says whether this pass moves batch-norm statistics. With
        `training=False` the network is as in evaluation (running statistics, no dropout), and moves
        nothing. A run whose loss is beyond `limit` has diverged: `LOST` for the cross-entropy,
        infinity for other losses.
        """
        if self.architecture.module.training != training:
            self.architecture.module.train(training)
        where = self.theta if theta is None else theta
        at = Point(where, self.buffers, self.descriptors, self.seeds, self.step)
        moves = update_buffers and training
        g, losses = self.gradients(at, batch, loss or self.cross_entropy, moves)
        if theta is None and training:
            self._alive.logical_and_(losses < (limit or (LOST if loss is None else math.inf)))
            # A run that diverges in a step does not take it, and counts nothing in it.
            self._active.logical_and_(self._alive)
        return g, losses

    def workspace(self) -> AbstractContextManager[None]:
        """Outside a step, let gradients be written where the last ones were, which is faster."""
        return self.gradients.step()

    def cross_entropy(self, logits: Tensor, slots: Tensor, _: object = None) -> Tensor:
        return self.competition.cross_entropy(logits, slots)

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        *,
        theta: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        variant: Hashable = None,
    ) -> Output:
        """Logits and features in evaluation mode; changes nothing.

        A network that computes in several ways, by a setting of the module, names the one that is
        set now as `variant` (progressive networks: the column that predicts).
        """
        self.architecture.module.eval()
        mine = theta is None and buffers is None
        theta = self.theta if theta is None else theta
        statistics = dict(self.buffers if buffers is None else buffers)
        parameters = self.architecture.views(theta)
        if self.gradients.stacked and self.device.type == "cuda":
            described = None if self.descriptors is None else 0
            call = vmap(self.architecture.call, in_dims=(0, 0, 0, described))
            return Output(*call(parameters, statistics, batch.x, self.descriptors))
        places = [t.data_ptr() for t in (theta, *statistics.values())]
        precision = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
        return Output(
            *self._forward_graphs(
                lambda x: self._run_by_run(parameters, statistics, x, variant),
                batch.x,
                depends=(*places, variant, *precision),
                settled=mine and self._traced.is_settled(batch.x[0], variant),
            )
        )

    def _run_by_run(
        self,
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        variant: Hashable,
    ) -> tuple[Tensor, Tensor]:
        results = []
        for r in range(self.runs):
            mine = {name: b[r] for name, b in buffers.items()}
            described = None if self.descriptors is None else self.descriptors[r]
            with lane(r):
                own = [p[r] for p in parameters]
                results.append(self._traced(own, mine, x[r], described, variant))
        logits, features = zip(*results, strict=True)
        return torch.stack(logits), torch.stack(features)

    # ---- what the training loop calls

    def learn(self, learner: Steps, batch: Batch) -> None:
        """Take one step: apply the learner's direction, and tell it what was really done."""
        present = None
        if batch.sizes is not None:
            present = torch.tensor([n > 0 for n in batch.sizes], device=self.device)
        if present is not None or self._partial:
            self._gate(present)
        self._partial = present is not None
        self.in_step = True
        with self.gradients.step():
            direction = learner.direction(batch)
            before = self.theta.clone() if learner.needs.delta else None
            self._apply(direction)
            learner.accept()
            if before is not None:
                learner.after_step(self.theta - before)
        self.step += self._active
        self.count(1)
        self.in_step = False

    @property
    def steady(self) -> bool:
        """Whether the next step is like any other; after one that some runs sat out it is not."""
        return not self._partial

    def places(self) -> list[Tensor]:
        """The tensors that a step reads and writes, where they lie now."""
        return [self.theta, self.step, self.learning_rate, *self.buffers.values()]

    def count(self, steps: int) -> None:
        """Count steps on the host: one that ended, or those of a CUDA graph."""
        self.steps += steps
        self.steps_in_task += steps

    def _gate(self, present: Tensor | None) -> None:
        self._active.copy_(self._alive)
        if present is not None:
            self._active.logical_and_(present)

    def _apply(self, direction: Tensor) -> None:
        rate = torch.where(self.active, self.learning_rate, 0.0)
        if self.architecture.frozen:
            direction = direction[:, self.trainable]
        self._learning.addcmul_(rate, direction, value=-1)

    def diverged(self) -> list[bool]:
        """Which runs have diverged, parameters that are not finite included.

        This reads from the device, so it is for the end of a task.
        """
        self._alive.logical_and_(self.theta.isfinite().all(-1))
        return [not alive for alive in self._alive.tolist()]

    def state(self) -> dict[str, Tensor]:
        """What steps change."""
        buffers = {f"buffers.{name}": b for name, b in self.buffers.items()}
        return {"theta": self.theta, "step": self.step, "alive": self._alive, **buffers}

    def counters(self) -> dict[str, int]:
        """What the host counts with."""
        return {"partial": int(self._partial), "generation": self._generation}

    def restore(self, state: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a saved `state()` of the same runs and architecture."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self._partial, self._generation = bool(counters["partial"]), counters["generation"]
        self._gate(None)

    def state_bytes(self) -> int:
        """Bytes of parameters and buffers per run."""
        tensors = [self.theta, *self.buffers.values()]
        return sum(t.nbytes for t in tensors) // self.runs
