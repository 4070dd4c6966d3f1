"""A learner that is killed in the middle of its stream, and goes on as if nothing had happened.

A process learns and saves itself after every batch. It is killed with SIGKILL at a random batch, without warning, perhaps in the middle of a save;
another one loads the file, replays the stream from the batch it had come to, and is killed in its turn, until one may finish. Its parameters are
then compared, bit by bit, with those of a learner that was left alone: the weights, Adam's moments, the memory, what dropout draws and which
examples are kept all have to go on exactly where they were.

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
    """Batches (x, y, task): the same ones each time it is begun, which is what lets a new process go on in the middle."""
    luck = torch.Generator().manual_seed(seed)
    for task in range(TASKS):
        centres = torch.randn(CLASSES, FEATURES, generator=luck)
        for _ in range(BATCHES):
            y = torch.randint(CLASSES, (10,), generator=luck)
            yield centres[y] + torch.randn(10, FEATURES, generator=luck), y, task


def begin(seed: int, file: Path | None = None) -> OnePass:
    """A learner that saves itself in the file, if there is one given: it goes on from what is there, else it begins."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    if file is not None and file.exists():
        return OnePass.load(file, model, optimizer=adam, autosave=file)
    return OnePass(model, "a-gem", optimizer=adam, autosave=file, seed=seed)


def learn(learner: OnePass, seed: int) -> Iterator[int]:
    """Learn what is left of the stream; yields how many batches are learnt and saved."""
    for x, y, task in islice(stream(seed), learner.steps, None):
        # A task that is named with its batches ends by itself when the next one begins. With end_task(), a process that dies between the
        # last batch of a task and that call would have to find out that it still has to be made.
        learner.observe(x, y, task=task)
        yield learner.steps


def learn_and_die(file: Path, seed: int, moment: int) -> int | None:
    """Start a process that learns and kill it once it has reported `moment` batches; how many it had learnt, if it was killed."""
    reported = 0
    command = [sys.executable, __file__, "--seed", str(seed), "--learn", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            reported = int(line)
            if reported >= moment:
                process.kill()  # SIGKILL: it cannot tidy up. What it reported before it died is still read
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"a process that learns ended with status {process.returncode}")
    return reported if process.returncode else None


def compare(seed: int, kills: int) -> tuple[list[int], int, bool]:
    """After which batches it was killed, how many batches were learnt in the end, and whether all parameters are bit-identical."""
    alone = begin(seed)
    for _ in learn(alone, seed):
        pass
    moments = sorted(
        random.Random(seed).sample(range(1, TASKS * BATCHES // 2), kills)
    )  # early, so that none has finished by then
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "learner.safetensors")
        killed = [
            batch for moment in moments if (batch := learn_and_die(file, seed, moment)) is not None
        ]
        last = begin(seed, file)
        for _ in learn(last, seed):
            pass
    both = zip(alone.module.parameters(), last.module.parameters(), strict=True)
    return killed, last.steps, alone.steps == last.steps and all(torch.equal(a, b) for a, b in both)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A learner that is killed and goes on.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument(
        "--learn", type=Path, metavar="FILE", help=argparse.SUPPRESS
    )  # the processes that are started and killed
    given = parser.parse_args(argv)
    torch.set_num_threads(1)  # the steps are tiny: threads would only wait for each other
    if given.learn is not None:
        for batches in learn(begin(given.seed, given.learn), given.seed):
            print(batches, flush=True)
        return
    killed, steps, identical = compare(given.seed, given.kills)
    print(f"killed after batch {', '.join(map(str, killed))}; {steps} batches learnt in the end")
    print(
        f"parameters compared with those of an uninterrupted run: {'bit-identical' if identical else 'DIFFERENT'}"
    )
    if not identical:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
