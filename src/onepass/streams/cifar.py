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
    """Where CIFAR-100 lies: `path` is a published archive, or the folder with the files or folders `train` and `test`."""

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
        return [
            str(part)
            for part in parts
            if not (part.is_dir() if self.form == "images" else part.is_file())
        ]


def find(folder: Path) -> Source | None:
    """CIFAR-100 in a folder or in its subfolder `cifar100`: unpacked, in an archive or as images; None if it is not there."""
    return next((source for source in _sources(folder) if not source.missing()), None)


def missing(folder: Path) -> list[str]:
    """The part that a folder lacks although it has the other one."""
    for source in _sources(folder):
        lacking = source.missing()
        # Other data sets have folders of the names train and test too.
        others = (
            source.form == "images"
            and len(_folders_in(source.path / "train") or _folders_in(source.path / "test"))
            != CLASSES
        )
        if len(lacking) == 1 and not source.is_archive and not others:
            return lacking
    return []


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
    """All images `[60000, 3072]`, training images first, the channels of a pixel side by side; their classes; how many are for training."""
    try:
        source = find(folder)
    except OSError as reason:
        raise InputError(
            f"{folder} cannot be read ({reason.strerror or first_line(reason)}): name another folder"
        ) from None
    if source is None:
        raise InputError(
            f"there is no CIFAR-100 in {folder}: fetch it with 'onepass data get cifar100'"
        )
    training, tests = (CLASSES * each for each in EACH.values())
    x, classes = (
        np.empty((training + tests, PIXELS, 3), np.uint8),
        np.empty(training + tests, np.int64),
    )
    try:
        for part, (images, labels) in _parts(source):
            rows = slice(training) if part == "train" else slice(training, None)
            classes[rows] = labels
            for channel in range(3):  # seven times as fast as all at once, for planes of channels
                x[rows, :, channel] = images[:, :, channel]
    except OSError as reason:
        raise InputError(
            f"{reason.filename or source.path} cannot be read ({reason.strerror or first_line(reason)}): {ANEW}"
        ) from None
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
            raise InputError(
                f"{source.path} is truncated or altered (its checksum is wrong): {ANEW}"
            )
    try:
        for name, content in archives.members(source.path, missing, most):
            part, where = missing.pop(name), f"{name} in {source.path}"
            _check_size(len(content), part, source.form, where)
            yield part, where, content
    except archives.DamagedError as reason:
        raise InputError(
            f"{source.path} cannot be unpacked ({first_line(reason)}): {ANEW}"
        ) from None
    if missing:
        raise InputError(f"{source.path} lacks {' and '.join(missing)}: {ANEW}")


def _most_bytes(part: str) -> int:
    """More than any form of a part takes.

    Bytes written as text take one and a half times their room, and an image has a name and labels.
    """
    return CLASSES * EACH[part] * (2 * 3 * PIXELS + 256) + 2**16


def _check_size(size: int, part: str, form: Form, where: str) -> None:
    """Raise before anything is read if a file is too large; a binary one has exactly one size."""
    count, record = CLASSES * EACH[part], 2 + 3 * PIXELS
    if form == "binary" and size != count * record:
        raise InputError(
            f"{where} has {size} bytes, and CIFAR-100 has {count} records of {record} there: {ANEW}"
        )
    if size > _most_bytes(part):
        raise InputError(
            f"{where} has {size} bytes, and CIFAR-100 has at most {_most_bytes(part)} there: {ANEW}"
        )


def _records(content: bytes, part: str, where: str) -> Images:
    """The binary version: a coarse label, a fine one and the planes of red, green and blue for each image."""
    records = np.frombuffer(content, np.uint8).reshape(CLASSES * EACH[part], 2 + 3 * PIXELS)
    return _of_planes(records[:, 2:]), _checked(records[:, 1].astype(np.int64), part, where)


