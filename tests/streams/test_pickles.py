"""Pickles of CIFAR-100 that are not what they should be are refused, and run nothing."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.streams.cifar_files import (
    Content,
    assert_holds,
    pickled_by_python_2,
    refusal,
    write,
    write_python,
)


def test_pickles_with_too_few_images_or_a_negative_class_are_refused(
    tmp_path: Path, made_up: Content
) -> None:
    planes, labels = made_up["test"]
    write_python(tmp_path, made_up | {"test": (planes[:99], labels[:99])}, 2)
    assert "test has 99 images, and CIFAR-100 has 100 there" in refusal(tmp_path)
    write_python(tmp_path, made_up | {"test": (planes, [-1, *labels[1:]])}, 2)
    assert "class -1" in refusal(tmp_path)


def two_images(data: Any, labels: Any = (1, 2)) -> dict[str, Any]:
    return {"data": data, "fine_labels": list(labels) if isinstance(labels, tuple) else labels}


DATA = np.zeros((2, 3072), np.uint8)
NO_BYTES = "its data are not an array of bytes"
NO_NUMBERS = "its fine_labels are not a number for each image"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1, 2], "it holds no dictionary"),
        ({"fine_labels": [1]}, "it has no data"),
        ({"data": DATA}, "it has no fine_labels"),
        (two_images([1, 2]), NO_BYTES),
        (two_images(np.zeros((2, 3072))), NO_BYTES),
        (two_images(np.zeros((2, 3071), np.uint8)), "its data have the shape (2, 3071)"),
        (two_images(np.zeros((2, 32, 96), np.uint8)), "its data have the shape (2, 32, 96)"),
        (two_images(DATA, [1]), NO_NUMBERS),
        (two_images(DATA, [1, 2.5]), NO_NUMBERS),
        (two_images(DATA, ["1", "2"]), NO_NUMBERS),
        (two_images(DATA, [1, 10**30]), NO_NUMBERS),
        (two_images(DATA, np.arange(2, dtype=np.uint8)), NO_NUMBERS),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, says: str, tmp_path: Path) -> None:
    for protocol in (2, 5):
        write(tmp_path, {part: pickle.dumps(content, protocol) for part in ("train", "test")})
        assert f"{tmp_path}/train is not a pickle of CIFAR-100 ({says})" in refusal(tmp_path)


NO_PICKLES = {
    "empty": b"",
    "garbage": b"garbage",
    "persistent": b"\x80\x02Psome\n.",
    "persistent-binary": b"\x80\x02U\x03me\n\x51.",
    "buffer": b"\x80\x05\x97.",
    "extension": b"\x80\x02\x82\x01.",
    "huge": b"\x80\x04\x8e" + b"\xff" * 8,
    "marks": b"(" * 99,
}


@pytest.mark.parametrize("content", NO_PICKLES.values(), ids=NO_PICKLES)
def test_a_file_that_is_no_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, {"train": content, "test": content})
    assert f"{tmp_path}/train is not a pickle of CIFAR-100" in refusal(tmp_path)


def test_a_truncated_pickle_is_refused_wherever_it_ends(tmp_path: Path, made_up: Content) -> None:
    whole = pickled_by_python_2(*made_up["train"])
    for length in (1, 20, 60, 100, 5000, len(whole) - 700, len(whole) - 1):
        write(tmp_path, {"train": whole[:length], "test": whole})
        assert f"{tmp_path}/train is not a pickle of CIFAR-100" in refusal(tmp_path)


class Call:
    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        self.what, self.arguments = what, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.what, self.arguments


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("what", "name"),
    [(os.system, f"{os.system.__module__}.system"), (exec, ".exec"), (np.load, "numpy.load")],
)
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(
    what: Callable[..., Any], name: str, protocol: int, tmp_path: Path, made_up: Content
) -> None:
    mark = tmp_path / "called"
    command = f"touch {mark}" if what is os.system else f"open({str(mark)!r}, 'w')"
    planes, labels = made_up["train"]
    for content in (
        Call(what, command),
        {"data": planes, "fine_labels": labels, "more": Call(what, command)},
    ):
        write(tmp_path, {"train": pickle.dumps(content, protocol), "test": b""})
        line = refusal(tmp_path)
        assert f"{tmp_path}/train asks for " in line
        assert f"{name}, which is no part of CIFAR-100" in line
    assert not mark.exists()


def test_not_even_the_names_that_are_known_are_called(tmp_path: Path) -> None:
    size = 10**15  # no machine has room for such an array
    made = (
        Call(np.ndarray, (size,)),
        Call(np.dtype, "u1"),
        Call(sys.modules["_codecs"].encode, "text", "no such codec"),
    )
    write(tmp_path, {"train": pickle.dumps({"data": made, "fine_labels": [1]}, 2), "test": b""})
    assert "its data are not an array of bytes" in refusal(tmp_path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_of_images_may_be_of_any_letters(
    protocol: int, tmp_path: Path, made_up: Content
) -> None:
    names = ["plain.png", "größe.png", "back\\slash.png", "図.png", "long" * 500]
    for part, (planes, labels) in made_up.items():
        content = {"filenames": names, "data": planes, "fine_labels": labels}
        write(tmp_path, {part: pickle.dumps(content, protocol)})
    assert_holds(tmp_path, made_up)
