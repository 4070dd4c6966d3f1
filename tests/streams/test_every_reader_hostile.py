"""Small files that ask for much: refused by a sentence, in little memory and time."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from tarfile import REGTYPE
from typing import Any

import pytest

from onepass.errors import InputError
from onepass.streams import archives, cifar, digits, mnist
from tests.fuzzing import in_a_process, outcome
from tests.streams.hostile_pickles import PROGRAMS
from tests.streams.png_files import chunk, header, png

LITTLE = 2**28  # bytes: less than the training images of CIFAR-100 take twice


def ends(read: Callable[[], Any], memory: int = LITTLE) -> str:
    """How reading ends in a process of little memory."""
    (told,) = in_a_process(lambda: [outcome(read, InputError)], memory)
    return told


def sparse(path: Path, size: int) -> None:
    """A file of that size, which takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)


def test_a_pickle_is_refused_in_little_memory_whatever_it_asks_for(tmp_path: Path) -> None:
    def outcomes() -> list[str]:
        told = []
        for name, program in PROGRAMS.items():
            (tmp_path / "train").write_bytes(program)
            told.append(f"{name}: {outcome(lambda: cifar.read(tmp_path), InputError)}")
        return told

    sparse(tmp_path / "test", 0)
    # Twice the memory: the array for all images of CIFAR-100 is there before a file is read.
    assert in_a_process(outcomes, 2 * LITTLE) == [f"{name}: refused" for name in PROGRAMS]


UNPACKED = ("cifar-100-binary/train.bin", "cifar-100-python/train")


@pytest.mark.parametrize("name", [*UNPACKED, "cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"])
def test_a_file_of_a_terabyte_is_not_read(name: str, tmp_path: Path) -> None:
    sparse(tmp_path / name, 2**40)
    if name in UNPACKED:
        sparse(tmp_path / name.replace("train", "test"), 1)
    with pytest.raises(InputError, match=f"has {2**40} bytes, and CIFAR-100 has"):
        cifar.read(tmp_path)


@pytest.mark.parametrize("name", [*mnist.FILES, *(f"{name}.gz" for name in mnist.FILES)])
def test_a_file_of_mnist_of_a_terabyte_is_not_read(name: str, tmp_path: Path) -> None:
    sparse(tmp_path / name, 2**40)
    assert ends(lambda: mnist.read_idx(tmp_path / name)) == "refused"


def two_images(pixels: int) -> bytes:
    """An IDX file that says it has two images, with this many pixels."""
    return idx(2, 28, 28) + bytes(pixels)


def idx(*shape: int) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)


ALL = 2 * 28 * 28
NO_IDX = {
    "parts": gzip.compress(bytes(2**22), 1) * 18,  # which unpack to more than 64 megabytes
    "bomb": gzip.compress(bytes(mnist.LARGEST + 1), 1),
    "truncated": gzip.compress(two_images(ALL))[:-1],
    "more": gzip.compress(two_images(ALL)) + b"more",
    "terabytes": gzip.compress(idx(2**31, 2**31, 2**31)),
    "too-few": gzip.compress(two_images(ALL - 1)),
    "too-many": gzip.compress(two_images(ALL + 1)),
    "dimensions": gzip.compress(b"\0\0\x08\xff"),
    "floats": gzip.compress(b"\0\0\x0d\x01\0\0\0\0"),
    "nothing": gzip.compress(b""),
    "empty": b"",
    "plain": b"no gzip",
}


@pytest.mark.parametrize("content", NO_IDX.values(), ids=NO_IDX)
def test_an_idx_file_that_is_none_is_refused_though_its_checksum_is_right(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "train-images-idx3-ubyte"
    monkeypatch.setitem(mnist.FILES, name, (md5(content).hexdigest(), ""))
    (tmp_path / f"{name}.gz").write_bytes(content)
    assert ends(lambda: mnist.read_idx(tmp_path / f"{name}.gz")) == "refused"


def test_a_file_of_mnist_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "t10k-labels-idx1-ubyte").mkdir()
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte cannot be read"):
        mnist.read_idx(tmp_path / "t10k-labels-idx1-ubyte")


NO_DIGITS = {
    "bomb": gzip.compress(b"0," * 2**20),
    "small": gzip.compress(b"1,2,3\n"),
    "another-digit": gzip.compress((b"0," * 64 + b"0\n") * 1796 + b"0," * 64 + b"10\n"),
    "words": gzip.compress(b"a,b\n"),
    "empty": b"",
    "plain": b"no gzip",
    "truncated": gzip.compress(b"0,0")[:-3],
}


@pytest.mark.parametrize("content", NO_DIGITS.values(), ids=NO_DIGITS)
def test_digits_that_are_others_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "digits.csv.gz").write_bytes(content)
    assert ends(lambda: digits.read(tmp_path / "digits.csv.gz")) == "refused"


