"""Reading gzipped tar archives in bounded memory and time, without writing anything."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from gzip import GzipFile
from pathlib import Path

from onepass.errors import first_line


class DamagedError(ValueError):
    """An archive cannot be unpacked; the message says why."""


class _Bounded(GzipFile):
    """Raises before more than `most` bytes are unpacked: a header may ask for any number."""

    most: int

    def read(self, size: int | None = -1) -> bytes:
        self._check(self.most + 1 if size is None or size < 0 else self.tell() + size)
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, end: int) -> None:
        if end > self.most:
            raise DamagedError(f"it unpacks to more than {self.most} bytes")


def members(path: Path, names: Collection[str], most: int) -> Iterator[tuple[str, bytes]]:
    """Yield the plain files of these names, in the archive's order; unpack at most `most` bytes."""
    try:
        with _Bounded(path) as packed:
            packed.most = most
            with tarfile.open(fileobj=packed, mode="r:") as archive:
                # As they come: to look for one by name decompresses everything once more.
                # Plain files only: a link may lead in a circle, and a file with holes may be of
                # any size.
                for member in archive:
                    plain = member.isreg() and not member.issparse()
                    file = archive.extractfile(member) if member.name in names and plain else None
                    if file is not None:
                        yield member.name, file.read()
    except DamagedError:
        raise
    except Exception as reason:  # a damaged archive fails in many ways
        raise DamagedError(first_line(reason)) from None
