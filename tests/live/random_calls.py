"""Learners for random calls, and all that must be true of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onepass import Memory, OnePass
from onepass.live.memory import StreamMemory
from onepass.live.rows import SHIFT
from tests.toys import FEATURES

OUTPUTS = 4
HEADS = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


class Net(nn.Module):
    """Buffers, randomness, something frozen, a head that may grow, and trouble on demand."""

    def __init__(self, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.still = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.body, self.norm, self.drop = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.head = nn.Linear(5, outputs)
        self.trouble, self.left = "", 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.norm(self.body(self.still(x))))))
        self.left -= self.training
        if self.left != 0 or not self.training:
            return out
        match self.trouble:
            case "nan":
                return out * torch.nan
            case "gradient":
                return out + (out - out.detach()).sum().abs().sqrt()
            case "raises":
                raise RuntimeError("no\nreally not")
            case "shape":
                return out[:, :1, None]
        return out


@dataclass(frozen=True)
class Kind:
    """How a learner is made."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    own_loss: bool = False
    outputs: int = OUTPUTS

    def again(self, module: nn.Module) -> dict[str, Any]:
        """What a saved file cannot hold."""
        given: dict[str, Any] = {"loss": nn.functional.mse_loss} if self.own_loss else {}
        if self.optimizer is not None:
            trained = [p for p in module.parameters() if p.requires_grad]
            given["optimizer"] = self.optimizer(trained, lr=0.01)
        return given

    def learner(self) -> OnePass:
        module = Net(self.outputs)
        rate = {} if self.optimizer is not None else {"learning_rate": 0.1}
        return OnePass(module, self.method, **rate, **self.settings, **self.again(module))


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


GROW, FREE, OF_TASKS = {"grow": True}, {"task_free": True}, {"tasks": HEADS}
adam = torch.optim.Adam


def kept(**plan: Any) -> dict[str, Any]:
    return {"memory": Memory(**plan)}


KINDS = {
    "a-gem": Kind("a-gem", kept(per_task=7) | {"reference_batch": 5}),
    "a-gem, heads": Kind("a-gem", OF_TASKS | kept(per_task=6, policy="ring"), adam, outputs=6),
    "a-gem, heads that grow": Kind(
        "a-gem", OF_TASKS | GROW | kept(per_task=5, examples=11), adam, outputs=3
    ),
    "a-gem, task-free": Kind("a-gem", FREE | GROW | kept(bytes=6000, recent=2), adam),
    "er, task-free regression": Kind("er", FREE | kept(examples=9, recent=0), own_loss=True),
    "er, held out": Kind("er", kept(per_task=6, examples=20, held_out=3)),
    "er, task-free, held out": Kind("er", FREE | GROW | kept(examples=20, recent=2, held_out=3)),
    "gem": Kind("gem", GROW | kept(per_task=5)),
    "s-gem": Kind("s-gem", kept(per_task=6, examples=13, where="cpu"), momentum),
    "mega-1, regression": Kind("mega-1", kept(per_task=8), own_loss=True),
    "mega-2": Kind("mega-2", GROW | kept(per_task=6, policy="class-reservoir", examples=20)),
    "ewc": Kind("ewc", {"fisher": "moving-average", "fisher_every": 3, "grow": True}, momentum),
    "mas": Kind("mas", {"tasks": HEADS}, outputs=6),
    "rwalk": Kind("rwalk", {"fisher_every": 3, "grow": True}),
    "pi, regression": Kind("pi", {}, momentum, own_loss=True),
    "icarl": Kind("icarl", {"tasks": HEADS, "exemplars": 18}, outputs=6),
    "van, task-free": Kind("van", {"task_free": True, "grow": True}, torch.optim.Adam),
}


def snapshot(learner: OnePass) -> dict[str, Any]:
    """All that decides how learning goes on."""
    module, memory, optimizer = learner.module, learner.memory, learner.fleet.optimizer

    def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in tensors}

    found = {
        "module": copied([*module.named_parameters(), *module.named_buffers()]),
        "modes": [part.training for part in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
        "optimizer": optimizer and copy.deepcopy(optimizer.state_dict()),
        "learner": (copied(learner.learner.state().items()), learner.learner.counters()),
        "memory": None,
        "steps": (learner.steps, learner.violations),
        "place": (learner.segment, learner.batches, learner.task),
        "kind": (learner.outputs, learner.examples),
        "rng_state": torch.get_rng_state(),
    }
    if memory is not None:
        sharing = memory._selection.sharing
        found["memory"] = copied(memory.state().items()), memory.counters(), sharing
    return found


def check_memory(memory: StreamMemory, steps: int) -> None:
    """The lists of a memory fit together."""
    plan, rows = memory.plan, range(memory.size)
    assert len(memory.rows.group) == len(memory.rows.arrived) == memory.size
    assert memory.storage is None or memory.size <= memory.storage.rows
    assert sorted(row for members in memory.rows.members.values() for row in members) == list(rows)
    for group, members in memory.rows.members.items():
        assert all(memory.rows.group[row] == group for row in members)
        assert memory.rows.seen[group] >= len(members)
    visible = set(memory.rows.visible)
    apart = {row for row in rows if memory.rows.group[row][1] < 0}
    assert not visible & apart
    held_out = Counter(memory.rows.group[row] for row in apart)
    assert max(held_out.values(), default=0) <= plan.held_out
    assert len(visible) == len(memory.rows.visible) == memory.visible
    position = {row: place for row, place in enumerate(memory.rows.position) if place >= 0}
    assert position == {row: place for place, row in enumerate(memory.rows.visible)}
    assert memory.rows.places is None or memory.rows.places.tolist() == memory.rows.visible
    assert memory._pending is None
    fresh = set(memory.rows.fresh)
    if memory.task_free:
        assert not fresh
        coming = {divmod(one, 2**SHIFT) for one in memory.rows.coming}
        for row in rows:
            if row in apart:
                continue
            if row in visible:
                assert memory.rows.arrived[row] <= steps - plan.recent
            else:
                assert (memory.rows.arrived[row], row) in coming
    else:
        assert not memory.rows.coming
        assert not fresh & visible
        assert fresh | visible | apart == set(rows)
        assert all(memory.rows.group[row][0] == memory.task for row in fresh)
        assert max(memory.counts().values(), default=0) <= plan.per_task + plan.held_out
    assert sum(memory.counts().values()) == memory.size
    measured = {row for found in memory.groups().values() for row in found}
    assert measured <= apart if plan.held_out else measured == visible
    assert plan.examples is None or memory.size <= plan.examples
    assert plan.bytes is None or memory.nbytes <= plan.bytes
