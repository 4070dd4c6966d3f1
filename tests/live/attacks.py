"""Attacks on saved learners: files that are damaged, and files that were altered and have the right checksums all the same.

As a program it tries a range of attacks in one process under a memory limit and a clock, and prints one line per attack:

    python tests/attacks.py FOLDER FIRST LAST
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.errors import is_out_of_memory
from onepass.files import canonical, digest
from onepass.live.saving import packed
from tests.live.saved_learners import OPTIMIZERS, TASKS, Case, classes, net, numbers, square, values
from tests.toys import FEATURES, Normed, mutated

ROOM = 2**30  # bytes of address space beyond what the process has when it begins
SECONDS = 10  # for one attack


def several(task: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Two inputs by name."""
    x, y = classes(task, batch)
    return {"word": torch.randint(0, 9, (6,), generator=numbers(task, batch)), "x": x}, y


def appearing(task: int, batch: int) -> tuple[Tensor, Tensor]:
    """Classes that appear in the middle of tasks."""
    generator = numbers(task, batch)
    y = torch.randint(0, 2 + 2 * task + batch, (6,), generator=generator)
    return torch.randn(6, FEATURES, generator=generator) + y[:, None] / 2, y


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(FEATURES + 4, 6)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([x, self.words(word)], 1))
        return out


def normed() -> nn.Module:
    module = Normed()
    module.fc = nn.Linear(3 * FEATURES, 6)
    return module


ADAM, MOMENTUM = OPTIMIZERS["Adam"], OPTIMIZERS["momentum"]
CASES: dict[str, Case] = {
    "a-gem": Case(),
    "a-gem, tasks": Case(tasks=TASKS),
    "a-gem, ring": Case(
        settings={"memory": Memory(per_task=7, policy="ring", examples=15)}, tasks=TASKS
    ),
    "a-gem, task-free": Case(settings={"task_free": True, "memory": Memory(examples=9, recent=1)}),
    "a-gem, own loss": Case(data=values, loss=square, optimizer=ADAM),
    "er, Adam": Case("er", optimizer=ADAM),
    "er, grown, Adam": Case("er", {"grow": True}, partial(net, 2), appearing, ADAM),
    "er, task-free, bytes": Case(
        "er", {"task_free": True, "memory": Memory(bytes=4000, recent=1, policy="reservoir")}
    ),
    "ewc": Case("ewc", tasks=TASKS),
    "ewc, online, Adam": Case("ewc", {"fisher": "moving-average"}, optimizer=ADAM),
    "pi, momentum": Case("pi", optimizer=MOMENTUM),
    "pi, grown": Case("pi", {"grow": True}, partial(net, 2), appearing),
    "mas": Case("mas"),
    "gem": Case("gem"),
    "s-gem, momentum": Case("s-gem", optimizer=MOMENTUM),
    "icarl": Case("icarl", tasks=TASKS),
    "icarl, norm": Case("icarl", tasks=TASKS, build=normed),
    "mega-1, two inputs": Case("mega-1", build=Two, data=several),
    "mega-2": Case("mega-2", build=normed),
    "rwalk": Case("rwalk"),
    "van": Case("van", optimizer=MOMENTUM),
}
STOPS = (0, 2, 4, 6)  # before anything, in the first task, between two, in the second


@cache
def content_of(name: str, stop: int) -> bytes:
    case = CASES[name]
    learner = case.start()
    case.run(learner, 0, stop)
    return packed(learner)


# ---- files


