"""A module imports from its own room and those below it, and only the packages that it may."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onepass

PACKAGE = Path(onepass.__file__).parent

# A room is a module or a folder of the package. The lowest layer comes first.
LOWEST = (
    *("errors", "output", "interrupts", "stopping", "special_files", "files"),
    *("random_numbers", "metrics", "settings"),
)
LAYERS = (
    LOWEST,
    ("streams", "models"),
    ("engine",),
    ("memory",),
    ("learners",),
    ("feed",),
    ("recording",),
    ("protocol",),
    ("studies", "live"),
    ("report",),
    ("bench",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
WITHIN_THE_LOWEST = {
    ("files", "errors"),
    ("files", "interrupts"),
    ("files", "special_files"),
    ("metrics", "errors"),
    ("output", "errors"),
}

# Besides the standard library: what every module may import, and what only these places may.
EVERYWHERE = {"torch", "numpy", "scipy"}
SOMEWHERE = {
    "PIL": ("streams.cifar",),
    "distributed": ("studies.cluster",),
    "pooch": ("studies.fetch",),
    "pydantic": ("studies", "live.header"),
    "rich": ("live.watching", "report", "bench.measure", "cli", "commands"),
    "safetensors": ("studies", "live.container"),
    "sklearn": ("live.classifier", "live.classifier_setup"),
    "torch.utils.tensorboard": ("live.watching", "report.tracking"),
    "triton": ("engine.gpu", "engine.quadratic"),
    "typer": ("cli", "commands"),
}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def imported(source: str) -> Iterator[str]:
    """Dotted names of all imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def is_in(place: str, *places: str) -> bool:
    return any(f"{place}.".startswith(f"{other}.") for other in places)


def room_may_import(room: str, other: str) -> bool:
    if room not in HEIGHT or other not in HEIGHT:
        return False
    return room == other or HEIGHT[other] < HEIGHT[room] or (room, other) in WITHIN_THE_LOWEST


def may_import(module: str, name: str) -> bool:
    package, *rest = name.split(".")
    if package == "onepass":
        return room_may_import(module.split(".")[0], rest[0])
    for other, places in SOMEWHERE.items():
        if is_in(name, other):
            return is_in(module, *places)
    return package in EVERYWHERE or package in sys.stdlib_module_names


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_in_a_room_and_imports_downwards(module: str) -> None:
    assert module.split(".")[0] in HEIGHT
    wrong = [
        name
        for name in imported(MODULES[module].read_text(encoding="utf-8"))
        if not may_import(module, name)
    ]
    assert not wrong


def test_the_table_names_every_room_once_and_no_other() -> None:
    rooms = [room for layer in LAYERS for room in layer]
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {module.split(".")[0] for module in MODULES}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("learners.er", "from onepass.protocol import Run"),
        ("learners.er", "import onepass.live.wrapper"),
        ("learners.er", "from onepass import feed"),
        ("learners.er", "from onepass import OnePass"),
        ("learners.er", "from ..protocol import Run"),
        ("learners.er", "def late():\n    from onepass.studies.store import Store"),
        ("learners.er", "if TYPE_CHECKING:\n    from onepass.report.table import table"),
        ("live.wrapper", "from onepass.studies.store import Store"),
        ("errors", "from onepass.files import digest"),
        ("errors", "from onepass.metrics import Record"),
        ("new", "from onepass.errors import InputError"),
        ("streams.mnist", "from PIL import Image"),
        ("learners.er", "import rich.table"),
        ("learners.er", "from torch.utils import tensorboard"),
        ("report.table", "import pandas"),
    ],
)
def test_an_import_that_leads_upwards_or_elsewhere_is_noticed(module: str, line: str) -> None:
    (name,) = imported(line)
    assert not may_import(module, name)


def test_the_package_itself_imports_a_module_when_it_is_first_asked_for() -> None:
    program = """
import sys, onepass
assert not [name for name in sys.modules if name.startswith("onepass.") or name == "torch"]
onepass.InputError
assert "onepass.errors" in sys.modules
assert "torch" not in sys.modules
assert all(hasattr(onepass, name) for name in onepass.__all__)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
