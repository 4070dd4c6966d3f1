"""Checking a PNG image before it is decoded.

Pillow silently takes missing rows for black and clips grey values of 16 bits.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# By colour type: grey, colour, palette, grey and alpha, colour and alpha.
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# The passes of an image: the first column and row, and the steps between them.
WHOLE = ((0, 0, 1, 1),)
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


@dataclass(frozen=True)
class Png:
    """An image of nothing but its pixels: no text, no animation."""

    content: bytes
    colours: int  # of its palette
    packed: bytes  # its rows
    unpacked: int  # bytes that the rows must have

    def check_rows(self) -> None:
        """Raise if rows are missing.

        Rows are decoded in order, so an image whose last row is not black needs no such check.
        """
        unpacking = zlib.decompressobj()
        found = len(unpacking.decompress(self.packed, self.unpacked + 1))
        if found != self.unpacked or not unpacking.eof:
            amount = "more" if found > self.unpacked else "fewer"
            raise ValueError(f"it has {amount} rows than it says")


def read(content: bytes, width: int, height: int) -> Png:
    """An image of that size. A `ValueError` says why another one is refused."""
    if not content.startswith(SIGNATURE):
        raise ValueError("it does not begin like a PNG image")
    kept, header, packed, last = [SIGNATURE], b"", b"", b""
    colours, at = 0, len(SIGNATURE)
    while last != b"IEND":
        length = int.from_bytes(content[at : at + 4], "big")
        chunk = content[at : at + 12 + length]
        name, data = chunk[4:8], chunk[8:-4]
        checksum = int.from_bytes(chunk[-4:], "big")
        if len(chunk) != 12 + length or zlib.crc32(chunk[4:-4]) != checksum:
            raise ValueError("it is truncated or damaged")
        late_palette = name == b"PLTE" and (colours or packed)
        torn_rows = name == b"IDAT" and packed and last != b"IDAT"
        if (name == b"IHDR") != (last == b"") or late_palette or torn_rows:
            raise ValueError("its parts are out of order")
        if name == b"tRNS":
            raise ValueError("it has transparent pixels")
        if name == b"IHDR":
            header = data
        elif name == b"PLTE":
            colours = length // 3
        elif name == b"IDAT":
            packed += data
        elif name != b"IEND" and name[:1].isupper():
            raise ValueError("it has parts that are unknown")
        if name[:1].isupper():
            kept.append(chunk)
        at, last = at + len(chunk), name
    return Png(b"".join(kept), colours, packed, _bytes_of_rows(header, width, height))


def _bytes_of_rows(header: bytes, width: int, height: int) -> int:
    """How many bytes the rows of an image unpack to."""
    if len(header) != 13:
        raise ValueError("it is truncated or damaged")
    found_width, found_height, depth, colour, compression, filters, interlaced = struct.unpack(
        ">IIBBBBB", header
    )
    if (found_width, found_height) != (width, height):
        raise ValueError(f"it has {found_width}×{found_height} pixels, not {width}×{height}")
    if depth == 16:
        raise ValueError("it has 16 bits per channel, not 8")
    if colour not in CHANNELS or compression or filters or interlaced > 1:
        raise ValueError("its pixels are of an unknown type")
    passes = [
        (-(-(width - x) // across), -(-(height - y) // down))
        for x, y, across, down in (ADAM7 if interlaced else WHOLE)
    ]
    return sum(
        rows * (1 + -(-columns * depth * CHANNELS[colour] // 8))
        for columns, rows in passes
        if columns
    )