def taken_apart(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (length,) = struct.unpack("<Q", content[:8])
    about: dict[str, Any] = json.loads(
        json.loads(content[8 : 8 + length])["__metadata__"]["onepass"]
    )
    del about["checksum"], about["tensors"]
    return about, safetensors.torch.load(content)


def put_together(about: Any, tensors: dict[str, Tensor]) -> bytes:
    """A file with the right checksums, whatever it says."""
    import hashlib

    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    if isinstance(about, dict):
        about = about | {"tensors": about.get("tensors", found.hexdigest())}
        about = about | {"checksum": about.get("checksum", digest(canonical(about)))}
    return safetensors.torch.save(tensors, metadata={"onepass": canonical(about)})


def at(about: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        about = about[key]
    return about


def places(about: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a header."""
    items: Any = (
        about.items()
        if isinstance(about, dict)
        else enumerate(about)
        if isinstance(about, list)
        else ()
    )
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        255,
        10**6,
        2**31 - 1,
        2**31,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        10**30,
        10**300,
    ),
    *(0.0, -0.5, 0.5, 1.5, 1e-300, 1e38, 1e308, -1e308),
    *(
        "",
        "x",
        "0",
        "-1",
        "a\nb",
        "\ud800",
        "__class__",
        "save",
        "float64",
        "int8",
        "complex64",
        "disk",
        "cpu",
        "module",
        "ring",
        "reservoir",
        "er",
    ),
    *("icarl", "van", "Adam", "victim/file", "../victim", "/proc/self/mem", "x" * 100_000),
    *(
        [],
        [0],
        [[]],
        [None],
        [1, 2, 3],
        ["x", "y"],
        {},
        {"x": 1},
        {"tensor": 1, "dtype": "load"},
        {"tensor": 0.5, "dtype": "float64"},
        {"dtype": "float32"},
    ),
]
NEW = [
    "autosave",
    "autosave_every",
    "watch",
    "loss",
    "optimizer",
    "module",
    "self",
    "where",
    "folder",
    "memory",
    "tasks",
    "x",
    "",
    "__init__",
    "damping",
]
WISHES: list[dict[str, Any]] = [
    {"autosave": "victim/file"},
    {"autosave": "../tmp/victim/deep/file", "autosave_every": 1},
    {"where": "disk", "folder": "victim/memory"},
    {"where": "disk", "folder": "../tmp/victim", "bytes": 2**33},
    {"bytes": 2**40, "examples": 2**36, "per_task": 2**36},
    {"watch": "victim/file", "watch_every": 1},
    {"loss": "victim/file"},
]


def alter_header(about: dict[str, Any], chance: Random) -> None:
    everywhere = list(places(about))
    # Each part is as likely as the others, however many numbers it holds.
    first = chance.choice(sorted({place[0] for place in everywhere}))
    *parents, key = chance.choice([place for place in everywhere if place[0] == first])
    holder = at(about, tuple(parents))
    value = holder[key]
    match chance.randrange(8):
        case 7:  # what would be written, reserved or called
            settings = about["settings"]
            for wish in chance.sample(WISHES, 2):
                if (
                    isinstance(settings, dict)
                    and isinstance(settings.get("own"), dict)
                    and isinstance(settings.get("memory"), dict)
                ):
                    inside = chance.choice([settings, settings["own"], settings["memory"], about])
                    (settings["memory"] if "where" in wish or "bytes" in wish else inside).update(
                        wish
                    )
        case 0 | 1:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        case 2:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                holder[key] = chance.choice([value + 1, value - 1, -value, value * 2, value * 1000])
            else:
                holder[key] = [copy.deepcopy(value)]
        case 3:
            del holder[key]
        case 4:
            holder[key] = copy.deepcopy(at(about, chance.choice(everywhere)))
        case 5:
            inside = value if isinstance(value, (dict, list)) else holder
            if isinstance(inside, dict):
                inside[chance.choice(NEW)] = chance.choice(["victim/file", 1, True, 0.5, None, {}])
            else:
                inside.append(copy.deepcopy(chance.choice([*inside, chance.choice(ODD)])))
        case 6:
            if isinstance(value, list) and len(value) > 1:
                chance.shuffle(value)
            else:
                holder[key] = chance.choice(["victim/file", "disk", 10**12])


KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def alter_tensors(tensors: dict[str, Tensor], chance: Random) -> None:
    parts = sorted({name.partition(".")[0] for name in tensors})
    part = chance.choice(parts)
    name = chance.choice(sorted(other for other in tensors if other.partition(".")[0] == part))
    tensor = tensors[name]
    match chance.randrange(9):
        case 0:
            tensors[name] = tensor.to(chance.choice(KINDS))
        case 1:
            tensors[name] = tensor[:-1] if tensor.dim() and len(tensor) else tensor[None]
        case 2:
            tensors[name] = torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(3)
        case 3:
            tensors[name] = chance.choice(
                [
                    tensor.reshape(-1),
                    tensor[None],
                    tensor.T if tensor.dim() == 2 else tensor[..., None],
                    tensor[:0] if tensor.dim() else tensor,
                ]
            )
        case 4:
            del tensors[name]
        case 5:
            tensors[
                chance.choice(
                    [
                        f"{part}.x",
                        f"{part}.7.step",
                        f"{name}.x",
                        "x",
                        "optimizer.0.x",
                        f"{part}.",
                        "memory.examples.input 001",
                    ]
                )
            ] = tensor.clone()
        case 6:
            other = chance.choice(sorted(tensors))
            tensors[name] = tensors[other].clone()
        case _:
            odd = (
                [0, 1, -1, 2, 100, 2**31]
                if not tensor.is_floating_point()
                else [0, -1, 1e30, float("nan"), float("inf")]
            )
            flat = tensor.clone().reshape(-1)
            if flat.dtype == torch.int64:
                odd += [2**62, -(2**62)]
            if flat.numel() and flat.dtype not in (torch.bool, torch.uint8):
                flat[chance.randrange(flat.numel()) if chance.random() < 0.7 else slice(None)] = (
                    chance.choice(odd)
                )
            tensors[name] = flat.view(tensor.shape)


def alter_container(content: bytes, chance: Random) -> bytes:
    """Another safetensors header around the same numbers."""
    (length,) = struct.unpack("<Q", content[:8])
    text, rest = content[8 : 8 + length], content[8 + length :]
    match chance.randrange(8):
        case 0:
            return (
                struct.pack(
                    "<Q",
                    chance.choice(
                        [0, 1, length - 1, length + 1, 2**31, 2**62, 2**63, 2**64 - 1, len(content)]
                    ),
                )
                + content[8:]
            )
        case 1:
            key = chance.choice(["__metadata__", "module.0.weight", "x"])
            text = (
                b'{"%s":%s,'
                % (key.encode(), chance.choice([b"{}", b"null", b"7", b'{"onepass":"{}"}']))
                + text.lstrip()[1:]
            )
        case 2:
            text = chance.choice(
                [
                    b"[" * 100_000,
                    b"[" * 100_000 + b"]" * 100_000,
                    b"{" * 50_000,
                    b'{"a":' * 20_000,
                    b"[" + b"[]," * 400_000 + b"[]]",
                    b"9" * 5000,
                    b"NaN",
                ]
            )
        case 3:
            entry = json.loads(text)
            name = chance.choice(sorted(set(entry) - {"__metadata__"}))
            entry[name] = entry[name] | chance.choice(
                [
                    {
                        "shape": chance.choice(
                            [
                                [0, 2**62, 2**62],
                                [2**62],
                                [-1],
                                [2**63],
                                [],
                                [0],
                                "x",
                                None,
                                [1] * 5000,
                                [1.5],
                                [True],
                            ]
                        )
                    },
                    {
                        "data_offsets": chance.choice(
                            [[0, 4], [0, 2**62], [4, 0], [0, len(rest)], [-1, 3], [0], "x", None]
                        )
                    },
                    {
                        "dtype": chance.choice(
                            ["F64", "BOOL", "I8", "x", "F8_E4M3", "C64", None, 7, "F4"]
                        )
                    },
                ]
            )
            text = json.dumps(entry).encode()
        case 4:
            rest = chance.choice([rest + b"\0" * 100, rest[:-4], b"", rest * 3])
        case 5:
            entry = json.loads(text)
            entry["__metadata__"] = chance.choice(
                [
                    None,
                    [],
                    7,
                    {},
                    {"onepass": 7},
                    {"onepass": "7"},
                    {"onepass": "{" * 9000},
                    {"x": "y"},
                    entry["__metadata__"] | {"x": "y"},
                ]
            )
            text = json.dumps(entry).encode()
        case 6:
            entry = json.loads(text)
            inner = entry["__metadata__"]["onepass"]
            entry["__metadata__"]["onepass"] = chance.choice(
                [
                    inner[:-1] + ',"format":1}',
                    '{"format":1,' + inner[1:],
                    inner.replace(":", ": "),
                    inner.replace("1", "NaN", 1),
                    " " + inner,
                ]
            )
            text = json.dumps(entry).encode()
        case 7:
            text = text + b" " * chance.choice([1, 7, 8, 1000])
    return struct.pack("<Q", len(text)) + text + rest


def attack(number: int) -> tuple[str, bytes]:
    """Attack number so and so: the name of its case, and the content of its file."""
    chance = Random(number)
    name, stop = chance.choice(sorted(CASES)), chance.choice(STOPS)
    content = content_of(name, stop)
    kind = chance.random()
    if kind < 0.1:
        return name, mutated(content, chance)
    if kind < 0.2:
        return name, alter_container(content, chance)
    about, tensors = taken_apart(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if chance.random() < 0.6:
            alter_header(about, chance)
        else:
            alter_tensors(tensors, chance)
    try:
        return name, put_together(about, tensors)
    except (ValueError, RuntimeError):  # what cannot even be written
        return name, mutated(content, chance)


# ---- what becomes of them


def shape_of(module: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """All that a load may not touch if it is refused."""
    values = {
        name: (tensor.detach().clone(), tensor.requires_grad, id(tensor))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    modes = [(part.training, getattr(part, "out_features", None)) for part in module.modules()]
    return (
        values,
        modes,
        None
        if optimizer is None
        else (
            repr(optimizer.state_dict()),
            [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        ),
    )


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return (
        one[1:] == other[1:]
        and one[0].keys() == other[0].keys()
        and all(
            torch.equal(a, other[0][name][0]) and rest == list(other[0][name][1:])
            for name, (a, *rest) in one[0].items()
        )
    )


def listing(folder: Path) -> set[tuple[str, int]]:
    return {
        (str(path), path.stat().st_size if path.is_file() else -1) for path in folder.rglob("*")
    }


written: list[str] = []  # what was opened for writing or made while it is watched
watching = False


def notice(event: str, given: tuple[Any, ...]) -> None:
    if not watching:
        return
    if (
        event == "open"
        and isinstance(given[2], int)
        and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        written.append(f"open {given[0]}")
    elif event in (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "subprocess.Popen",
        "os.system",
    ):
        written.append(f"{event} {given[0]}")


@contextmanager
def watched() -> Iterator[None]:
    global watching
    written.clear()
    watching = True
    try:
        yield
    finally:
        watching = False


def one_sentence(reason: BaseException) -> bool:
    """One sentence, and not that memory is used up: a small file must not take so much."""
    proper = isinstance(reason, InputError) and not is_out_of_memory(reason)
    return proper and "\n" not in str(reason) and 15 < len(str(reason)) < 1000


def outcome(name: str, content: bytes, folder: Path) -> str:
    """What becomes of a file: 'refused', 'goes on', 'refuses batches', or what is wrong."""
    case, path = CASES[name], folder / "in" / "file"
    path.write_bytes(content)
    before = listing(folder)
    torch.manual_seed(2)
    module = case.build()
    given = case.given(module)
    state = shape_of(module, given.get("optimizer"))
    problem: str | None = None
    try:
        with watched():
            learner = OnePass.load(path, module, **given)
    except BaseException as reason:
        problem = (
            "refused"
            if one_sentence(reason)
            else f"TRACEBACK load {type(reason).__name__} {str(reason)[:150]!r}"
        )
        if not same(state, shape_of(module, given.get("optimizer"))):
            problem = f"HARMED ({problem})"
    if written or listing(folder) != before:
        return f"WROTE {written} {listing(folder) ^ before}"
    if problem is not None:
        return problem
    where = "observe"
    try:
        with watched():
            named = learner.task if learner._tasks else None
            learner.observe(
                *case.data(learner.segment if learner.segment < 3 else 0, 7),
                **({} if named is None else {"task": named}),
            )
            where = "predict"
            learner.predict(case.data(0, 8)[0]) if learner.method != "icarl" else learner.scores(
                case.data(0, 8)[0]
            )
            learner.report()
        where = "save"
        learner.save(folder / "in" / "again")
        (folder / "in" / "again").unlink()
    except BaseException as reason:
        problem = (
            f"refuses batches: {str(reason)[:200]}"
            if one_sentence(reason)
            else f"TRACEBACK {where} {type(reason).__name__} {str(reason)[:150]!r}"
        )
    if written or listing(folder) != before:
        return f"WROTE {written} {listing(folder) ^ before}"
    return problem or "goes on"


def main(
    folder: Path, first: int, last: int, make: Callable[[int], tuple[str, bytes]] = attack
) -> None:
    torch.set_num_threads(1)
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "cwd").mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    os.chdir(folder / "cwd")
    os.environ["TMPDIR"] = str(folder / "tmp")
    for name in sorted(CASES):
        for stop in STOPS[-1:]:
            assert outcome(name, content_of(name, stop), folder) == "goes on", (name, stop)
    sys.addaudithook(notice)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for number in range(first, last):
        print(number, end=" ", flush=True)
        name, content = make(number)
        signal.alarm(SECONDS)
        found = outcome(name, content, folder)
        signal.alarm(0)
        print(
            f"[{name}]",
            found.encode("ascii", "backslashreplace").decode().replace("\n", " / "),
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
