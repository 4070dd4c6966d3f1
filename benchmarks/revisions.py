"""Run programs with the package of another checkout, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(tree: Path) -> dict[str, str]:
    """The environment in which Python imports the package of this checkout, with one thread."""
    return os.environ | {"PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": "1"}


def run(tree: Path, command: list[str]) -> str:
    """Run Python with these arguments and return what it prints."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment(tree),
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def check_tree(tree: Path) -> None:
    """Raise unless Python imports the package from this checkout."""
    found = Path(run(tree, ["-c", "import onepass; print(onepass.__file__)"]).strip())
    if not found.is_relative_to(tree.resolve() / "src"):
        raise FileNotFoundError(f"{tree} has no src/onepass: Python imports {found}")
