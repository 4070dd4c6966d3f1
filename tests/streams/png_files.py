"""PNG images, part by part."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from onepass.streams.png import SIGNATURE


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(
    depth: int = 8, colour: int = 2, interlaced: int = 0, size: tuple[int, int] = (32, 32)
) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlaced))


def rows(pixels: NDArray[np.uint8]) -> bytes:
    """Rows that are not filtered, of whole bytes."""
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def png(start: bytes, unpacked: bytes, *before: bytes, after: bytes = b"") -> bytes:
    pixels = chunk(b"IDAT", zlib.compress(unpacked))
    return SIGNATURE + start + b"".join(before) + pixels + after + chunk(b"IEND", b"")
