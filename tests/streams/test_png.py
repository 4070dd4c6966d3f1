"""Images as PNG: every pixel is right, or the image is refused by a sentence."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onepass.errors import InputError
from onepass.streams import cifar
from onepass.streams.png import ADAM7, SIGNATURE
from tests.sentences import refusal_of
from tests.streams.png_files import chunk, header, png, rows

pytest.importorskip("PIL.Image")
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
PIXELS[-3:] = 0  # black where rows may be missing


def read(folder: Path, content: bytes) -> NDArray[np.uint8]:
    (folder / "image.png").write_bytes(content)
    return cifar._image(folder / "image.png").reshape(32, 32, 3)


def refusal(folder: Path, content: bytes) -> str:
    line = refusal_of(lambda: read(folder, content))
    assert line.startswith(f"{folder / 'image.png'} is not an image of CIFAR-100 (")
    return line


def test_all_pixels_are_read_also_of_black_rows(tmp_path: Path) -> None:
    assert np.array_equal(read(tmp_path, png(header(), rows(PIXELS))), PIXELS)


@pytest.mark.parametrize("count", [0, 1, 16, 31])
def test_an_image_with_too_few_rows_is_refused(count: int, tmp_path: Path) -> None:
    assert refusal(tmp_path, png(header(), rows(PIXELS[:count])))
    assert refusal(tmp_path, png(header(), rows(PIXELS)[:-1]))


def test_an_image_with_too_many_rows_is_refused_or_right(tmp_path: Path) -> None:
    assert "more rows" in refusal(tmp_path, png(header(), rows(PIXELS) + b"\0"))
    assert np.array_equal(read(tmp_path, png(header(), rows(PIXELS[::-1]) + b"\0")), PIXELS[::-1])


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_numbers_of_16_bits_are_refused(colour: int, channels: int, tmp_path: Path) -> None:
    content = png(header(16, colour), rows(np.full((32, 64 * channels), 3, np.uint8)))
    assert "it has 16 bits per channel, not 8" in refusal(tmp_path, content)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_grey_of_fewer_bits_is_read(depth: int, tmp_path: Path) -> None:
    levels = np.random.default_rng(1).integers(0, 2**depth, (32, 32), np.uint8)
    bits = (levels[:, :, None] >> np.arange(depth - 1, -1, -1, dtype=np.uint8)) & 1
    content = png(header(depth, 0), rows(np.packbits(bits.reshape(32, -1), axis=1)))
    grey = levels * (255 // (2**depth - 1))
    assert np.array_equal(read(tmp_path, content), np.repeat(grey[:, :, None], 3, 2))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_colours_of_a_palette_are_read_and_one_that_it_lacks_is_refused(
    depth: int, tmp_path: Path
) -> None:
    palette = np.random.default_rng(2).integers(0, 256, (2**depth, 3), np.uint8)
    indices = np.random.default_rng(3).integers(0, 2**depth, (32, 32), np.uint8)
    indices[0, 0] = 2**depth - 1
    bits = (indices[:, :, None] >> np.arange(depth - 1, -1, -1, dtype=np.uint8)) & 1
    start, unpacked = header(depth, 3), rows(np.packbits(bits.reshape(32, -1), axis=1))
    whole, short = (chunk(b"PLTE", some.tobytes()) for some in (palette, palette[:-1]))
    assert np.array_equal(read(tmp_path, png(start, unpacked, whole)), palette[indices])
    assert "its palette lacks a colour" in refusal(tmp_path, png(start, unpacked, short))
    assert "its palette lacks a colour" in refusal(tmp_path, png(start, unpacked))


@pytest.mark.parametrize(("colour", "pixels"), [(4, PIXELS[:, :, :1]), (6, PIXELS)])
def test_an_alpha_channel_is_read_where_nothing_is_transparent(
    colour: int, pixels: NDArray[np.uint8], tmp_path: Path
) -> None:
    opaque = np.concatenate([pixels, np.full((32, 32, 1), 255, np.uint8)], 2)
    found = read(tmp_path, png(header(8, colour), rows(opaque)))
    assert np.array_equal(found, np.broadcast_to(pixels, (32, 32, 3)))
    opaque[7, 8, -1] = 254
    assert "it has transparent pixels" in refusal(tmp_path, png(header(8, colour), rows(opaque)))


def test_a_transparent_colour_is_refused(tmp_path: Path) -> None:
    content = png(header(), rows(PIXELS), chunk(b"tRNS", bytes(6)))
    assert "it has transparent pixels" in refusal(tmp_path, content)


def test_interlaced_images_are_read_and_their_missing_rows_noticed(tmp_path: Path) -> None:
    for pixels in (PIXELS, PIXELS[::-1]):
        unpacked = b"".join(
            rows(np.ascontiguousarray(pixels[y::down, x::across])) for x, y, across, down in ADAM7
        )
        assert np.array_equal(read(tmp_path, png(header(interlaced=1), unpacked)), pixels)
    for left in range(1, 16):
        assert refusal(tmp_path, png(header(interlaced=1), unpacked[: -97 * left]))


def test_what_is_no_pixel_is_left_out_and_an_animation_is_its_first_image(tmp_path: Path) -> None:
    animated = (
        chunk(b"acTL", struct.pack(">II", 2, 0)),
        chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 8, 8, 4, 4, 1, 1, 0, 0)),
    )
    frame = chunk(b"fdAT", struct.pack(">I", 1) + zlib.compress(rows(PIXELS[:8, :8])))
    content = png(header(), rows(PIXELS), *animated, after=frame)
    assert np.array_equal(read(tmp_path, content), PIXELS)


def test_parts_out_of_order_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    whole = png(header(), rows(PIXELS))
    pixels = zlib.compress(rows(PIXELS))
    one, other = chunk(b"IDAT", pixels[:50]), chunk(b"IDAT", pixels[50:])
    end, palette = chunk(b"IEND", b""), chunk(b"PLTE", bytes(768))
    for content in (
        SIGNATURE + end,
        SIGNATURE + header() + end,
        SIGNATURE + header() + one + chunk(b"tEXt", b"a\0b") + other + end,
        png(header() * 2, rows(PIXELS)),
        png(header(colour=3), rows(PIXELS[:, :, 0]), palette, palette),
        png(header(), rows(PIXELS), chunk(b"ABcD", b"")),
        png(header(colour=5), rows(PIXELS)),
        png(header(interlaced=2), rows(PIXELS)),
        png(header(depth=3, colour=0), rows(PIXELS)),
        png(header(size=(2**31 - 1, 2**31 - 1)), rows(PIXELS)),
        png(chunk(b"IHDR", b"short"), rows(PIXELS)),
        png(header(), b"\x07".join(rows(PIXELS).split(b"\0"))),
        whole[:-1],
        whole[:40],
        whole.replace(b"IDAT", b"IDAX"),
        whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
    ):
        assert refusal(tmp_path, content)
    assert np.array_equal(read(tmp_path, SIGNATURE + header() + one + other + end), PIXELS)


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 2**40)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(InputError, match=f"{path} is not an image of CIFAR-100"):
            cifar._image(path)
