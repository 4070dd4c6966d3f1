"""A small CIFAR-100."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onepass.streams import cifar
from tests.streams.cifar_files import Content, write_binary


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Content:
    """Two training images and a test image of each class, which is all that CIFAR-100 has now."""
    monkeypatch.setitem(cifar.EACH, "train", 2)
    monkeypatch.setitem(cifar.EACH, "test", 1)
    random = np.random.default_rng(0)
    made = {}
    for part, each in cifar.EACH.items():
        labels = [label for label in range(100) for _ in range(each)]
        made[part] = random.integers(0, 256, (len(labels), 3072), np.uint8), labels
    return made


@pytest.fixture
def folder(tmp_path: Path, made_up: Content) -> str:
    write_binary(tmp_path, made_up)
    return str(tmp_path)
