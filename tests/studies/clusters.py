"""A study for a Dask cluster, and workers that are not restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onepass.metrics import Record
from onepass.studies import study
from onepass.studies.executors import executor
from onepass.studies.recipe import load
from tests.studies.small_study import Silent
from tests.studies.stored import records_in

CHANGES = [
    *("train_examples=400", "test_examples=20", "options.a-gem.reference_batch=100"),
    *("grids.van.learning_rate=0.1", "grids.a-gem.learning_rate=0.1"),
]
RECIPE = load("quickstart", CHANGES, "van,a-gem", 2)


def records(
    folder: Path, scheduler: str | None, disturb: threading.Thread | None = None
) -> dict[str, Record]:
    with study.opened(folder, RECIPE) as (store, recipe), executor(1, 1, scheduler) as where:
        if disturb is not None:
            disturb.start()
        study.run(recipe, store, study.Means(workers=2, checkpoint_every=20), where, Silent())
    return records_in(folder)


@contextmanager
def workers(
    scheduler: Any, folder: Path, package: Path, count: int = 1
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a package that work for a scheduler without any, and are not restarted."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler.address]
    command += ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet, started = subprocess.DEVNULL, list[subprocess.Popen[bytes]]()
    try:
        for _ in range(count):
            worker = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=quiet, stderr=quiet
            )
            started.append(worker)
        deadline = time.monotonic() + 60
        while len(scheduler.workers) < count:
            assert all(worker.poll() is None for worker in started)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
