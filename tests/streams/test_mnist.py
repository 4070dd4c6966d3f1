"""Permuted MNIST: its size, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepass.engine.slots import Slots
from onepass.errors import InputError
from onepass.streams import STREAMS, mnist


def test_the_network_for_mnist_has_an_input_per_pixel_and_an_output_per_digit() -> None:
    entry = STREAMS["permuted-mnist"]
    assert entry.kind.shape == (28 * 28,)
    assert Slots(entry.heads("ev", entry.options())).count == 10


def test_a_folder_without_mnist_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no MNIST"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))


def test_an_altered_file_is_refused_by_its_checksum(tmp_path: Path) -> None:
    for name in mnist.FILES:
        (tmp_path / f"{name}.gz").write_bytes(b"not it")
    with pytest.raises(InputError, match="checksum"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))
