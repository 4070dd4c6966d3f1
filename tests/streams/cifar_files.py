"""CIFAR-100 of made-up pixels, in every form it is published in."""

from __future__ import annotations

import pickle
import struct
import tarfile
from collections.abc import Callable
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onepass.streams import cifar
from tests.sentences import refusal_of

# Planes [N, 3072] and labels of either part.
Content = dict[str, tuple[NDArray[np.uint8], list[int]]]


def records(planes: NDArray[np.uint8], labels: list[int]) -> bytes:
    return b"".join(
        bytes([label // 5, label]) + row.tobytes()
        for row, label in zip(planes, labels, strict=True)
    )


def pickled(planes: NDArray[np.uint8], labels: list[int], protocol: int) -> bytes:
    return pickle.dumps(
        {"filenames": ["some.png"], "data": planes, "coarse_labels": [0], "fine_labels": labels},
        protocol,
    )


def pickled_by_python_2(planes: NDArray[np.uint8], labels: list[int]) -> bytes:
    """As Python 2 and the numpy of its time wrote it: text is `str`, which is bytes."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    array += number(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = number(len(planes)) + number(3072) + b"\x86"
    array += b"(" + number(1) + shape + kind + b"\x89" + text(planes.tobytes()) + b"tb"
    fine = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"fine_labels") + fine + b"u."


def write_binary(folder: Path, content: Content) -> None:
    files = {f"{part}.bin": records(*some) for part, some in content.items()}
    write(folder / "cifar-100-binary", files)


def write_python(folder: Path, content: Content, protocol: int | None) -> None:
    files = {
        part: pickled_by_python_2(*some) if protocol is None else pickled(*some, protocol)
        for part, some in content.items()
    }
    write(folder / "cifar-100-python", files)


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in files.items():
        (folder / name).write_bytes(some)


def write_images(folder: Path, content: Content, name: Callable[[int], str] = str) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, (planes, labels) in content.items():
        for number, (row, label) in enumerate(zip(planes, labels, strict=True)):
            place = folder / part / name(label)
            place.mkdir(parents=True, exist_ok=True)
            pixels = image.fromarray(row.reshape(3, 32, 32).transpose(1, 2, 0))
            pixels.save(place / f"{number:05}.png")


def pack(folder: Path, form: str, patch: pytest.MonkeyPatch) -> Path:
    """The archive of an unpacked form, which is as good as the published one."""
    path = folder / f"cifar-100-{form}.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for file in sorted((folder / f"cifar-100-{form}").iterdir()):  # test before train
            archive.add(file, f"cifar-100-{form}/{file.name}")
            file.unlink()
    patch.setitem(cifar.ARCHIVES, path.name, md5(path.read_bytes()).hexdigest())
    return path


def assert_holds(folder: Path, content: Content) -> None:
    x, classes, training = cifar.read(folder)
    planes = np.concatenate([some for some, _ in content.values()]).reshape(-1, 3, 32, 32)
    assert x.dtype == np.uint8
    assert np.array_equal(x, planes.transpose(0, 2, 3, 1).reshape(-1, 3072))
    assert classes.tolist() == [label for _, labels in content.values() for label in labels]
    assert training == len(content["train"][1])


def refusal(folder: Path) -> str:
    """The one sentence with which a folder is refused."""
    return refusal_of(lambda: cifar.read(folder))
