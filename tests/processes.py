"""Programs and commands in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tests.commands import ONEPASS, setting


def told_by(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program says until it ends."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def in_a_group(
    command: list[str], stdout: int | IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """A process group of its own, as a terminal would start it."""
    return subprocess.Popen(
        command,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        # Tests in the background of a shell do not hear Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Started:
    """The command line in a process group of its own; with `code`, in that of a program."""

    def __init__(self, folder: Path, *arguments: str, code: str | None = None) -> None:
        self._log = folder / "stderr"
        command = [ONEPASS] if code is None else [sys.executable, "-c", code]
        with self._log.open("wb") as log:
            self._process = in_a_group([*command, *arguments], subprocess.DEVNULL, log)
        self.pid = self._process.pid

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def processes(self) -> list[int]:
        return living(self.pid)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; printed so far: {self.printed}"
            time.sleep(0.01)

    def end(self, kind: signal.Signals = signal.SIGINT) -> int:
        """The exit code after Ctrl-C (the whole group hears it) or another signal to the driver."""
        if kind == signal.SIGINT:
            os.killpg(self.pid, kind)
        else:
            os.kill(self.pid, kind)
        return self._process.wait(timeout=60)

    def wait(self) -> int:
        """The exit code, without any signal."""
        return self._process.wait(timeout=60)

    def clean_up(self) -> None:
        if self.processes():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def living(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone in the meantime
            continue
        if int(owner) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


# A study of ten units, which takes a while.
LONG = [
    *("run", "quickstart", "--methods", "van,ewc,a-gem", "--seeds", "2"),
    *setting("train_examples=200", "test_examples=20", "ewc.strength=10"),
    *setting(*(f"grids.{name}.learning_rate=0.1" for name in ("van", "ewc", "a-gem"))),
]
MEASUREMENT = ["bench", "--device", "cpu", "--methods", "van", "--rounds", "1000"]
