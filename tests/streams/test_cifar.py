"""CIFAR-100 in every form it is published in: the same pool, or a sentence that says what is wrong."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass.errors import InputError
from onepass.streams import cifar
from tests.streams.cifar_files import (
    Content,
    assert_holds,
    pack,
    pickled_by_python_2,
    write,
    write_binary,
    write_images,
    write_python,
)


@pytest.mark.parametrize("place", ["", "cifar100", "cifar-100-binary"])
def test_the_binary_version_is_read_from_a_folder_its_subfolder_or_the_folder_itself(
    place: str, tmp_path: Path, made_up: Content
) -> None:
    write_binary(tmp_path if place == "cifar-100-binary" else tmp_path / place, made_up)
    assert_holds(tmp_path / place if place == "cifar-100-binary" else tmp_path, made_up)


@pytest.mark.parametrize("protocol", [None, *range(pickle.HIGHEST_PROTOCOL + 1)])
def test_the_python_version_is_read_whoever_pickled_it(
    protocol: int | None, tmp_path: Path, made_up: Content
) -> None:
    write_python(tmp_path, made_up, protocol)
    assert_holds(tmp_path, made_up)
    assert_holds(tmp_path / "cifar-100-python", made_up)


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_pickled_column_by_column_is_the_same_array(
    protocol: int, tmp_path: Path, made_up: Content
) -> None:
    write_python(
        tmp_path,
        {part: (np.asfortranarray(planes), labels) for part, (planes, labels) in made_up.items()},
        protocol,
    )
    assert_holds(tmp_path, made_up)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_an_archive_is_read_without_being_unpacked(
    form: str, tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_binary(tmp_path, made_up) if form == "binary" else write_python(tmp_path, made_up, None)
    pack(tmp_path, form, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    assert_holds(tmp_path, made_up)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["", "cifar100"])
@pytest.mark.parametrize("name", [str, "class-{:02}".format], ids=["numbers", "names"])
def test_a_folder_of_images_has_its_classes_in_the_order_of_their_names(
    place: str, name: Callable[[int], str], tmp_path: Path, made_up: Content
) -> None:
    write_images(tmp_path / place, made_up, name)
    assert_holds(tmp_path, made_up)


def test_images_that_are_not_in_rgb_are_converted(tmp_path: Path, made_up: Content) -> None:
    grey = {
        part: (np.tile(planes[:, :1024], 3), labels) for part, (planes, labels) in made_up.items()
    }
    write_images(tmp_path, grey)
    image = pytest.importorskip("PIL.Image")
    for path in tmp_path.rglob("*.png"):
        image.open(path).convert("L").save(path)
    assert_holds(tmp_path, grey)


def test_the_labels_are_the_fine_ones_and_images_keep_their_order(
    tmp_path: Path, made_up: Content
) -> None:
    order = np.random.default_rng(1).permutation(200)
    planes, labels = made_up["train"]
    shuffled = made_up | {"train": (planes[order], [labels[i] for i in order])}
    write_binary(tmp_path, shuffled)
    assert_holds(tmp_path, shuffled)


def test_a_pixel_has_its_channels_side_by_side(tmp_path: Path, made_up: Content) -> None:
    red, green, blue = 5 * 32 + 7, 1024 + 5 * 32 + 7, 2048 + 5 * 32 + 7
    made_up["train"][0][3, [red, green, blue]] = 200, 100, 50
    write_binary(tmp_path, made_up)
    stream = cifar.SplitCifar(cifar.Options(), str(tmp_path))
    assert stream.pool.shape == (32, 32, 3)
    assert stream.pool.x[3].view(32, 32, 3)[5, 7].tolist() == [200, 100, 50]


def test_what_is_unpacked_is_preferred_to_an_archive_and_images_come_last(
    tmp_path: Path, made_up: Content
) -> None:
    write(tmp_path, {"cifar-100-binary.tar.gz": b"", "cifar-100-python.tar.gz": b""})
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / "cifar-100-binary.tar.gz", "binary")
    write_python(tmp_path, made_up, 4)
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / "cifar-100-python", "python")
    write_binary(tmp_path, made_up)
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / "cifar-100-binary", "binary")
    write_binary(tmp_path / "cifar100", made_up)
    assert cifar.find(tmp_path) == cifar.Source(
        tmp_path / "cifar100" / "cifar-100-binary", "binary"
    )


def refusal(folder: Path) -> str:
    """The one sentence with which a folder is refused."""
    with pytest.raises(InputError) as refused:
        cifar.read(folder)
    (line,) = str(refused.value).splitlines()
    return line


def test_a_folder_without_cifar_is_refused_with_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary", {"train.bin": b""})
    assert f"no CIFAR-100 in {tmp_path}" in refusal(tmp_path)
    assert cifar.find(tmp_path / "nowhere") is None
    with pytest.raises(InputError, match="onepass data get cifar100"):
        cifar.SplitCifar(cifar.Options(), None)


@pytest.mark.parametrize(
    "harm",
    [lambda content: content[:-1], lambda content: content + b"\0", lambda _: b""],
    ids=["short", "long", "empty"],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_binary_file_of_another_length_is_refused_by_its_name(
    harm: Callable[[bytes], bytes], part: str, tmp_path: Path, made_up: Content
) -> None:
    write_binary(tmp_path, made_up)
    path = tmp_path / "cifar-100-binary" / f"{part}.bin"
    path.write_bytes(harm(path.read_bytes()))
    assert (
        f"{path} has {path.stat().st_size} bytes, and CIFAR-100 has {100 * cifar.EACH[part]} records of 3074"
        in refusal(tmp_path)
    )


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize(
    ("label", "says"),
    [
        (100, "class 100, and CIFAR-100 has classes 0 to 99"),
        (8, "1 images of class 7, and CIFAR-100 has 2 of each"),
    ],
)
def test_labels_that_are_not_those_of_cifar_are_refused(
    form: str, label: int, says: str, tmp_path: Path, made_up: Content
) -> None:
    made_up["train"][1][15] = label
    write_binary(tmp_path, made_up) if form == "binary" else write_python(tmp_path, made_up, 2)
    line = refusal(tmp_path)
    assert says in line
    assert str(tmp_path / f"cifar-100-{form}" / "train") in line


def test_pickles_with_too_few_images_or_a_negative_class_are_refused(
    tmp_path: Path, made_up: Content
) -> None:
    planes, labels = made_up["test"]
    write_python(tmp_path, made_up | {"test": (planes[:99], labels[:99])}, 2)
    assert "test has 99 images, and CIFAR-100 has 100 there" in refusal(tmp_path)
    write_python(tmp_path, made_up | {"test": (planes, [-1, *labels[1:]])}, 2)
    assert "class -1" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1, 2], "it holds no dictionary"),
        ({"fine_labels": [1]}, "it has no data"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "it has no fine_labels"),
        ({"data": [1, 2], "fine_labels": [1, 2]}, "its data are not an array of bytes"),
        (
            {"data": np.zeros((2, 3072)), "fine_labels": [1, 2]},
            "its data are not an array of bytes",
        ),
        (
            {"data": np.zeros((2, 3071), np.uint8), "fine_labels": [1, 2]},
            "its data have the shape (2, 3071)",
        ),
        (
            {"data": np.zeros((2, 32, 96), np.uint8), "fine_labels": [1, 2]},
            "its data have the shape (2, 32, 96)",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1]},
            "its fine_labels are not a number for each image",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2.5]},
            "its fine_labels are not a number for each image",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": ["1", "2"]},
            "its fine_labels are not a number for each image",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 10**30]},
            "its fine_labels are not a number for each image",
        ),
        (
            {"data": np.zeros((2, 3072), np.uint8), "fine_labels": np.arange(2, dtype=np.uint8)},
            "its fine_labels are not a number for each image",
        ),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, says: str, tmp_path: Path) -> None:
    for protocol in (2, 5):
        write(tmp_path, {part: pickle.dumps(content, protocol) for part in ("train", "test")})
        assert f"{tmp_path}/train is not a pickle of CIFAR-100 ({says})" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x80\x02Psome\n.",
        b"\x80\x02U\x03me\n\x51.",
        b"\x80\x05\x97.",
        b"\x80\x02\x82\x01.",
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"(" * 99,
    ],
    ids=[
        "empty",
        "garbage",
        "persistent",
        "persistent-binary",
        "buffer",
        "extension",
        "huge",
        "marks",
    ],
)
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
    size = 10**15  # nobody has room for such an array
    made = (
        Call(np.ndarray, (size,)),
        Call(np.dtype, "u1"),
        Call(sys.modules["_codecs"].encode, "text", "no such codec"),
    )
    write(tmp_path, {"train": pickle.dumps({"data": made, "fine_labels": [1]}, 2), "test": b""})
    assert "its data are not an array of bytes" in refusal(tmp_path)


def test_an_altered_archive_is_refused_by_its_checksum(
    tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_binary(tmp_path, made_up)
    path = pack(tmp_path, "binary", monkeypatch)
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} is truncated or altered (its checksum is wrong)" in refusal(tmp_path)


def test_an_archive_that_lacks_a_file_is_refused(
    tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_binary(tmp_path, made_up)
    (tmp_path / "cifar-100-binary" / "test.bin").unlink()
    path = pack(tmp_path, "binary", monkeypatch)
    assert f"{path} lacks cifar-100-binary/test.bin" in refusal(tmp_path)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_binary(tmp_path, made_up)

    def forbidden(self: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", forbidden)
    assert f"{tmp_path}/cifar-100-binary/train.bin cannot be read (Permission denied)" in refusal(
        tmp_path
    )


def test_images_of_too_few_classes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train" / "apple").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    assert f"{tmp_path}/train has 1 folders, and CIFAR-100 has 100 classes" in refusal(tmp_path)


def test_images_whose_classes_differ_between_the_parts_are_refused(
    tmp_path: Path, made_up: Content
) -> None:
    write_images(tmp_path, made_up)
    (tmp_path / "test" / "7").rename(tmp_path / "test" / "seven")
    assert f"{tmp_path}/train and {tmp_path}/test do not have the same folders" in refusal(tmp_path)


def test_a_class_with_an_image_too_many_or_too_few_is_refused(
    tmp_path: Path, made_up: Content
) -> None:
    write_images(tmp_path, made_up)
    image = next((tmp_path / "train" / "7").iterdir())
    moved = image.rename(tmp_path / "train" / "9" / "another.png")
    assert "train has 1 images of class 7, and CIFAR-100 has 2 of each there" in refusal(tmp_path)
    moved.unlink()
    assert "train has 199 images, and CIFAR-100 has 200 there" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not an image of CIFAR-100 (it does not begin like a PNG image)"),
        (b"\x89PNG\r\n\x1a\nand so on", "is not an image of CIFAR-100 (it is truncated"),
        (None, "is not an image of CIFAR-100 (it has 8×16 pixels, not 32×32)"),
    ],
)
def test_an_image_that_is_not_one_of_cifar_is_refused_by_its_name(
    content: bytes | None, says: str, tmp_path: Path, made_up: Content
) -> None:
    write_images(tmp_path, made_up)
    path = sorted((tmp_path / "test" / "42").iterdir())[0]
    if content is None:
        small = BytesIO()
        pytest.importorskip("PIL.Image").new("RGB", (8, 16)).save(small, "PNG")
        content = small.getvalue()
    path.write_bytes(content)
    assert f"{path} {says}" in refusal(tmp_path)


def test_images_without_pillow_are_refused_with_a_sentence(
    tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, made_up)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "install it with 'pip install onepass[images]'" in refusal(tmp_path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_of_images_may_be_of_any_letters(
    protocol: int, tmp_path: Path, made_up: Content
) -> None:
    names = ["plain.png", "größe.png", "back\\slash.png", "図.png", "long" * 500]
    for part, (planes, labels) in made_up.items():
        write(
            tmp_path,
            {
                part: pickle.dumps(
                    {"filenames": names, "data": planes, "fine_labels": labels}, protocol
                )
            },
        )
    assert_holds(tmp_path, made_up)
