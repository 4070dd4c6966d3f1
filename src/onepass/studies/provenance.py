"""With what a result was made: device, package versions, source revision."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from onepass.studies import checkout
from onepass.studies.store import Provenance

PACKAGES = ("onepass", "torch", "numpy", "scipy", "scikit-learn", "safetensors")


@cache
def provenance(device: str) -> Provenance:
    """The device, the package versions and the source that this process computes with."""
    return Provenance(
        _device(device),
        {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        revision(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # used from a folder
        return "unknown"


def _device(device: str) -> str:
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.machine()  # `platform.processor` would start a program


@cache
def revision() -> str:
    """The commit of a checkout, with `+` if files of the package differ from it.

    Without a checkout it is a hash of the package's source.
    """
    return checkout.revision(Path(__file__).resolve().parents[1]) or _source()


@cache
def software() -> str:
    """What decides the bits of a result besides its configuration."""
    return f"{_source()} and torch {torch.__version__}"


def _source() -> str:
    package = Path(__file__).parents[1]
    content = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return f"source-{content.hexdigest()[:12]}"
