"""What a user says of the episodic memory of a stream: how much is kept, what, and where."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from onepass.errors import InputError, unknown

Policy = Literal["class-balanced", "class-reservoir", "ring", "reservoir"]
Where = Literal["module", "cpu", "disk"]
LARGEST = 2**60  # what nothing can hold is a mistake


@dataclass(frozen=True)
class Memory:
    """How much of the past is kept, and where.

    `per_task` examples of each task, and at most `examples` and `bytes` in all. Both are hard
    limits: `bytes` counts the examples and everything that is noted of them and of their groups,
    beside 30 kilobytes at most. When they are reached, the largest group gives way, so tasks and
    classes stay level. Without task boundaries `per_task` means nothing, there are 1000 `examples`
    unless said otherwise, and the reference is drawn from those that are older than `recent`
    batches.

    `held_out` examples of each task (of each class, without tasks) are kept for measuring only:
    forgetting is measured on them alone, and they are never rehearsed. One example in five, at
    random, is put aside for that until there are enough; from then on they are a uniform sample of
    those. They come on top of `per_task`, and count towards `examples` and `bytes`.

    `policy`: "class-balanced" shares the room evenly by the classes seen so far, with a uniform
    sample of each (class-balancing reservoir sampling: Chrysakis, Moens: Online continual learning
    from imbalanced data, ICML 2020). "reservoir" is a uniform sample of the task or stream.
    "class-reservoir" and "ring" give each of the classes that a task can have a fixed share from
    the start, filled by a uniform sample or by the last examples of the class: the policies of the
    benchmark. By default "class-balanced", and "reservoir" for a loss of one's own. `where`: on the
    device of the "module", on the "cpu", or on "disk" in `folder`.
    """

    per_task: int = 250
    examples: int | None = None
    bytes: int | None = None
    policy: Policy | None = None
    where: Where = "module"
    folder: str | Path | None = None
    recent: int = 50
    held_out: int = 0

    def __post_init__(self) -> None:
        least = {"per_task": 1, "examples": 1, "bytes": 1, "recent": 0, "held_out": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None or name not in ("examples", "bytes"):
                object.__setattr__(self, name, _whole(name, value, smallest))
        policy, where, folder = self.policy, self.where, self.folder
        if policy is not None and not (isinstance(policy, str) and policy in get_args(Policy)):
            raise unknown("memory policy", str(policy), get_args(Policy))
        if not (isinstance(where, str) and where in get_args(Where)):
            raise unknown("place for the memory", str(where), get_args(Where))
        if (where == "disk") != (folder is not None):
            what = "a memory on disk needs a folder, and only that one does"
            raise InputError(f"{what}: give where='disk' and folder='…' together")
        possible = folder is None or (isinstance(folder, (str, Path)) and str(folder).strip())
        if not possible or "\0" in str(folder):
            what = f"the memory's folder must be the path of a folder, got {folder!r}"
            raise InputError(f"{what}: name one, '.' for the current one")


def _whole(name: str, value: object, least: int) -> int:
    """A whole number, NumPy's too."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number <= LARGEST:
        kinds = {"recent": "of batches, at least 0", "held_out": "of examples, at least 0"}
        what = f"a whole number {kinds.get(name, 'above 0')}, and at most 2**60"
        raise InputError(f"the memory's {name} must be {what}, got {_short(value)}")
    return number


def _short(value: object) -> str:
    """What a message can show of a value: a number may have thousands of digits."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a larger one" if value > 0 else "a smaller one"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
