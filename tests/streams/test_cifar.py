"""CIFAR-100 in every form it is published in: the same pool, or a sentence about what is wrong."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass.errors import InputError
from onepass.streams import cifar, split_cifar
from tests.streams.cifar_files import (
    Content,
    assert_holds,
    pack,
    refusal,
    write,
    write_binary,
    write_images,
    write_python,
)


@pytest.mark.parametrize("place", ["", "cifar100", "cifar-100-binary"])
def test_the_binary_version_is_read_from_a_folder_its_subfolder_or_the_folder_itself(
    place: str, tmp_path: Path, made_up: Content
) -> None:
    itself = place == "cifar-100-binary"
    write_binary(tmp_path if itself else tmp_path / place, made_up)
    assert_holds(tmp_path / place if itself else tmp_path, made_up)


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
    by_columns = {
        part: (np.asfortranarray(planes), labels) for part, (planes, labels) in made_up.items()
    }
    write_python(tmp_path, by_columns, protocol)
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
    x, _, _ = cifar.read(tmp_path)
    assert x[3].reshape(32, 32, 3)[5, 7].tolist() == [200, 100, 50]


def test_what_is_unpacked_is_preferred_to_an_archive_and_images_come_last(
    tmp_path: Path, made_up: Content
) -> None:
    write(tmp_path, {"cifar-100-binary.tar.gz": b"", "cifar-100-python.tar.gz": b""})
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    binary, python = "cifar-100-binary", "cifar-100-python"
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / f"{binary}.tar.gz", "binary")
    write_python(tmp_path, made_up, 4)
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / python, "python")
    write_binary(tmp_path, made_up)
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / binary, "binary")
    write_binary(tmp_path / "cifar100", made_up)
    assert cifar.find(tmp_path) == cifar.Source(tmp_path / "cifar100" / binary, "binary")


def test_a_folder_without_cifar_is_refused_with_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary", {"train.bin": b""})
    assert f"no CIFAR-100 in {tmp_path}" in refusal(tmp_path)
    assert cifar.find(tmp_path / "nowhere") is None
    with pytest.raises(InputError, match="onepass data get cifar100"):
        split_cifar.SplitCifar(split_cifar.Options(), None)


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
    size, records = path.stat().st_size, 100 * cifar.EACH[part]
    says = f"{path} has {size} bytes, and CIFAR-100 has {records} records of 3074"
    assert says in refusal(tmp_path)


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
    path = tmp_path / "cifar-100-binary" / "train.bin"
    assert f"{path} cannot be read (Permission denied)" in refusal(tmp_path)


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
        (b"", "it does not begin like a PNG image)"),
        (b"\x89PNG\r\n\x1a\nand so on", "it is truncated"),
        (None, "it has 8×16 pixels, not 32×32)"),
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
    assert f"{path} is not an image of CIFAR-100 ({says}" in refusal(tmp_path)


def test_images_without_pillow_are_refused_with_a_sentence(
    tmp_path: Path, made_up: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, made_up)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "install it with 'pip install onepass[images]'" in refusal(tmp_path)
