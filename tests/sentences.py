"""What is refused is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onepass.errors import InputError


def refusal_of(call: Callable[[], object]) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(InputError) as refused:
        call()
    (line,) = str(refused.value).splitlines()
    return line
