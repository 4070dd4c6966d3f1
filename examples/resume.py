"""A learner that is killed in the middle of its stream, and goes on as if nothing had happened.

A process learns and saves its learner after every batch. It is killed with SIGKILL at a random
batch, without warning, perhaps in the middle of a save. Another process loads the file, continues
the stream at the next batch, and is killed in its turn, until one may finish. The parameters are
then compared, bit by bit, with those of a learner that was never interrupted: the weights, Adam's
moments, the memory, what dropout draws and which examples are kept must all go on exactly where
they were.

    python examples/resume.py --seed 0 --kills 2
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from onepass import OnePass

TASKS, BATCHES, FEATURES, CLASSES = 3, 80, 20, 4  # batches of each task


def stream(seed: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Batches (x, y, task), the same in every process: a new one can go on in the middle."""
    generator = torch.Generator().manual_seed(seed)
    for task in range(TASKS):
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        for _ in range(BATCHES):
            y = torch.randint(CLASSES, (10,), generator=generator)
            yield centres[y] + torch.randn(10, FEATURES, generator=generator), y, task


def begin(seed: int, file: Path | None = None) -> OnePass:
    """A learner that saves itself in `file`, if one is given, and goes on from what is there."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    if file is not None and file.exists():
        return OnePass.load(file, model, optimizer=adam, autosave=file)
    return OnePass(model, "a-gem", optimizer=adam, autosave=file, seed=seed)


def learn(learner: OnePass, seed: int) -> Iterator[int]:
    """Learn what is left of the stream; yield how many batches are learnt and saved."""
    for x, y, task in islice(stream(seed), learner.steps, None):
        # A task that is named with its batches ends by itself when the next one begins. Had
        # end_task() to be called, a process could die between a task's last batch and the call.
        learner.observe(x, y, task=task)
        yield learner.steps


def learn_and_die(file: Path, seed: int, moment: int) -> int | None:
    """Start a process that learns and kill it once it has reported `moment` batches.

    Return how many batches it had reported, or None if it finished before it was killed.
    """
    reported = 0
    command = [sys.executable, __file__, "--seed", str(seed), "--learn", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            reported = int(line)
            if reported >= moment:
                process.kill()  # SIGKILL: it cannot tidy up; its reports so far are still read
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a process that learns ended with status {process.returncode}")
    return reported if process.returncode else None


def compare(seed: int, kills: int) -> tuple[list[int], int, bool]:
    """Learn with and without kills.

    Return after which batches a process was killed, how many batches were learnt in the end, and
    whether all parameters are bit-identical.
    """
    alone = begin(seed)
    for _ in learn(alone, seed):
        pass
    # Early moments, so that no process has finished by then.
    moments = sorted(random.Random(seed).sample(range(1, TASKS * BATCHES // 2), kills))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "learner.safetensors")
        ends = [learn_and_die(file, seed, moment) for moment in moments]
        killed = [batch for batch in ends if batch is not None]
        last = begin(seed, file)
        for _ in learn(last, seed):
            pass
    both = zip(alone.module.parameters(), last.module.parameters(), strict=True)
    return killed, last.steps, alone.steps == last.steps and all(torch.equal(a, b) for a, b in both)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A learner that is killed and goes on.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    # For the processes that are started and killed.
    parser.add_argument("--learn", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other
    if given.learn is not None:
        for batches in learn(begin(given.seed, given.learn), given.seed):
            print(batches, flush=True)
        return
    killed, steps, identical = compare(given.seed, given.kills)
    print(f"killed after batch {', '.join(map(str, killed))}; {steps} batches learnt in the end")
    verdict = "bit-identical" if identical else "DIFFERENT"
    print(f"parameters compared with those of an uninterrupted run: {verdict}")
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
