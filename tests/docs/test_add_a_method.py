"""docs/add-a-method.md, followed to the letter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import setting

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
    for place, more in (
        ("from onepass.learners.mas import Mas\n", imported),
        ('    "multi-task": Method(', entry),
    ):
        content = content.replace(place, more + place)
    registry.write_text(content)
    return folder


def run(source: Path, *arguments: str) -> str:
    environment, command = {**os.environ, "PYTHONPATH": str(source)}, [sys.executable, "-m"]
    command += arguments
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def test_the_example_passes_the_check_kit_and_resumes(source: Path) -> None:
    kit = ["tests/learners/test_every_method.py", "tests/studies/test_checkpoint.py"]
    said = run(source, "pytest", *kit, "-k", "l2", "-p", "no:cacheprovider")
    passed = re.search(r"(\d+) passed", said + " 0 passed")
    assert passed is not None
    assert int(passed[1]) >= 15, said


def test_the_example_is_listed_and_runs_by_the_command(source: Path) -> None:
    assert "l2" in run(source, "onepass", "list")
    command = ["run", "quickstart", "--methods", "l2", "--seeds", "1", "--workers", "1"]
    sizes = ["train_examples=60", "test_examples=20", "hidden=[16]"]
    chosen = ["l2.learning_rate=0.1", "l2.strength=0.1", "keep_first=true"]
    assert "l2" in run(source, "onepass", *command, *setting(*sizes, *chosen))