def packed(*members: tuple[str, bytes | None, bytes]) -> bytes:
    """A tar archive of members of a name, a content (None: a terabyte is promised) and a type."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, name
            member.size = 2**40 if content is None else len(content)
            made.write(member.tobuf(tarfile.GNU_FORMAT))
            made.write((content or b"").ljust(-(-len(content or b"") // 512) * 512, b"\0"))
            archive.offset = made.tell()
    return made.getvalue()


WANTED = "cifar-100-binary/train.bin"
NO_ARCHIVE = {
    "huge": packed((WANTED, None, tarfile.REGTYPE)),
    "huge-other": packed(("another", None, tarfile.REGTYPE), (WANTED, b"", tarfile.REGTYPE)),
    "long-name": packed(("././@LongLink", None, tarfile.GNUTYPE_LONGNAME)),
    "pax": packed(("pax", None, tarfile.XHDTYPE)),
    "pax-chain": packed(*[("pax", b"8 a=bcd\n", tarfile.XHDTYPE)] * 3000),
    "symlink": packed((WANTED, b"", tarfile.SYMTYPE)),
    "link": packed((WANTED, b"", tarfile.LNKTYPE)),
    "device": packed((WANTED, b"", tarfile.CHRTYPE)),
    "fifo": packed((WANTED, b"", tarfile.FIFOTYPE)),
    "folder": packed((WANTED, b"", tarfile.DIRTYPE)),
    "outside": packed(*((place + WANTED, b"", tarfile.REGTYPE) for place in ("../", "/"))),
    "zeros": bytes(2**20),
    "none": b"no archive" * 1000,
    "empty": b"",
}


HOSTILE_ARCHIVES = {
    "huge": packed((WANTED, None, REGTYPE)),
    "huge-other": packed(("another", None, REGTYPE), (WANTED, b"", REGTYPE)),
    "long-name": packed(("././@LongLink", None, tarfile.GNUTYPE_LONGNAME)),
    "pax": packed(("pax", None, tarfile.XHDTYPE)),
    "pax-chain": packed(*[("pax", b"8 a=bcd\n", tarfile.XHDTYPE)] * 3000),
    "symlink": packed((WANTED, b"", tarfile.SYMTYPE)),
    "link": packed((WANTED, b"", tarfile.LNKTYPE)),
    "device": packed((WANTED, b"", tarfile.CHRTYPE)),
    "fifo": packed((WANTED, b"", tarfile.FIFOTYPE)),
    "folder": packed((WANTED, b"", tarfile.DIRTYPE)),
    "outside": packed(("../" + WANTED, b"", REGTYPE), ("/" + WANTED, b"", REGTYPE)),
    "zeros": bytes(2**20),
    "none": b"no archive" * 1000,
    "empty": b"",
}


@pytest.mark.parametrize("archive", HOSTILE_ARCHIVES.values(), ids=HOSTILE_ARCHIVES)
def test_an_archive_is_refused_whatever_is_in_it_though_its_checksum_is_right(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gzip.compress(archive, 1)
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(content)
    monkeypatch.setitem(cifar.ARCHIVES, path.name, md5(content).hexdigest())
    del archive, content
    assert ends(lambda: cifar.read(tmp_path), 2 * LITTLE) == "refused"
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def with_holes(form: int, size: int) -> bytes:
    """An archive whose member has half a kilobyte, and as many zeros around it as it says."""
    member = tarfile.TarInfo(WANTED)
    member.size, made = 512, io.BytesIO()
    if form == tarfile.PAX_FORMAT:
        member.pax_headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": "0,512"}
        with tarfile.open(fileobj=made, mode="w", format=form) as archive:
            archive.addfile(member, io.BytesIO(b"x" * 512))
        return made.getvalue()
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(form))
    for place, number in ((386, 0), (398, 512), (483, size)):
        header[place : place + 12] = b"\x80" + number.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"x" * 512 + bytes(1024)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_holes_in_an_archive_are_not_filled(form: int, tmp_path: Path) -> None:
    path = tmp_path / "some.tgz"
    path.write_bytes(gzip.compress(with_holes(form, 2**24)))
    with tarfile.open(path) as archive:
        assert archive.getmembers()[0].size == 2**24
    assert list(archives.members(path, {WANTED}, 20_000)) == []


def test_no_more_of_an_archive_is_unpacked_than_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "some.tgz"
    both = packed(("a", b"1" * 5000, REGTYPE), ("b", b"2" * 5000, REGTYPE))
    path.write_bytes(gzip.compress(both))
    assert list(archives.members(path, {"b"}, 20_000)) == [("b", b"2" * 5000)]
    with pytest.raises(archives.DamagedError, match="more than 8000 bytes"):
        list(archives.members(path, {"a", "b"}, 8000))
    path.write_bytes(gzip.compress(path.read_bytes())[:-9])
    with pytest.raises(archives.DamagedError):
        list(archives.members(path, {"a"}, 20_000))


def test_text_in_an_image_is_not_unpacked(tmp_path: Path) -> None:
    unpacked = b"".join(b"\0" + bytes(range(96)) for _ in range(32))
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**24)))
    path = tmp_path / "image.png"
    path.write_bytes(png(header(), unpacked, text * 3))
    pytest.importorskip("PIL.Image")
    assert ends(lambda: cifar._image(path), 2**26) == "right"
