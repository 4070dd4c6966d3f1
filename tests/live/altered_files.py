"""Files that were altered, and the sentences with which they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from onepass import InputError, OnePass
from tests.live.attacks import content_of, put_together, same, shape_of, taken_apart
from tests.live.saved_learners import MIDDLE, Case

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def refusal(content: bytes, case: Case, here: Path, **given: Any) -> str:
    """The sentence with which a file is refused, which must leave the module and the optimizer alone."""
    path, module = here / "file", case.build()
    path.write_bytes(content)
    given = case.given(module) | given
    before = shape_of(module, given.get("optimizer"))
    with pytest.raises(InputError) as caught:
        OnePass.load(path, module, **given)
    assert same(before, shape_of(module, given.get("optimizer")))
    assert list(here.iterdir()) == [path]
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert 15 < len(sentence) < 1000
    return sentence


def changed(name: str, change: Change, stop: int = MIDDLE) -> bytes:
    about, tensors = taken_apart(content_of(name, stop))
    change(about, tensors)
    return put_together(about, tensors)


def setting(place: str, value: Any) -> Change:
    def change(about: dict[str, Any], _: object) -> None:
        *path, key = place.split("/")
        holder: Any = about
        for part in path:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        holder[int(key) if isinstance(holder, list) else key] = value

    return change
