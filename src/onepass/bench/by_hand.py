"""The methods as one would write them by hand: a module, `backward()`, `optimizer.step()`.

`onepass bench` compares with them. Every function is one step on a batch and on what the method
reads of the past: nothing, one reference batch, or the memory of every past task. The tests compare
each with our learner's step on the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import cycle
from random import Random
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn.functional import cross_entropy

from onepass.engine.precision import products
from onepass.feed import Feed
from onepass.learners.base import Learner

KEPT = 1000  # batches of a task that a loop goes round in
RIDGE = 1e-3  # of GEM, as in its code and in the recipe

Examples = tuple[Tensor, Tensor]  # inputs [n, D] as floats, labels [n]


class Alone:
    """The first run of a fleet as a plain module.

    The learner's state is copied, one tensor per parameter.
    """

    def __init__(self, learner: Learner) -> None:
        fleet = learner.fleet
        self.net = deepcopy(fleet.architecture.module).train()
        self.parameters = list(self.net.parameters())
        for mine, theirs in zip(
            self.parameters, fleet.architecture.views(fleet.theta), strict=True
        ):
            mine.data.copy_(theirs[0])
        self.rate = float(fleet.learning_rate[0])
        self.optimizer = torch.optim.SGD(self.parameters, lr=self.rate)
        alike = {
            name: tensor
            for name, tensor in learner.state().items()
            if tensor.shape == fleet.theta.shape
        }
        self.state = {
            name: [part[0].clone() for part in fleet.architecture.views(tensor)]
            for name, tensor in alike.items()
        }
        self.columns = {name: float(column[0]) for name, column in learner.columns.items()}
        self.steps = 0

    def backward(self, examples: Examples) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.net(examples[0]), examples[1])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def flat(self, examples: Examples) -> tuple[Tensor, Tensor]:
        """Gradient `[P]` and loss."""
        loss = self.backward(examples)
        return torch.cat([g.flatten() for g in self.gradients]), loss

    def follow(self, g: Tensor) -> None:
        """A step along a gradient `[P]`."""
        for p, part in zip(
            self.parameters, torch.split(g, [p.numel() for p in self.parameters]), strict=True
        ):
            p.grad = part.view_as(p)
        self.optimizer.step()


def van(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    run.backward(batch)
    run.optimizer.step()


def er(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    (reference,) = past
    run.backward((torch.cat([batch[0], reference[0]]), torch.cat([batch[1], reference[1]])))
    run.optimizer.step()


@torch.no_grad()
def _pull(run: Alone) -> None:
    """`+ 2 λ Ω (θ − θ*)`."""
    for p, g, pull, anchor in zip(
        run.parameters, run.gradients, run.state["pull"], run.state["anchor"], strict=True
    ):
        g.addcmul_(pull, p - anchor)


def mas(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    run.backward(batch)
    _pull(run)
    run.optimizer.step()


def ewc(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    """With the Fisher information as a moving average, every 10 steps."""
    run.backward(batch)
    run.steps += 1
    for g, squares, fisher in zip(
        run.gradients, run.state["squares"], run.state["fisher"], strict=True
    ):
        squares.addcmul_(g, g)
        if run.steps % 10 == 0:
            fisher.mul_(0.1).add_(squares, alpha=0.9 / 10)
            squares.zero_()
    _pull(run)
    run.optimizer.step()


def _walk(run: Alone, batch: Examples) -> list[Tensor]:
    """Take a step with the pull, and add what was really done to the path integral.

    Returns the gradients without the pull.
    """
    run.backward(batch)
    gradients, before = (
        [g.clone() for g in run.gradients],
        [p.detach().clone() for p in run.parameters],
    )
    _pull(run)
    run.optimizer.step()
    for path, g, p, old in zip(run.state["path"], gradients, run.parameters, before, strict=True):
        path.addcmul_(g, old - p.detach())
    return gradients


def pi(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    _walk(run, batch)


@torch.no_grad()
def rwalk(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    """The A-GEM authors' form: no ½ in the distance, and squares are not emptied within a task."""
    with torch.enable_grad():
        gradients = _walk(run, batch)
    run.steps += 1
    names = ("squares", "fisher", "path", "start", "fresh")
    for p, g, squares, fisher, path, start, fresh in zip(
        run.parameters, gradients, *(run.state[name] for name in names), strict=True
    ):
        squares.addcmul_(g, g)
        if run.steps % 10 == 0:
            fresh.add_((path / (fisher * (p - start).square() + 1e-3)).relu())
            path.zero_()
            start.copy_(p)
            fisher.mul_(0.1).add_(squares, alpha=0.9 / 10)


