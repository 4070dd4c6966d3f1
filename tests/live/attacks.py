"""Attacks on saved learners: damaged files, and altered ones with the right checksums."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzzing import damaged
from tests.live.altered_files import put_together, taken_apart
from tests.live.saved_cases import CASES, STOPS, content_of


def at(about: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        about = about[key]
    return about


def places(about: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a header."""
    items: Any = ()
    if isinstance(about, dict):
        items = about.items()
    elif isinstance(about, list):
        items = enumerate(about)
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**6, 2**31 - 1, 2**31, 2**53, 2**62),
    *(2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**300),
    *(0.0, -0.5, 0.5, 1.5, 1e-300, 1e38, 1e308, -1e308),
    *("", "x", "0", "-1", "a\nb", "\ud800", "__class__", "save", "float64", "int8"),
    *("complex64", "disk", "cpu", "module", "ring", "reservoir", "er"),
    *("icarl", "van", "Adam", "victim/file", "../victim", "/proc/self/mem", "x" * 100_000),
    *([], [0], [[]], [None], [1, 2, 3], ["x", "y"], {}, {"x": 1}, {"dtype": "float32"}),
    *({"tensor": 1, "dtype": "load"}, {"tensor": 0.5, "dtype": "float64"}),
]
NEW = [
    *("autosave", "autosave_every", "watch", "loss", "optimizer", "module", "self", "where"),
    *("folder", "memory", "tasks", "x", "", "__init__", "damping"),
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
                if not isinstance(settings, dict):
                    continue
                own, memory = settings.get("own"), settings.get("memory")
                if isinstance(own, dict) and isinstance(memory, dict):
                    inside = chance.choice([settings, own, memory, about])
                    (memory if "where" in wish or "bytes" in wish else inside).update(wish)
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
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
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
            turned = tensor.T if tensor.dim() == 2 else tensor[..., None]
            empty = tensor[:0] if tensor.dim() else tensor
            tensors[name] = chance.choice([tensor.reshape(-1), tensor[None], turned, empty])
        case 4:
            del tensors[name]
        case 5:
            of_part = [f"{part}.x", f"{part}.7.step", f"{name}.x", f"{part}."]
            others = ["x", "optimizer.0.x", "memory.examples.input 001"]
            tensors[chance.choice(of_part + others)] = tensor.clone()
        case 6:
            other = chance.choice(sorted(tensors))
            tensors[name] = tensors[other].clone()
        case _:
            odd: list[float] = [0, 1, -1, 2, 100, 2**31]
            if tensor.is_floating_point():
                odd = [0, -1, 1e30, float("nan"), float("inf")]
            flat = tensor.clone().reshape(-1)
            if flat.dtype == torch.int64:
                odd += [2**62, -(2**62)]
            if flat.numel() and flat.dtype not in (torch.bool, torch.uint8):
                one = chance.randrange(flat.numel())
                flat[one if chance.random() < 0.7 else slice(None)] = chance.choice(odd)
            tensors[name] = flat.view(tensor.shape)


DEEP_TEXTS = [
    *(b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"{" * 50_000, b'{"a":' * 20_000),
    *(b"[" + b"[]," * 400_000 + b"[]]", b"9" * 5000, b"NaN"),
]
ODD_SHAPES = [
    *([0, 2**62, 2**62], [2**62], [-1], [2**63], [], [0], "x", None, [1] * 5000, [1.5], [True])
]
ODD_DTYPES = ["F64", "BOOL", "I8", "x", "F8_E4M3", "C64", None, 7, "F4"]
ODD_METADATA = [
    *(None, [], 7, {}, {"onepass": 7}, {"onepass": "7"}, {"onepass": "{" * 9000}, {"x": "y"})
]


def alter_container(content: bytes, chance: Random) -> bytes:
    """Another safetensors header around the same numbers."""
    (length,) = struct.unpack("<Q", content[:8])
    text, rest = content[8 : 8 + length], content[8 + length :]
    match chance.randrange(8):
        case 0:
            near = [0, 1, length - 1, length + 1, len(content)]
            far = [2**31, 2**62, 2**63, 2**64 - 1]
            return struct.pack("<Q", chance.choice(near + far)) + content[8:]
        case 1:
            key = chance.choice([b"__metadata__", b"module.0.weight", b"x"])
            value = chance.choice([b"{}", b"null", b"7", b'{"onepass":"{}"}'])
            text = b'{"%s":%s,' % (key, value) + text.lstrip()[1:]
        case 2:
            text = chance.choice(DEEP_TEXTS)
        case 3:
            entry = json.loads(text)
            name = chance.choice(sorted(set(entry) - {"__metadata__"}))
            offsets = [[0, 4], [0, 2**62], [4, 0], [0, len(rest)], [-1, 3], [0], "x", None]
            wrong = {"shape": ODD_SHAPES, "data_offsets": offsets, "dtype": ODD_DTYPES}
            field = chance.choice(sorted(wrong))
            entry[name] |= {field: chance.choice(wrong[field])}
            text = json.dumps(entry).encode()
        case 4:
            rest = chance.choice([rest + b"\0" * 100, rest[:-4], b"", rest * 3])
        case 5:
            entry = json.loads(text)
            more = entry["__metadata__"] | {"x": "y"}
            entry["__metadata__"] = chance.choice([*ODD_METADATA, more])
            text = json.dumps(entry).encode()
        case 6:
            entry = json.loads(text)
            inner = entry["__metadata__"]["onepass"]
            twice = [inner[:-1] + ',"format":1}', '{"format":1,' + inner[1:]]
            others = [inner.replace(":", ": "), inner.replace("1", "NaN", 1), " " + inner]
            entry["__metadata__"]["onepass"] = chance.choice(twice + others)
            text = json.dumps(entry).encode()
        case 7:
            text = text + b" " * chance.choice([1, 7, 8, 1000])
    return struct.pack("<Q", len(text)) + text + rest


def attack(number: int) -> tuple[str, bytes]:
    """An attack by its number: the name of its case, and the content of its file."""
    chance = Random(number)
    name, stop = chance.choice(sorted(CASES)), chance.choice(STOPS)
    content = content_of(name, stop)
    kind = chance.random()
    if kind < 0.1:
        return name, damaged(content, chance)
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
        return name, damaged(content, chance)
