"""Watching a learner: a small dictionary after every few batches, for each `watch` function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.engine.batch import Batch
from onepass.errors import InputError
from onepass.interrupts import Opened
from onepass.live.settings import read_path, refusing

if TYPE_CHECKING:
    from onepass.live.wrapper import OnePass

Report = dict[str, Any]
Callback = Callable[[Report], None]
AT_ONCE = 500  # examples of the memory in one forward pass


class Watch:
    """What happens between two reports, and what the memory says of the past.

    A report has: `step`; `task`, how many have ended; `loss` and `accuracy` before learning, means
    over the batches since the last report (the accuracy by a forward pass in evaluation, which is
    what watching costs); `forgetting` and `forgetting_by_task`, see below; `violations` so far;
    `cosine` between the gradient and the reference gradient (the smallest, if there are several) of
    the last step; `memory`, examples by task or class; `memory_bytes`; `milliseconds` per step.

    `forgetting_by_task` says of each past task (of each class, without tasks) how much the accuracy
    has fallen from its best, or for a loss of one's own how much the loss has risen from its
    lowest; `forgetting` is the mean of what is known. It counts from the end of the task, and is
    None of a task that was not measured then: the end is measured if there is a `watch` or
    `Memory(held_out=N)`, or if a report is wanted before the next batch. Without tasks it counts
    from the first report that had the class, and is None in that one. It is measured on the
    examples held out, which were learnt once, as all others. Without `held_out` it is measured on
    the examples in the memory: those are rehearsed, so the number is too optimistic for er and the
    other methods that learn from them.
    """

    def __init__(self, owner: OnePass, watch: Callback | Sequence[Callback], every: int) -> None:
        several = isinstance(watch, Sequence) and not isinstance(watch, (str, bytes))
        self._callbacks: list[Any] = list(watch) if several and not callable(watch) else [watch]
        for callback in self._callbacks:
            if not callable(callback):
                what = "watch must be a function of a dictionary, or several"
                raise InputError(f"{what}, got {type(callback).__name__}")
        self._owner, self._every = owner, every
        self.best: dict[int, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._batches = self._examples = 0
        self._loss = self._seconds = 0.0
        self._right: Tensor | int = 0
        self._hits: Tensor | int = 0  # of the batch that is being learnt

    def before(self, batch: Batch) -> None:
        """A batch is about to be learnt: measure how much of it is predicted right."""
        owner = self._owner
        self._hits = 0
        owner.fleet.measures = bool(self._callbacks) and (owner.steps + 1) % self._every == 0
        if self._callbacks and owner.classifies:
            self._hits = self._correct(batch)

    def _correct(self, batch: Batch) -> Tensor:
        """How many examples are predicted right."""
        owner = self._owner
        return owner.fleet.competition.correct(owner.learner.scores(batch), batch.slots).sum()

    def discard(self) -> None:
        """It was refused."""
        self._hits = 0

    def after(self, examples: int, loss: float, seconds: float) -> None:
        """It was learnt."""
        if not self._callbacks:
            return
        self._batches += 1
        self._examples += examples
        self._right = self._right + self._hits
        self._loss += loss
        self._seconds += seconds
        if self._owner.steps % self._every == 0:
            report = self.report()
            self._clear()
            with Opened():
                for callback in self._callbacks:
                    callback(report)

    def ended(self) -> None:
        """A task has ended: from now on it can be forgotten."""
        if self._callbacks or self._owner.plan.held_out:
            self.forgetting(since_now=True)

    def report(self) -> Report:
        owner, memory, batches = self._owner, self._owner.memory, self._batches
        kept, size = owner.learner.kept()
        if memory is not None:
            kept, size = memory.counts(), memory.nbytes
        forgotten = self.forgetting(since_now=owner.batches == 0)
        known = [value for value in forgotten.values() if value is not None]
        measured = self._examples and owner.classifies
        return {
            "step": owner.steps,
            "task": owner.segment,
            "loss": self._loss / batches if batches else None,
            "accuracy": int(self._right) / self._examples if measured else None,
            "forgetting": sum(known) / len(known) if known else None,
            "forgetting_by_task": forgotten,
            "violations": owner.violations,
            "cosine": None if math.isnan(owner.fleet.cosine) else owner.fleet.cosine,
            "memory": kept,
            "memory_bytes": size,
            "milliseconds": 1000 * self._seconds / batches if batches else None,
        }

    def forgetting(self, since_now: bool) -> dict[int, float | None]:
        """How much of each past task or class was lost since its best; None where not known.

        `since_now`: nothing was learnt since the last task ended, so from now on it can be
        forgotten.
        """
        owner, found = self._owner, dict[int, float | None]()
        last = owner.memory.task if owner.memory is not None else -1
        for group, score in self._scores().items():
            known = group in self.best or (since_now and not owner.task_free and group == last)
            if known or owner.task_free:
                self.best[group] = max(score, self.best.get(group, score))
            found[group] = self.best[group] - score if known else None
        return found

    def _scores(self) -> dict[int, float]:
        """The accuracy (or the negative loss) on what the memory has of each past task or class."""
        owner, memory, found = self._owner, self._owner.memory, dict[int, float]()
        refused = "the module or the loss refused examples of the memory"
        if memory is None:
            return found
        for group, rows in memory.groups().items():
            total = 0.0
            for start in range(0, len(rows), AT_ONCE):
                batch = memory.take(torch.tensor(rows[start : start + AT_ONCE]))
                with refusing(refused, "forgetting cannot be measured"):
                    if owner.classifies:
                        total += float(self._correct(batch))
                    else:
                        total -= owner.fleet.loss_on(batch) * batch.slots.shape[1]
            found[group] = total / len(rows)
        return found


class TensorBoard:
    """A `watch` that writes every number of a report to a folder of event files."""

    def __init__(self, folder: str | Path) -> None:
        path = read_path(folder, "the folder of events", "folder")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            what = "TensorBoard needs the package tensorboard"
            raise InputError(f"{what}: install onepass[track]") from None
        writer: Any = SummaryWriter
        self._writer = writer(str(path))

    def __call__(self, report: Report) -> None:
        for name, value in report.items():
            parts = {name: value}
            if isinstance(value, dict):
                parts = {f"{name}/{group}": one for group, one in value.items()}
            for tag, one in parts.items():
                if tag != "step" and isinstance(one, (int, float)):
                    self._writer.add_scalar(tag, one, report["step"])
        self._writer.flush()


class LiveView:
    """A `watch` that shows the last reports as a table on the terminal.

    A context manager, which restores the screen.

    >>> from rich.console import Console
    >>> with LiveView(Console(quiet=True)) as view:
    ...     view({"step": 1, "loss": 0.5})
    """

    def __init__(self, console: Any = None, rows: int = 20) -> None:
        from rich.live import Live

        self._live = Live(console=console, refresh_per_second=4)
        self._rows = rows
        self._reports: list[Report] = []

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, report: Report) -> None:
        from rich.table import Table

        self._reports = [*self._reports, report][-self._rows :]
        table = Table()
        names = [name for name, value in report.items() if not isinstance(value, dict)]
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for row in self._reports:
            table.add_row(*(_short(row.get(name)) for name in names))
        self._live.update(table)


def _short(value: object) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
