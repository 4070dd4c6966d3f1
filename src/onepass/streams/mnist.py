"""Permuted MNIST: the paper's first stream."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from onepass.errors import InputError, first_line
from onepass.settings import setting
from onepass.streams import base
from onepass.streams.base import PermutedStream, Pool

# The canonical files, by MD5: gzipped as published, and unpacked.
FILES: dict[str, tuple[str, str]] = {
    "train-images-idx3-ubyte": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train-labels-idx1-ubyte": (
        "d53e105ee54ea40749a09fcbcd1e9432",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "t10k-images-idx3-ubyte": (
        "9fb629c4189551a2d022fa330f9573f3",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "t10k-labels-idx1-ubyte": (
        "ec29112dd5afa0611ce80d1b7f02629c",
        "27ae3e4e09519cfbb04c329615203637",
    ),
}
LARGEST = 2**26  # bytes of a file, packed or unpacked: the largest has 47 million
ANEW = "delete it and fetch it anew with 'onepass data get mnist'"


def find(folder: Path) -> dict[str, Path] | None:
    """The four files in a folder or in its `mnist`, gzipped or plain; None if any is missing."""
    for found in _found(folder):
        if len(found) == len(FILES):
            return found
    return None


def missing(folder: Path) -> list[str]:
    """The files that a folder, or its subfolder `mnist`, lacks although it has others of them."""
    for found in _found(folder):
        if found:
            place = next(iter(found.values())).parent
            return [str(place / f"{name}.gz") for name in FILES if name not in found]
    return []


def _found(folder: Path) -> list[dict[str, Path]]:
    places = (folder, folder / "mnist")
    return [
        {
            name: path
            for name in FILES
            for path in (place / f"{name}.gz", place / name)
            if path.is_file()
        }
        for place in places
    ]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes, checked against its canonical checksum."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as reason:
        why = reason.strerror or first_line(reason)
        raise InputError(f"{path} cannot be read ({why}): {ANEW}") from None
    packed, plain = FILES[path.name.removesuffix(".gz")]
    if len(raw) > LARGEST or md5(raw).hexdigest() != (packed if path.suffix == ".gz" else plain):
        raise InputError(f"{path} is truncated or altered (its checksum is wrong): {ANEW}")
    try:
        return _array(_unpacked(raw) if path.suffix == ".gz" else raw)
    except ValueError as reason:
        why = first_line(reason)
        raise InputError(f"{path} is not an idx file of MNIST ({why}): {ANEW}") from None


def _unpacked(raw: bytes) -> bytes:
    unpacking = zlib.decompressobj(wbits=31)  # gzip
    try:
        content = unpacking.decompress(raw, LARGEST + 1)
    except zlib.error as reason:
        raise ValueError(str(reason)) from None
    if len(content) > LARGEST or not unpacking.eof or unpacking.unused_data:
        raise ValueError("it ends too early or too late")
    return content


def _array(content: bytes) -> NDArray[np.uint8]:
    dimensions = int.from_bytes(content[3:4], "big")
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or dimensions not in (1, 3) or len(content) < start:
        raise ValueError("it does not begin like one")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if math.prod(shape) != len(content) - start:
        said = "×".join(map(str, shape))
        raise ValueError(f"it has {len(content) - start} bytes, and says {said}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def check(folder: Path) -> None:
    """Raise if a file of MNIST that is found in a folder is damaged."""
    for path in (find(folder) or {}).values():
        read_idx(path)


@dataclass(frozen=True)
class Options(base.Options):
    """Of how many training images a task takes its examples, and which permutations it has.

    The authors trained on 55 000 images, since the loader they used set the first 5 000 aside.
    `leaking` makes the three permutations of `D^CV` the first three of `D^EV`, as theirs are.
    """

    train_images: int = 55_000
    leaking: bool = setting(False, later=True)


class PermutedMnist(PermutedStream):
    """Ten digits of 28×28 permuted pixels: 55 000 training and 10 000 test examples per task."""

    shape = (28 * 28,)
    classes_per_task = 10

    def __init__(self, options: Options, data: str | None) -> None:
        try:
            files = find(Path(data)) if data is not None else None
        except OSError as reason:
            why = reason.strerror or first_line(reason)
            raise InputError(f"{data} cannot be read ({why}): name another folder") from None
        if files is None:
            raise InputError(f"there is no MNIST in {data}: fetch it with 'onepass data get mnist'")
        if not 0 < options.train_images <= 60_000:
            raise InputError(
                f"train_images={options.train_images} is not possible:"
                " MNIST has 60000 training images, the authors used 55000"
            )
        train_x, train_y, test_x, test_y = (read_idx(files[name]) for name in FILES)
        first = len(train_x) - options.train_images
        x = np.concatenate([train_x[first:], test_x])
        classes = np.concatenate([train_y[first:], test_y]).astype(np.int64)
        pool = Pool(
            torch.from_numpy(x).flatten(1),
            torch.from_numpy(classes),
            options.train_images,
            scale=1 / 255,
            shape=self.shape,
        )
        super().__init__(pool, options.train_examples, options.test_examples, options.leaking)
