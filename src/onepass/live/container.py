"""The file format of a learner: safetensors with a JSON header of ours.

Everything that a file says of itself is bounded before it is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from onepass.errors import InputError
from onepass.files import canonical, digest, open_plain

FORMAT = 1
LONGEST = 100_000_000  # bytes of a header: safetensors reads no longer one
# Values in a header, and one more for every eight bytes of the file: each costs some hundred bytes.
VALUES = 2**20
DICTIONARIES = 2**17  # one for each tensor, and few others: each costs several times as much
KEY = "onepass"  # of our header in that of safetensors


class AlteredError(Exception):
    """What in a file cannot be what was saved, in a few words."""


def pack(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a file."""
    about = {"format": FORMAT, **about, "tensors": _digest(tensors)}
    text = canonical(about | {"checksum": digest(canonical(about))})
    return safetensors.torch.save(dict(tensors), metadata={KEY: text})


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a plain file: a pipe or a device may have no end.

    The header comes first, so a large file of another kind is refused without reading it.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            begin += file.read(_header_length(begin, size, str(path)))
            header = _header(begin, size, str(path))
            file.seek(0)
            content = file.read(size)
    except (OSError, ValueError) as reason:
        if isinstance(reason, InputError):
            raise
        why = f"cannot read {path} ({getattr(reason, 'strerror', None) or reason})"
        raise InputError(f"{why}: give the path of a file that save() wrote") from None
    if len(content) != size or not content.startswith(begin):
        raise InputError(f"{path} was changed while it was read: load it again")
    return header, _tensors(content, header, str(path))


def unpack(content: bytes, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file's content."""
    length = _header_length(content[:8], len(content), path)
    header = _header(content[: 8 + length], len(content), path)
    return header, _tensors(content, header, path)


def _header_length(begin: bytes, size: int, path: str) -> int:
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or not 2 <= length <= min(LONGEST, size - 8):
        raise _foreign(path)
    return length


def _header(begin: bytes, size: int, path: str) -> dict[str, Any]:
    """Our header, if it is the one that was saved.

    `begin` is the length of the header of safetensors, and that header.
    """
    try:
        _check_values(begin.count(b"["), begin.count(b"{"), begin.count(b","), size)
        outer = json.loads(begin[8:], object_pairs_hook=_once)
        text = outer["__metadata__"][KEY]
        # Once more: in the outer header a sign may be written as its number.
        _check_values(text.count("["), text.count("{"), text.count(","), size)
        about: dict[str, Any] = json.loads(text)
        version, checksum = about["format"], about.pop("checksum")
        sound = checksum == digest(canonical(about))
        sound = sound and canonical(about | {"checksum": checksum}) == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _foreign(path) from None
    if type(version) is not int or version != FORMAT:
        found = version if type(version) in (int, float) else "of another kind"
        what = f"{path} has format {found}, and this version of onepass reads {FORMAT}"
        raise InputError(f"{what}: load it with the version that wrote it")
    if not sound:
        raise InputError(f"{path} is damaged: its header is not the one that was saved")
    del outer["__metadata__"]
    if not _lies_well(outer, size - len(begin)):
        raise InputError(f"{path} is damaged: its tensors cannot be read")
    return about


def _check_values(lists: int, dictionaries: int, more: int, size: int) -> None:
    """Raise if a header of a file of this size has more values than there is reason for."""
    if lists + dictionaries + more > VALUES + size // 8 or dictionaries > DICTIONARIES:
        raise ValueError("it has too many values")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _lies_well(tensors: Mapping[str, Any], size: int) -> bool:
    """Whether all tensors together are the rest of the file, with shapes that torch can have."""
    ends = 0
    for tensor in tensors.values():
        if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
            return False
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        if not (isinstance(shape, list) and isinstance(offsets, list)):
            return False
        if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
            return False
        if len(offsets) != 2 or len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**59:
            return False
        ends += offsets[1] - offsets[0]
    return ends == size


def _tensors(content: bytes, about: Mapping[str, Any], path: str) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError):
        raise InputError(f"{path} is damaged: its tensors cannot be read") from None
    if _digest(tensors) != about.get("tensors"):
        raise InputError(f"{path} is damaged: its tensors are not those that were saved")
    return tensors


def _foreign(path: str) -> InputError:
    return InputError(f"{path} is damaged or not a file that save() wrote: give the path of one")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
