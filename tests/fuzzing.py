"""Damaged versions of a file, and a process of limited memory and time to read them in."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onepass.errors import is_out_of_memory

MEMORY, SECONDS = 2**30, 10  # that one input may take beyond what the process has already
# The audit events of what writes. Of SQLite there is only which file it opens.
WRITING = {
    *("open", "sqlite3.connect", "subprocess.Popen", "os.system", "os.mkdir", "os.rename"),
    *("os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
}
LARGE = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` versions of a file with one to four damages each; the same ones for the same seed."""
    draw = random.Random(f"{seed} {len(content)}")
    for _ in range(count):
        yield damaged(content, draw)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A version of a file with one to four damages."""
    made = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        made = draw.choice(DAMAGES)(made, draw)
    return bytes(made)


def _flip(content: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.choice((1, 1, 8))):
        content[_place(content, draw)] ^= 1 << draw.randrange(8)
    return content


def _truncate(content: bytearray, draw: random.Random) -> bytearray:
    return content[: _place(content, draw)]


def _insert(content: bytearray, draw: random.Random) -> bytearray:
    at = _place(content, draw)
    return content[:at] + draw.randbytes(draw.choice((1, 4, 64))) + content[at:]


def _delete(content: bytearray, draw: random.Random) -> bytearray:
    at = _place(content, draw)
    return content[:at] + content[at + draw.choice((1, 4, 64, 4096)) :]


def _duplicate(content: bytearray, draw: random.Random) -> bytearray:
    at, length, to = _place(content, draw), draw.choice((1, 8, 100, 5000)), _place(content, draw)
    return content[:to] + content[at : at + length] + content[to:]


def _repeat(content: bytearray, draw: random.Random) -> bytearray:
    at, length = _place(content, draw), draw.choice((1, 2, 8, 100))
    return content[:at] + content[at : at + length] * draw.choice((2, 30, 3000)) + content[at:]


def _large_number(content: bytearray, draw: random.Random) -> bytearray:
    at, size = _place(content, draw), draw.choice("IQ")
    number = struct.pack(
        draw.choice("<>") + size, draw.choice(LARGE) % 2 ** (8 * struct.calcsize(size))
    )
    return content[:at] + number + content[at + len(number) :]


DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    *(_flip, _truncate, _insert, _delete, _duplicate, _repeat, _large_number),
)


def _place(content: bytearray, draw: random.Random) -> int:
    """Anywhere, but half of the time near the beginning or the end, where headers are."""
    if not content:
        content.append(0)
    size, near = len(content), min(len(content), 200)
    anywhere, elsewhere = draw.randrange(size), draw.randrange(size)
    return draw.choice((anywhere, elsewhere, draw.randrange(near), size - 1 - draw.randrange(near)))


class TooSlowError(BaseException):
    """Not an `Exception`, so that no reader takes it for damage in its input."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Stop what takes longer.

    What is inside a single operation of Python cannot be stopped: its process is ended soon after.
    """

    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {seconds} s")

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 2 * seconds, limits[1]))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_CPU, limits)


def limit_memory(more: int = MEMORY) -> None:
    """Let this process have `more` bytes than it has now. There is no way back."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)


def outcome(read: Callable[[], Any], refusal: type[Exception], seconds: int = SECONDS) -> str:
    """How it ends: `right` (read), `refused` (by one sentence), or what went wrong."""
    try:
        with limited(seconds):
            read()
    except refusal as reason:
        if is_out_of_memory(reason):
            return "too much memory, and then a sentence"
        return "refused" if len(str(reason).splitlines()) == 1 else f"not one sentence: {reason}"
    except TooSlowError as reason:
        return str(reason)
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"[:300]
    return "right"


def in_a_process(work: Callable[[], Iterable[str]], more: int = MEMORY) -> list[str]:
    """What `work` says, one line per input, in a forked process of limited memory.

    There is one line more if the process was ended.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            limit_memory(more)
            with os.fdopen(writable, "w") as told:
                for line in work():
                    print(" ".join(line.splitlines()), file=told, flush=True)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable) as told:
        lines = told.read().splitlines()
    ended = os.waitpid(child, 0)[1]
    return lines if ended == 0 else [*lines, f"the process ended with {ended}"]


class Watch:
    """Notices what this process writes outside a folder, or anywhere, from now on."""

    def __init__(self, folder: Path | None) -> None:
        self.written: list[str] = []
        self._folder = folder
        sys.addaudithook(self._notice)

    def _notice(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in WRITING or isinstance(given[0], int):  # a file that is open already
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        place = given[-1] if event in ("os.mkdir", "os.remove", "os.rmdir") else -1
        start = os.getcwd() if place == -1 else os.readlink(f"/proc/self/fd/{place}")
        for name in given[:2] if event in ("os.rename", "os.link", "os.symlink") else given[:1]:
            path, _, how = os.fsdecode(name).removeprefix("file://").partition("?")
            if event == "sqlite3.connect" and (path == ":memory:" or "mode=ro" in how):
                continue
            full = Path(os.path.normpath(os.path.join(start, path)))
            if self._folder is None or not full.is_relative_to(self._folder):
                self.written.append(f"{event} {path}")


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, by size and time of change."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }
