"""A saved learner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.saved_learners import content_of_a_file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(content_of_a_file())
    return tmp_path / "file"