def agem(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    """S-GEM, too: there the reference batch is the memory of one task."""
    g_ref, _ = run.flat(past[0])
    g, _ = run.flat(batch)
    along = g @ g_ref
    if along < 0:
        g -= along / (g_ref @ g_ref) * g_ref
    run.follow(g)


def gem(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    """The dual, as non-negative least squares with a root of `K`.

    `min ½ vᵀ K v + cᵀ v`, `v ≥ margin`, `K = G Gᵀ + ridge I`, `c = G g`.
    """
    vectors = torch.stack([*(run.flat(memory)[0] for memory in past), run.flat(batch)[0]])
    with products(vectors.device, tf32=False):
        gram = (vectors @ vectors.T).double().cpu().numpy()
    K, c, margin, g = (
        gram[:-1, :-1] + RIDGE * np.eye(len(past)),
        gram[:-1, -1],
        run.columns["margin"],
        vectors[-1],
    )
    if (c < 0).any():
        root = np.linalg.cholesky(K)
        v = nnls(root.T, -np.linalg.solve(root, c + K.sum(1) * margin))[0] + margin
        g = g + torch.as_tensor(v, dtype=g.dtype, device=g.device) @ vectors[:-1]
    run.follow(g)


def mega1(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    g_ref, loss_ref = run.flat(past[0])
    g, loss = run.flat(batch)
    run.follow(g + loss_ref / loss * g_ref if loss > run.columns["sensitivity"] else g_ref)


def mega2(run: Alone, batch: Examples, past: Sequence[Examples]) -> None:
    g_ref, loss_ref = run.flat(past[0])
    g, loss = run.flat(batch)
    gg, gr, rr, new, old = torch.stack([g @ g, g @ g_ref, g_ref @ g_ref, loss, loss_ref]).tolist()
    cosine = gr / math.sqrt(gg * rr)
    sine = math.sqrt(1 - min(1.0, cosine**2))
    turn = min(max(math.atan2(old * sine, new + old * cosine), 0.0), math.pi / 2)
    if sine > 1e-5:
        g = (math.cos(turn) - math.sin(turn) * cosine / sine) * g + math.sqrt(gg / rr) * math.sin(
            turn
        ) / sine * g_ref
    run.follow(g)


class Plain(NamedTuple):
    """A step, and what it reads of the past.

    That is nothing, a random batch, the memory of one task, or of every task.
    """

    step: Callable[[Alone, Examples, Sequence[Examples]], None]
    reads: Literal["nothing", "a batch", "a task", "every task"] = "nothing"


PLAIN = {
    "van": Plain(van),
    "multi-task": Plain(van),
    "ewc": Plain(ewc),
    "pi": Plain(pi),
    "mas": Plain(mas),
    "rwalk": Plain(rwalk),
    "gem": Plain(gem, "every task"),
    "s-gem": Plain(agem, "a task"),
    "a-gem": Plain(agem, "a batch"),
    "er": Plain(er, "a batch"),
    "mega-1": Plain(mega1, "a batch"),
    "mega-2": Plain(mega2, "a batch"),
}


def loop(name: str, feed: Feed, learner: Learner, phase: int) -> Callable[[int], int]:
    """Return a function that takes steps by hand, in the first task that `learner` has not seen.

    What can be done before the first step is done before: examples are shuffled, permuted and made
    floats, so that a batch is a slice. Nothing is put into the memory: that is for a task's end.
    """
    plain, run, device = PLAIN[name], Alone(learner), learner.fleet.device
    prepare, memory = learner.fleet.architecture.prepare, learner.memory
    some, steps = next(feed.stretches(phase, 0, lambda _, left: min(left, KEPT)))
    x, y = prepare(some.x[0]), some.slots[0]
    batches = cycle(zip(x.chunk(steps), y.chunk(steps), strict=True))
    kept = [] if memory is None else [memory.of([task]) for task in range(phase)]
    tasks = [(prepare(one.x[0]), one.slots[0].clone()) for one in kept]
    generator = Random(0)

    def remembered() -> Iterator[list[Examples]]:
        if plain.reads == "a batch":
            x_kept, y_kept = (torch.cat(parts) for parts in zip(*tasks, strict=True))
            count = getattr(learner.option, "reference_batch", None)
        while True:
            if plain.reads == "a batch":
                chosen = torch.randperm(len(x_kept), device=device)[:count]
                yield [(x_kept[chosen], y_kept[chosen])]
            elif plain.reads == "a task":
                yield [generator.choice(tasks)]
            else:
                yield tasks if plain.reads == "every task" else []

    past = remembered()

    def take(count: int) -> int:
        for _ in range(count):
            plain.step(run, next(batches), next(past))
        return count

    return take
