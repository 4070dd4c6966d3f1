"""Calls that fail as those of the operating system do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def failing(code: int) -> Callable[..., Any]:
    """What can stand for any call, and fails with this error number."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail
