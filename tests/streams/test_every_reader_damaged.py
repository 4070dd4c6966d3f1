"""Every reader with damaged files: a sentence, or data of the right shape.

Each takes little memory and little time, and nothing is written.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onepass.errors import InputError
from onepass.streams import cifar, digits, mnist
from tests.fuzzing import in_a_process, listing, mutations, outcome
from tests.streams.cifar_files import pickled, pickled_by_python_2, records

CLASSES, SIDE, EACH = 3, 4, {"train": 2, "test": 1}
NUMBERS = 3 * SIDE * SIDE
LABELS = {
    part: [label for label in range(CLASSES) for _ in range(each)] for part, each in EACH.items()
}
PLANES = {
    part: np.random.default_rng(0).integers(0, 256, (len(labels), NUMBERS), np.uint8)
    for part, labels in LABELS.items()
}
PROTOCOLS = (None, 0, 1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Reader:
    """A folder's files, the one that is harmed, how it is packed afterwards, and how it is read."""

    files: dict[str, bytes]
    harmed: str
    read: Callable[[Path], Any]
    repack: Callable[[bytes], bytes] = bytes


def _cifar(folder: Path) -> None:
    x, classes, training = cifar.read(folder)
    assert (x.shape, x.dtype, classes.shape, training) == ((9, NUMBERS), np.uint8, (9,), 6)
    assert sorted(classes[:6]) == LABELS["train"]


def _idx(folder: Path) -> None:
    (path,) = folder.iterdir()
    assert mnist.read_idx(path).nbytes <= path.stat().st_size * 2000


def _digits(folder: Path) -> None:
    images, classes = digits._images.__wrapped__()
    assert (images.shape, classes.shape) == ((1797, 8, 8), (1797,))


def _python(part: str, protocol: int | None) -> bytes:
    if protocol is not None:
        return pickled(PLANES[part], LABELS[part], protocol)
    large, small = (b"J" + struct.pack("<i", numbers) for numbers in (3072, NUMBERS))
    return pickled_by_python_2(PLANES[part], LABELS[part]).replace(large, small)


def _tar(form: str, files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-{form}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def _png(planes: Any) -> bytes:
    image, made = pytest.importorskip("PIL.Image"), io.BytesIO()
    image.fromarray(planes.reshape(3, SIDE, SIDE).transpose(1, 2, 0)).save(made, "PNG")
    return made.getvalue()


def _with_checksums(content: bytes) -> bytes:
    """A PNG image whose checksums are right again, as far as its parts can be told apart."""
    made, at = bytearray(content[:8]), 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        if end + 4 > len(content):
            break
        made += content[at:end] + struct.pack(">I", zlib.crc32(content[at + 4 : end]))
        at = end + 4
    return bytes(made) + content[at:]


def _readers() -> dict[str, Reader]:
    binary = {f"{part}.bin": records(PLANES[part], LABELS[part]) for part in EACH}
    python = {protocol: {part: _python(part, protocol) for part in EACH} for protocol in PROTOCOLS}
    images = {
        f"{part}/{label}/{i}.png": _png(PLANES[part][i])
        for part in EACH
        for i, label in enumerate(LABELS[part])
    }
    idx = struct.pack(">HBB3I", 0, 8, 3, 2, 28, 28)
    idx += PLANES["train"].tobytes().ljust(2 * 28 * 28, b"x")
    table = digits._file().read_bytes()
    made = {
        "idx": _of_file("train-images-idx3-ubyte", idx, _idx),
        "gzipped idx": _of_file("train-images-idx3-ubyte.gz", gzip.compress(idx), _idx),
        "idx, gzipped then": _of_file("train-images-idx3-ubyte.gz", idx, _idx, gzip.compress),
        "digits": _of_file("digits.csv.gz", table, _digits),
        "digits, gzipped then": _of_file(
            "digits.csv.gz", gzip.decompress(table), _digits, lambda c: gzip.compress(c, 1)
        ),
        "binary": Reader(binary, "train.bin", _cifar),
        "image": Reader(images, "train/1/2.png", _cifar),
        "image, checksums then": Reader(images, "train/1/2.png", _cifar, _with_checksums),
    }
    for protocol, files in python.items():
        made[f"pickle of protocol {protocol}"] = Reader(files, "train", _cifar)
    for form, files in (("binary", binary), ("python", python[None])):
        name, tar = f"cifar-100-{form}.tar.gz", _tar(form, files)
        made[f"archive of {form}"] = _of_file(name, gzip.compress(tar), _cifar)
        made[f"archive of {form}, gzipped then"] = _of_file(name, tar, _cifar, gzip.compress)
    return made


def _of_file(
    name: str, content: bytes, read: Callable[[Path], Any], repack: Callable[[bytes], bytes] = bytes
) -> Reader:
    return Reader({name: content}, name, read, repack)


READERS = _readers()
KINDS = ("archive", "idx", "digits", "binary", "pickle", "image")  # each has a reader of its own
MANY = 5000  # damages that each of these gets, shared by the forms of its files


def _shrink(folder: Path) -> None:
    """A small CIFAR-100, and no checksum in the way. In a process of its own."""
    right = SimpleNamespace(hexdigest=lambda: "right")
    replaced: list[tuple[Any, str, Any]] = [
        (cifar, "CLASSES", CLASSES),
        (cifar, "SIDE", SIDE),
        (cifar, "PIXELS", SIDE * SIDE),
        (cifar, "EACH", EACH),
        (cifar, "file_digest", lambda *_: right),
        (cifar, "ARCHIVES", dict.fromkeys(cifar.ARCHIVES, "right")),
        (mnist, "FILES", dict.fromkeys(mnist.FILES, ("right", "right"))),
        (mnist, "md5", lambda _: right),
        (digits, "_file", lambda: folder / "digits.csv.gz"),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)


def _harmed(reader: Reader, folder: Path, seed: int, count: int) -> Iterator[str]:
    _shrink(folder)
    for content in mutations(reader.files[reader.harmed], seed, count):
        (folder / reader.harmed).write_bytes(reader.repack(content))
        yield outcome(lambda: reader.read(folder), InputError)


def _outcomes(reader: Reader, folder: Path, seed: int, count: int) -> Counter[str]:
    for name, content in reader.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(reader.repack(content) if name == reader.harmed else content)

    def whole() -> Iterable[str]:
        _shrink(folder)
        return [outcome(lambda: reader.read(folder), InputError)]

    assert in_a_process(whole) == ["right"]
    before = listing(folder)
    told = in_a_process(lambda: _harmed(reader, folder, seed, count))
    after = listing(folder)
    assert before.pop(reader.harmed)
    assert after.pop(reader.harmed)
    assert after == before
    assert len(told) == count, told[-1]
    return Counter(told)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_by_a_sentence_or_read(name: str, tmp_path: Path) -> None:
    assert set(_outcomes(READERS[name], tmp_path, 0, 25)) <= {"right", "refused"}


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_very_many_damaged_files_are_refused_by_a_sentence_or_read(
    name: str, tmp_path: Path
) -> None:
    kind = next(kind for kind in KINDS if kind in name)
    forms = sum(next(one for one in KINDS if one in other) == kind for other in READERS)
    assert set(_outcomes(READERS[name], tmp_path, 1, -(-MANY // forms))) <= {"right", "refused"}
