"""docs/add-a-method.md, followed to the letter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the method of the page added to it."""
    folder = tmp_path_factory.mktemp("with-l2") / "src"
    shutil.copytree(ROOT / "src", folder)
    file, imported, entry = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "onepass/learners/l2.py").write_text(file)
    registry = folder / "onepass/learners/__init__.py"
    content = registry.read_text()
    content = content.replace(
        "from onepass.learners.mas import Mas\n",
        imported + "from onepass.learners.mas import Mas\n",
    )
    registry.write_text(
        content.replace('    "multi-task": Method(', entry + '    "multi-task": Method(')
    )
    return folder


def run(source: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    made = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_the_example_passes_the_check_kit_and_resumes(source: Path) -> None:
    said = run(
        source,
        "pytest",
        "tests/learners/test_every_method.py",
        "tests/studies/test_checkpoint.py",
        "-k",
        "l2",
        "-p",
        "no:cacheprovider",
    )
    assert int(re.search(r"(\d+) passed", said + " 0 passed").group(1)) >= 15, said  # type: ignore[union-attr]


def test_the_example_is_listed_and_runs_by_the_command(source: Path) -> None:
    assert "l2" in run(source, "onepass", "list")
    small = "--seeds 1 --workers 1 --set train_examples=60 --set test_examples=20 --set hidden=[16] --set l2.learning_rate=0.1 --set l2.strength=0.1"
    assert "l2" in run(
        source,
        "onepass",
        "run",
        "quickstart",
        "--methods",
        "l2",
        *small.split(),
        "--set",
        "keep_first=true",
    )
