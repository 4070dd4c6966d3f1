"""Our kernels with other tiles, the fastest first, and the tile that is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from unittest.mock import patch

import torch

from kernel_layers import EPS, images, microseconds
from onepass.engine.gpu import convolution
from onepass.engine.gpu import norm as norms
from onepass.engine.gpu.convolution import convolve, convolve_inputs, convolve_weights
from onepass.engine.gpu.norm import norm, norm_backward
from onepass.engine.precision import products
from onepass.errors import first_line

Tried = tuple[float, tuple[int, ...], bool]  # µs, the numbers of the tile, and whether it is used


def tuned(count: int, device: torch.device) -> Iterator[str]:
    """For every kind of kernel and some layers the fastest tiles."""
    yield f"{count} images"
    for channels, size in ((20, 32), (40, 16), (80, 8), (160, 4)):
        yield from convolutions(count, channels, size, device)
    for channels, size in ((20, 32), (40, 16), (80, 8), (160, 4)):
        for adds in (False, True) if channels == 20 else (False,):
            name = f"norm and back, {channels}, {size}×{size}" + (", sum" if adds else "")
            yield from best(name, normalisations(count, channels, size, adds, device))


def tiles(count: int, channels: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The tiles to try, and those of gradients by the weights."""
    many = count > 100
    widths = [w for w in (16, 32, 64, 128) if w < 2 * channels and (many or w < 64)]
    if many:
        rows = product((64, 128, 256), (32, 64), widths, (4, 8), (1, 3))
        by_weights = product((32, 64, 128), (64, 128), widths, (4, 8), (1, 2))
    else:
        rows = product((32, 64), (64, 128), widths, (4,), (1, 3))
        by_weights = product((32, 64), (64,), widths, (4, 8), (1, 2))
    return list(rows), list(by_weights)


def convolutions(count: int, channels: int, size: int, device: torch.device) -> Iterator[str]:
    x = images(device, count, channels, size, size)
    w = images(device, channels, channels, 3, 3)
    y = images(device, count, 2 * channels, size // 2, size // 2)
    v = images(device, 2 * channels, channels, 3, 3)
    all_tiles, weight_tiles = tiles(count, channels)
    few_tiles = [
        tile
        for tile in all_tiles
        if tile[0] in (64, 128) and tile[1] in (32, 64) and tile[3:] in ((8, 1), (4, 3), (4, 1))
    ]
    kinds: dict[str, tuple[str, Callable[[], object], list[tuple[int, ...]]]] = {
        "convolution": ("tile", lambda: convolve(x, w, 1, 1), all_tiles),
        "by weights": ("weight_tile", lambda: convolve_weights(x, x, 3, 1, 1), weight_tiles),
    }
    if channels < 160:

        def by_inputs() -> object:
            return convolve_inputs(y, v, 2, 1, size, size)

        kinds["by inputs, stride 2"] = ("tile", by_inputs, few_tiles)
    for kind, (name, call, shapes) in kinds.items():
        found: list[Tried] = []
        used = getattr(convolution, name)(channels, count * size * size)
        for shape in shapes:
            tile = convolution.Tile(*shape)
            tried = patch.object(convolution, name, lambda *_, tile=tile: tile)
            with tried, products(device, tf32=True):
                try:
                    found.append((microseconds(call, device), tuple(tile), tile == used))
                except Exception as reason:  # more shared memory than there is
                    yield f"{kind}, {channels}: {tuple(tile)} fails: {first_line(reason)}"
        yield from best(f"{kind}, {channels} → {channels}, {size}×{size}", found)


def normalisations(
    count: int, channels: int, size: int, adds: bool, device: torch.device
) -> list[Tried]:
    x, s, g = (images(device, count, channels, size, size) for _ in range(3))
    w, b, mean, inverse = torch.rand(4, channels, device=device)

    def forward() -> object:
        return norm(x, w, b, s if adds else None, None, None, 0.1, EPS, True)

    def backward() -> object:
        return norm_backward(g, None, x, w, b, mean, inverse, g if adds else None, True, adds)

    found: list[Tried] = []
    used = norms.TILE, norms.WARPS, norms.MOST, norms.WIDE
    for tile in product((2048, 4096, 8192), (4, 8), (264, 528), (16, 32, 64, 128)):
        numbers, warps, most, wide = tile
        if wide >= 4 * channels or (wide == 16 and channels > 40):
            continue
        with patch.multiple(norms, TILE=numbers, WARPS=warps, MOST=most, WIDE=wide):
            norms._Plan.cache_clear()  # type: ignore[attr-defined]
            µs = microseconds(forward, device) + microseconds(backward, device)
            found.append((µs, tile, tile == used))
    norms._Plan.cache_clear()  # type: ignore[attr-defined]
    return found


def best(name: str, found: Sequence[Tried]) -> Iterator[str]:
    for place, (µs, tile, used) in enumerate(sorted(found)):
        if place < 5 or used:
            yield f"{name}: {tile} {µs:.1f}{' (used)' if used else ''}"
