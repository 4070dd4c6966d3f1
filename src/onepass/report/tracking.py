"""A study in TensorBoard."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from onepass.errors import InputError
from onepass.files import TEMPORARY
from onepass.metrics import Record, average_accuracy, forgetting
from onepass.studies.folder import check_target
from onepass.studies.store import Store, Unit

log = logging.getLogger(__name__)


def check_folder(folder: Path, study: Path | None = None) -> None:
    """Raise, before any work is done, if events cannot be written to `folder`."""
    try:
        str(folder).encode()
    except UnicodeError:  # TensorBoard's own restriction
        raise InputError(
            f"cannot write {folder} for TensorBoard (its name is not UTF-8): choose another folder"
        ) from None
    check_target(folder / "events", study)


class Tracking:
    """A folder of event files, one subfolder per unit; a unit that has one is not written again."""

    def __init__(self, folder: Path, store: Store) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "--tensorboard needs the package tensorboard: install onepass[track]"
            ) from None
        self._writer: Any = SummaryWriter
        check_folder(folder)
        self._folder, self._broken = folder, False
        for name in store.contents.records:
            self.write(store.contents.entries[name].unit, store.record(name))

    def write(self, unit: Unit, record: Record) -> None:
        """Write average accuracy, forgetting, violations, and the accuracy of each task.

        All of them are shown over the tasks learnt.
        """
        chosen = ",".join(f"{name}={value:g}" for name, value in unit.hyperparameters.items())
        folder = self._folder / unit.method / unit.part / f"{chosen},seed={unit.seed}-{unit.id}"
        if folder.exists() or self._broken:
            return
        try:
            self._write(folder, record)
        except OSError as reason:  # a view must not end a study
            self._broken = True
            log.warning(
                "nothing more is written to %s (%s)", self._folder, reason.strerror or reason
            )

    def _write(self, folder: Path, record: Record) -> None:
        partial = folder.with_name(TEMPORARY + folder.name)
        shutil.rmtree(partial, ignore_errors=True)
        with self._writer(str(partial)) as writer:
            a = record.accuracy
            sequential = len(a) == a.shape[1]
            for k in range(len(a)):
                if np.isnan(a[k]).any():  # not reached: every run of the fleet had diverged
                    break
                average = average_accuracy(a, k + 1) if sequential else average_accuracy(a)
                writer.add_scalar("average accuracy", average, k + 1)
                if sequential and k:
                    writer.add_scalar("forgetting", forgetting(a, k + 1), k + 1)
                if record.violations is not None:
                    writer.add_scalar("violations", record.violations[k], k + 1)
                for j in range(k + 1 if sequential else a.shape[1]):
                    writer.add_scalar(f"accuracy of a task/{j + 1}", a[k, j], k + 1)
        partial.rename(folder)
