"""Tries a range of attacks on saved learners, and prints what became of each.

They run in one process under a memory limit and a clock:

    python -m tests.live.attacking FOLDER FIRST LAST
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from onepass import InputError, OnePass
from onepass.errors import is_out_of_memory
from tests.fuzzing import Watch, limit_memory
from tests.live.altered_files import shape_of
from tests.live.attacks import attack
from tests.live.comparing import same
from tests.live.saved_cases import CASES, STOPS, content_of

ROOM = 2**30  # bytes of address space beyond what the process has when it begins


SECONDS = 10  # for one attack


def listing(folder: Path) -> set[tuple[str, int]]:
    return {
        (str(path), path.stat().st_size if path.is_file() else -1) for path in folder.rglob("*")
    }


def one_sentence(reason: BaseException) -> bool:
    """One sentence, and not that memory is used up: a small file must not take so much."""
    proper = isinstance(reason, InputError) and not is_out_of_memory(reason)
    return proper and "\n" not in str(reason) and 15 < len(str(reason)) < 1000


def traceback(where: str, reason: BaseException) -> str:
    return f"TRACEBACK {where} {type(reason).__name__} {str(reason)[:150]!r}"


def outcome(name: str, content: bytes, folder: Path, watch: Watch | None = None) -> str:
    """What becomes of a file: 'refused', 'goes on', 'refuses batches', or what is wrong."""
    case, path = CASES[name], folder / "in" / "file"
    path.write_bytes(content)
    before = listing(folder)
    torch.manual_seed(2)
    module = case.build()
    given = case.given(module)
    state = shape_of(module, given.get("optimizer"))
    problem: str | None = None
    written: list[str] = [] if watch is None else watch.written
    written.clear()
    try:
        learner = OnePass.load(path, module, **given)
    except BaseException as reason:
        problem = "refused" if one_sentence(reason) else traceback("load", reason)
        if not same(state, shape_of(module, given.get("optimizer"))):
            problem = f"HARMED ({problem})"
    if written or listing(folder) != before:
        return f"WROTE {written} {listing(folder) ^ before}"
    if problem is not None:
        return problem
    where = "observe"
    try:
        named = {"task": learner.task} if learner._tasks and learner.task is not None else {}
        learner.observe(*case.data(learner.segment if learner.segment < 3 else 0, 7), **named)
        where = "predict"
        x, _ = case.data(0, 8)
        learner.scores(x) if learner.method == "icarl" else learner.predict(x)
        learner.report()
        if not written:
            where = "save"
            learner.save(folder / "in" / "again")
            (folder / "in" / "again").unlink()
    except BaseException as reason:
        problem = traceback(where, reason)
        if one_sentence(reason):
            problem = f"refuses batches: {str(reason)[:200]}"
    if (written and where != "save") or listing(folder) != before:
        return f"WROTE {written} {listing(folder) ^ before}"
    return problem or "goes on"


def main(
    folder: Path, first: int, last: int, make: Callable[[int], tuple[str, bytes]] = attack
) -> None:
    torch.set_num_threads(1)
    for name in ("in", "cwd", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.chdir(folder / "cwd")
    os.environ["TMPDIR"] = str(folder / "tmp")
    for name in sorted(CASES):
        for stop in STOPS[-1:]:
            assert outcome(name, content_of(name, stop), folder) == "goes on", (name, stop)
    watch = Watch(None)
    limit_memory(ROOM)
    for number in range(first, last):
        print(number, end=" ", flush=True)
        name, content = make(number)
        signal.alarm(SECONDS)
        found = outcome(name, content, folder, watch)
        signal.alarm(0)
        shown = found.encode("ascii", "backslashreplace").decode().replace("\n", " / ")
        print(f"[{name}]", shown, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
