"""CIFAR-100 in any form it is published in: binary, Python's pickles, archives, or images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import file_digest
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onepass.errors import InputError, first_line
from onepass.streams import archives, pickles, png

Form = Literal["binary", "python", "images"]
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # [N, pixels, 3] and the class of each

CLASSES, SIDE = 100, 32
PIXELS = SIDE * SIDE
EACH = {"train": 500, "test": 100}  # images of a class
SUFFIX: dict[Form, str] = {"binary": ".bin", "python": ""}
ARCHIVES: dict[str, str] = {  # as published, by MD5
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
LARGEST_IMAGE = 2**20  # bytes of a file, which has a few thousand
OPERATIONS = 16  # of a pickle for each image: a name and two labels take up to eight
ANEW = "delete it and fetch it anew with 'onepass data get cifar100'"


@dataclass(frozen=True)
class Source:
    """Where CIFAR-100 lies: a published archive, or the folder that has `train` and `test`."""

    path: Path
    form: Form

    @property
    def is_archive(self) -> bool:
        return self.path.name in ARCHIVES

    def missing(self) -> list[str]:
        """What is not there of it."""
        if self.is_archive:
            return [] if self.path.is_file() else [str(self.path)]
        parts = [self.path / f"{part}{SUFFIX.get(self.form, '')}" for part in EACH]
        is_there = Path.is_dir if self.form == "images" else Path.is_file
        return [str(part) for part in parts if not is_there(part)]


def find(folder: Path) -> Source | None:
    """CIFAR-100 in a folder or in its subfolder `cifar100`; None if it is not there."""
    return next((source for source in _sources(folder) if not source.missing()), None)


def missing(folder: Path) -> list[str]:
    """The part that a folder lacks although it has the other one."""
    for source in _sources(folder):
        lacking = source.missing()
        if len(lacking) == 1 and not source.is_archive and not _is_of_others(source):
            return lacking
    return []


def _is_of_others(source: Source) -> bool:
    """Whether `train` and `test` are folders of another data set, which may have the same names."""
    if source.form != "images":
        return False
    there = _folders_in(source.path / "train") or _folders_in(source.path / "test")
    return len(there) != CLASSES


def _sources(folder: Path) -> Iterator[Source]:
    """Where to look, in this order.

    Images come last: they take longest, and other data sets have such folders.
    """
    for place in (folder / "cifar100", folder):
        yield from (
            Source(inner, form) for form in SUFFIX for inner in (place / f"cifar-100-{form}", place)
        )
        yield from (Source(place / f"cifar-100-{form}.tar.gz", form) for form in SUFFIX)
        yield Source(place, "images")


def read(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """All images `[60000, 3072]`, their classes, and how many of them are for training.

    Training images come first, and the channels of a pixel lie side by side.
    """
    try:
        source = find(folder)
    except OSError as reason:
        why = reason.strerror or first_line(reason)
        raise InputError(f"{folder} cannot be read ({why}): name another folder") from None
    if source is None:
        raise InputError(
            f"there is no CIFAR-100 in {folder}: fetch it with 'onepass data get cifar100'"
        )
    training, tests = (CLASSES * each for each in EACH.values())
    x = np.empty((training + tests, PIXELS, 3), np.uint8)
    classes = np.empty(training + tests, np.int64)
    try:
        for part, (images, labels) in _parts(source):
            rows = slice(training) if part == "train" else slice(training, None)
            classes[rows] = labels
            for channel in range(3):  # seven times as fast as all at once, for planes of channels
                x[rows, :, channel] = images[:, :, channel]
    except OSError as reason:
        where, why = reason.filename or source.path, reason.strerror or first_line(reason)
        raise InputError(f"{where} cannot be read ({why}): {ANEW}") from None
    return x.reshape(len(x), -1), classes, training


def _parts(source: Source) -> Iterator[tuple[str, Images]]:
    if source.form == "images":
        yield from _folders(source.path)
        return
    for part, where, content in _archived(source) if source.is_archive else _unpacked(source):
        yield part, (_records if source.form == "binary" else _pickled)(content, part, where)


def _unpacked(source: Source) -> Iterator[tuple[str, str, bytes]]:
    for part in EACH:
        path = source.path / f"{part}{SUFFIX[source.form]}"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(size, part, source.form, str(path))
            yield part, str(path), file.read(size)


def _archived(source: Source) -> Iterator[tuple[str, str, bytes]]:
    missing = {f"cifar-100-{source.form}/{part}{SUFFIX[source.form]}": part for part in EACH}
    most = sum(_most_bytes(part) for part in EACH)
    with source.path.open("rb") as packed:
        size = os.fstat(packed.fileno()).st_size
        if size > most:
            raise InputError(
                f"{source.path} has {size} bytes, and CIFAR-100 has at most {most} there: {ANEW}"
            )
        if file_digest(packed, "md5").hexdigest() != ARCHIVES[source.path.name]:
            wrong = "is truncated or altered (its checksum is wrong)"
            raise InputError(f"{source.path} {wrong}: {ANEW}")
    try:
        for name, content in archives.members(source.path, missing, most):
            part, where = missing.pop(name), f"{name} in {source.path}"
            _check_size(len(content), part, source.form, where)
            yield part, where, content
    except archives.DamagedError as reason:
        why = first_line(reason)
        raise InputError(f"{source.path} cannot be unpacked ({why}): {ANEW}") from None
    if missing:
        raise InputError(f"{source.path} lacks {' and '.join(missing)}: {ANEW}")


def _most_bytes(part: str) -> int:
    """Return more bytes than any form of a part takes.

    Bytes written as text take one and a half times their room, and an image has a name and labels.
    """
    return CLASSES * EACH[part] * (2 * 3 * PIXELS + 256) + 2**16


def _check_size(size: int, part: str, form: Form, where: str) -> None:
    """Raise before anything is read if a file is too large; a binary one has exactly one size."""
    count, record = CLASSES * EACH[part], 2 + 3 * PIXELS
    expected = None
    if form == "binary" and size != count * record:
        expected = f"{count} records of {record}"
    elif size > _most_bytes(part):
        expected = f"at most {_most_bytes(part)}"
    if expected is not None:
        raise InputError(f"{where} has {size} bytes, and CIFAR-100 has {expected} there: {ANEW}")


def _records(content: bytes, part: str, where: str) -> Images:
    """The binary version: for each image a coarse label, a fine one, and planes of its colours."""
    records = np.frombuffer(content, np.uint8).reshape(CLASSES * EACH[part], 2 + 3 * PIXELS)
    return _of_planes(records[:, 2:]), _checked(records[:, 1].astype(np.int64), part, where)


def _pickled(content: bytes, part: str, where: str) -> Images:
    """The Python version: a dictionary with `data`, an array of planes, and `fine_labels`."""
    try:
        found = pickles.load(content, most=OPERATIONS * CLASSES * EACH[part] + 1000)
        if not isinstance(found, dict):
            raise ValueError("it holds no dictionary")
        planes = pickles.array_of_bytes(_entry(found, "data"))
        labels = _entry(found, "fine_labels")
        if planes is None:
            raise ValueError("its data are not an array of bytes")
        if planes.ndim != 2 or planes.shape[1] != 3 * PIXELS:
            raise ValueError(f"its data have the shape {planes.shape}")
        counted = isinstance(labels, list | tuple) and len(labels) == len(planes)
        if not counted or set(map(type, labels)) != {int}:
            raise ValueError("its fine_labels are not a number for each image")
        numbers = np.array(labels)
        if numbers.dtype.kind != "i":
            raise ValueError("its fine_labels are not a number for each image")
    except pickles.ForeignNameError as asked:
        raise InputError(
            f"{where} asks for {asked},"
            f" which is no part of CIFAR-100, and was not read further: {ANEW}"
        ) from None
    except ValueError as reason:
        why = first_line(reason)
        raise InputError(f"{where} is not a pickle of CIFAR-100 ({why}): {ANEW}") from None
    return _of_planes(planes), _checked(numbers.astype(np.int64), part, where)


def _entry(content: dict[Any, Any], key: str) -> Any:
    found = content.get(key, content.get(key.encode()))  # what was text in Python 2 is bytes
    if found is None:
        raise ValueError(f"it has no {key}")
    return found


def _of_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return planes.reshape(len(planes), 3, PIXELS).transpose(0, 2, 1)


def _folders(place: Path) -> Iterator[tuple[str, Images]]:
    """A folder of images for each class, in `train` and in `test`.

    The order of their names is that of the classes.
    """
    names = {part: _class_folders(place / part) for part in EACH}
    if names["train"] != names["test"]:
        raise InputError(
            f"{place}/train and {place}/test do not have the same folders:"
            " each class of CIFAR-100 needs one in both"
        )
    for part in EACH:
        paths = [sorted((place / part / name).glob("*.png")) for name in names[part]]
        found = np.repeat(np.arange(len(paths)), [len(some) for some in paths])
        labels = _checked(found, part, str(place / part))
        images = np.empty((len(labels), PIXELS, 3), np.uint8)
        for image, path in zip(images, (path for some in paths for path in some), strict=True):
            image[:] = _image(path)
        yield part, (images, labels)


def _class_folders(place: Path) -> list[str]:
    names = _folders_in(place)
    if len(names) != CLASSES:
        raise InputError(
            f"{place} has {len(names)} folders, and CIFAR-100 has {CLASSES} classes:"
            " make a folder of images for each"
        )
    if all(name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _folders_in(place: Path) -> list[str]:
    if not place.is_dir():
        return []
    folders = (entry.name for entry in place.iterdir() if entry.is_dir())
    return [name for name in folders if not name.startswith(".")]


def _image(path: Path) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"{path} cannot be read without pillow: install it with 'pip install onepass[images]'"
        ) from None
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode) or status.st_size > LARGEST_IMAGE:
            raise ValueError(f"it is no file of at most {LARGEST_IMAGE} bytes")
        checked = png.read(path.read_bytes(), SIDE, SIDE)
        with Image.open(BytesIO(checked.content), formats=["PNG"]) as image:
            values = np.asarray(image)
            if not values[-1].any():
                checked.check_rows()
            if image.mode == "P" and values.max() >= checked.colours:
                raise ValueError("its palette lacks a colour")
            if image.mode in ("LA", "RGBA") and values[:, :, -1].min() < 255:
                raise ValueError("it has transparent pixels")
            if image.mode != "RGB":
                values = np.asarray(image.convert("RGB"))
            return values.reshape(PIXELS, 3)
    except Exception as reason:  # a damaged image fails in many ways
        why = first_line(reason)
        raise InputError(f"{path} is not an image of CIFAR-100 ({why}): replace it") from None


def _checked(labels: NDArray[np.int64], part: str, where: str) -> NDArray[np.int64]:
    """The labels, if they are those of all classes, equally often."""
    expected = CLASSES * EACH[part]
    if len(labels) != expected:
        raise InputError(
            f"{where} has {len(labels)} images, and CIFAR-100 has {expected} there: {ANEW}"
        )
    for label in (labels.min(), labels.max()):
        if not 0 <= label < CLASSES:
            raise InputError(
                f"{where} has an image of class {label},"
                f" and CIFAR-100 has classes 0 to {CLASSES - 1}: {ANEW}"
            )
    counts = np.bincount(labels, minlength=CLASSES)
    wrong = int((counts != EACH[part]).argmax())
    if counts[wrong] != EACH[part]:
        raise InputError(
            f"{where} has {counts[wrong]} images of class {wrong},"
            f" and CIFAR-100 has {EACH[part]} of each there: {ANEW}"
        )
    return labels
