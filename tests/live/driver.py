"""Calls a learner and checks all that must be true of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, OnePass
from onepass.live.memory import StreamMemory
from tests.live.comparing import same
from tests.live.random_calls import HEADS, OUTPUTS, Kind, Net, check_memory, snapshot
from tests.toys import FEATURES

SPOILT: list[Callable[[Tensor, Tensor], tuple[Any, Any]]] = [
    lambda x, y: (x * torch.nan, y),
    lambda x, y: (x.numpy() * np.float32("inf"), y),
    lambda x, y: (x.double(), y),
    lambda x, y: (x[:, :-1], y),
    lambda x, y: (x[:, None], y),
    lambda x, y: (x[:0], y[:0]),
    lambda x, y: (x, y[:-1]),
    lambda x, y: (x, y - 100.5),
    lambda x, y: (x, y.bool()),
    lambda x, y: (x, None),
    lambda x, y: ((x, x), y),
    lambda x, y: ({"x": x, "z": x}, y),
    lambda x, y: (x.to_sparse(), y),
    lambda x, y: (x, (y * 0 - 1).long()),
    lambda x, y: (x, (y * 0 + 1_000_000).long()),
]


class Driver:
    """Calls a learner and keeps its own account of what must be true of it."""

    def __init__(self, kind: Kind, folder: Path, tally: Counter[str]) -> None:
        self.kind, self.file, self.tally = kind, folder / "saved", tally
        self.learner = kind.learner()
        self.steps = self.ended = 0
        # The batches of the task that is being learnt.
        self.current = list[tuple[Tensor, Tensor]]()
        # Task and label of every example that was learnt, and how many they were.
        self.seen = dict[bytes, tuple[int, int]]()
        self.rows = 0
        self.before: dict[str, Any] = {}  # the learner before the call
        self.must_do = False  # a call that there is no reason to refuse

    # ---- calls

    def do(self, operation: tuple[Any, ...]) -> None:
        name, *rest = operation
        self.tally[name] += 1
        self.before, self.must_do = snapshot(self.learner), False
        refusal = ""
        try:
            getattr(self, "do_" + name.replace(" ", "_"))(*rest)
        except InputError as error:
            refusal = str(error)
        if refusal:
            self.tally["refused"] += 1
            assert len(refusal.splitlines()) == 1
            assert not self.changed(), refusal
            # Batch-norm needs two examples, and a small memory cannot have one of every task.
            expected = "batch-norm needs two" in refusal or "no room" in refusal
            assert expected or not self.must_do, refusal
        self.check()

    def changed(self) -> list[str]:
        after = snapshot(self.learner)
        return [key for key in after if not same(self.before[key], after[key])]

    def batch(self, size: int, seed: int, task: Any) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, FEATURES, generator=generator)
        if self.kind.own_loss:
            return x, torch.randn(size, OUTPUTS, generator=generator)
        learner = self.learner
        tasks = learner._tasks
        if not tasks:
            return x, torch.randint(0, OUTPUTS, (size,), generator=generator)
        now = learner.task if learner.batches else list(tasks)[min(learner.segment, len(tasks) - 1)]
        low = tasks[task if task in tasks else now][0]  # type: ignore[index]
        return x, torch.randint(low, low + 2, (size,), generator=generator)

    def do_observe(self, given: tuple[int, int, Any]) -> None:
        size, _, task = given
        in_a_task = self.learner.batches > 0 or self.learner.segment < len(HEADS)
        self.must_do = size > 1 and task is None and in_a_task
        self.observe(*self.batch(*given), given[2])

    def do_new_class(self, given: tuple[int, int, Any]) -> None:
        x, y = self.batch(*given)
        if not self.kind.own_loss:
            # It grows by one class at a time, so that there are not hundreds in the end.
            y = torch.full_like(y, min(self.learner.outputs or OUTPUTS, 9))
        self.observe(x, y, given[2])

    def do_spoilt(self, given: tuple[int, int, Any], which: int) -> None:
        self.observe(*SPOILT[which](*self.batch(*given)), given[2])

    def do_trouble(self, given: tuple[int, int, Any], trouble: str, at: int) -> None:
        module = self.learner.module
        assert isinstance(module, Net)
        module.trouble, module.left = trouble, at
        try:
            self.observe(*self.batch(*given), given[2])
        finally:
            module.trouble = ""

    def do_tamper(self, given: tuple[int, int, Any], how: str) -> None:
        module = self.learner.module
        assert isinstance(module, Net)
        weight, state = module.body.weight, torch.get_rng_state()
        x, y = self.batch(*given)
        match how:
            case "freeze":
                weight.requires_grad_(False)
            case "replace":
                module.body.weight = nn.Parameter(weight.detach().clone())
            case "add":
                module.more = nn.Parameter(torch.ones(1))
            case "double":
                view = weight.data
                weight.data = weight.data.double()
        with pytest.raises(InputError):
            self.learner.observe(x, y)
        with pytest.raises(InputError):
            self.learner.predict(x)
        match how:
            case "freeze":
                weight.requires_grad_(True)
            case "replace":
                module.body.weight = weight
            case "add":
                del module.more
            case "double":
                weight.data = view
        torch.set_rng_state(state)
        assert not self.changed()

    def observe(self, x: Any, y: Any, task: Any) -> None:
        loss = self.learner.observe(x, y, task)
        # What was spoilt may be good for a stream of another kind, such as numbers as targets.
        assert np.isfinite(loss)
        self.tally["accepted"] += 1
        self.steps += 1
        if self.learner.segment > self.ended:
            self.ended, self.current = self.ended + 1, []
        x = torch.as_tensor(x)
        self.current.append((x, y))
        self.rows += len(x)
        for row, label in zip(x, [0] * len(x) if self.kind.own_loss else y.tolist(), strict=True):
            self.seen[row.numpy().tobytes()] = (self.learner.segment, label)

    def do_end(self, how: str) -> None:
        again: Any = None
        if self.learner.learner.needs.second_pass and how != "none":
            again = list(self.current)
            if how == "bad":
                not_numbers = torch.full((2, FEATURES), torch.nan)
                again.append((not_numbers, torch.zeros(2, dtype=torch.int64)))
            if how == "other labels":
                again.append((torch.ones(2, FEATURES), torch.full((2,), 77)))
        self.learner.end_task(again)
        self.tally["ended"] += 1
        self.ended, self.current = self.ended + 1, []

    def do_predict(self, given: tuple[int, int, Any], spoilt: bool) -> None:
        x, _ = self.batch(*given)
        task = given[2] if self.learner._tasks else None
        try:
            answers = self.learner.predict(SPOILT[given[1] % 6](x, x)[0] if spoilt else x, task)
            assert len(answers) == len(x)
            if task is not None:
                assert set(answers.tolist()) <= set(HEADS[task])
        finally:
            assert not self.changed()

    def do_report(self) -> None:
        report = self.learner.report()
        assert report["step"] == self.steps
        kept = sum(self.learner.learner.kept()[0].values())  # if the method keeps examples itself
        memory = self.learner.memory
        assert sum(report["memory"].values()) == (memory.size if memory else kept)
        assert not self.changed()

    def do_reload(self) -> None:
        self.learner.save(self.file)
        fresh = Net(self.kind.outputs)
        modes = [part.training for part in self.learner.module.modules()]
        torch.set_rng_state(self.before["rng_state"])
        after = OnePass.load(self.file, fresh, **self.kind.again(fresh))
        for part, mode in zip(fresh.modules(), modes, strict=True):
            part.training = mode  # a file holds values, not modes
        assert not self.changed()
        self.learner = after
        assert not self.changed()

    # ---- what is always true

    def check(self) -> None:
        learner = self.learner
        fleet, module = learner.fleet, learner.module
        assert learner.steps == int(fleet.step) == self.steps
        assert learner.segment == self.ended
        assert learner.batches == len(self.current)
        assert 0 <= (learner.violations or 0) <= self.steps
        assert bool(fleet.theta.isfinite().all())
        assert all(bool(b.isfinite().all()) for b in module.buffers())
        fleet.intact()
        places = [view.data_ptr() for view in fleet.architecture.views(fleet.theta[0])]
        assert sorted(p.data_ptr() for p in module.parameters()) == sorted(places)
        assert sum(p.numel() for p in module.parameters()) == fleet.theta.numel()
        for name, p in module.named_parameters():
            assert p.requires_grad == (not name.startswith("still"))
        assert isinstance(module, Net)
        assert learner.outputs in (None, module.head.out_features)
        for value in learner.learner.state().values():
            assert bool(value.isfinite().all())
        if fleet.optimizer is not None:
            mine = {id(p) for p in module.parameters()}
            for group in fleet.optimizer.param_groups:
                assert mine >= {id(p) for p in group["params"]}
            for parameter, state in fleet.optimizer.state.items():
                shapes = {v.shape for v in state.values() if isinstance(v, Tensor)}
                assert shapes <= {parameter.shape, torch.Size()}
        if learner.memory is not None:
            check_memory(learner.memory, self.steps)
            self.check_contents(learner.memory)

    def check_contents(self, memory: StreamMemory) -> None:
        """Only examples that were learnt are remembered, with their own labels and tasks."""
        assert memory.size <= sum(memory.rows.seen.values()) <= self.rows
        if memory.storage is None:
            assert self.rows == 0
            return
        kept = [row.numpy().tobytes() for row in memory.storage.columns["x"][: memory.size]]
        # A batch that was shown twice may be kept twice.
        shown_twice = len(self.seen) < self.rows
        assert shown_twice or len(set(kept)) == len(kept)
        for row, key in enumerate(kept):
            task, label = self.seen[key]
            slot = int(memory.storage.columns["slots"][row])
            if not shown_twice:
                assert memory.rows.group[row][0] == (0 if memory.task_free else task)
                assert slot == label
            own = 0 if memory.policy == "reservoir" else slot
            assert memory.rows.group[row][1] in (own, -1, ~slot)