def _pickled(content: bytes, part: str, where: str) -> Images:
    """The Python version: a dictionary with `data`, an array of planes, and `fine_labels`."""
    try:
        found = pickles.load(content, most=OPERATIONS * CLASSES * EACH[part] + 1000)
        if not isinstance(found, dict):
            raise ValueError("it holds no dictionary")
        planes, labels = pickles.array_of_bytes(_entry(found, "data")), _entry(found, "fine_labels")
        if planes is None:
            raise ValueError("its data are not an array of bytes")
        if planes.ndim != 2 or planes.shape[1] != 3 * PIXELS:
            raise ValueError(f"its data have the shape {planes.shape}")
        if (
            not isinstance(labels, list | tuple)
            or set(map(type, labels)) != {int}
            or len(labels) != len(planes)
        ):
            raise ValueError("its fine_labels are not a number for each image")
        numbers = np.array(labels)
        if numbers.dtype.kind != "i":
            raise ValueError("its fine_labels are not a number for each image")
    except pickles.ForeignNameError as asked:
        raise InputError(
            f"{where} asks for {asked}, which is no part of CIFAR-100, and was not read further: {ANEW}"
        ) from None
    except ValueError as reason:
        raise InputError(
            f"{where} is not a pickle of CIFAR-100 ({first_line(reason)}): {ANEW}"
        ) from None
    return _of_planes(planes), _checked(numbers.astype(np.int64), part, where)


def _entry(content: dict[Any, Any], key: str) -> Any:
    found = content.get(key, content.get(key.encode()))  # what was text in Python 2 is bytes
    if found is None:
        raise ValueError(f"it has no {key}")
    return found


def _of_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return planes.reshape(len(planes), 3, PIXELS).transpose(0, 2, 1)


def _folders(place: Path) -> Iterator[tuple[str, Images]]:
    """A folder a class with its images, in `train` and in `test`: the order of their names is that of the classes."""
    names = {part: _class_folders(place / part) for part in EACH}
    if names["train"] != names["test"]:
        raise InputError(
            f"{place}/train and {place}/test do not have the same folders: each class of CIFAR-100 needs one in both"
        )
    for part in EACH:
        paths = [sorted((place / part / name).glob("*.png")) for name in names[part]]
        labels = _checked(
            np.repeat(np.arange(len(paths)), [len(some) for some in paths]), part, str(place / part)
        )
        images = np.empty((len(labels), PIXELS, 3), np.uint8)
        for image, path in zip(images, (path for some in paths for path in some), strict=True):
            image[:] = _image(path)
        yield part, (images, labels)


def _class_folders(place: Path) -> list[str]:
    names = _folders_in(place)
    if len(names) != CLASSES:
        raise InputError(
            f"{place} has {len(names)} folders, and CIFAR-100 has {CLASSES} classes: make a folder of images for each"
        )
    return (
        sorted(names, key=lambda name: (int(name), name))
        if all(name.isdecimal() for name in names)
        else sorted(names)
    )


def _folders_in(place: Path) -> list[str]:
    return (
        [
            entry.name
            for entry in place.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        ]
        if place.is_dir()
        else []
    )


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
            return (values if image.mode == "RGB" else np.asarray(image.convert("RGB"))).reshape(
                PIXELS, 3
            )
    except Exception as reason:  # a damaged image fails in many ways
        raise InputError(
            f"{path} is not an image of CIFAR-100 ({first_line(reason)}): replace it"
        ) from None


def _checked(labels: NDArray[np.int64], part: str, where: str) -> NDArray[np.int64]:
    """The labels, if they are those of all classes, equally often."""
    if len(labels) != CLASSES * EACH[part]:
        raise InputError(
            f"{where} has {len(labels)} images, and CIFAR-100 has {CLASSES * EACH[part]} there: {ANEW}"
        )
    for label in (labels.min(), labels.max()):
        if not 0 <= label < CLASSES:
            raise InputError(
                f"{where} has an image of class {label}, and CIFAR-100 has classes 0 to {CLASSES - 1}: {ANEW}"
            )
    counts = np.bincount(labels, minlength=CLASSES)
    if (counts != EACH[part]).any():
        wrong = int((counts != EACH[part]).argmax())
        raise InputError(
            f"{where} has {counts[wrong]} images of class {wrong}, and CIFAR-100 has {EACH[part]} of each there: {ANEW}"
        )
    return labels
