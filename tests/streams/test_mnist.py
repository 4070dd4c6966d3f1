"""Permuted MNIST: its size, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.streams import STREAMS, mnist


def test_the_network_for_mnist_has_a_pixel_an_input_and_a_digit_an_output() -> None:
    assert (STREAMS["permuted-mnist"].inputs, STREAMS["permuted-mnist"].outputs) == (28 * 28, 10)


def test_a_folder_without_mnist_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no MNIST"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))


def test_an_altered_file_is_refused_by_its_checksum(tmp_path: Path) -> None:
    for name in mnist.FILES:
        (tmp_path / f"{name}.gz").write_bytes(b"not it")
    with pytest.raises(InputError, match="checksum"):
        mnist.PermutedMnist(mnist.Options(), str(tmp_path))
