"""What stands for other machines in tests of studies."""

from __future__ import annotations

import fcntl

import pytest


@pytest.fixture
def locks_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
