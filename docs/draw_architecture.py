"""Draw docs/architecture.svg: the rooms of the package, their imports, and the two ways through.

    python docs/draw_architecture.py            # writes docs/architecture.svg

Rooms, their heights and the arrows between them come from the imports in `src/onepass`. The two
ways are those of docs/architecture.md: its numbered lists name one function per step.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "src" / "onepass"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "architecture.svg"

# What stands in a room of its own in the picture, from left to right, and what it is for.
ROOMS = {
    "cli": "commands of the terminal",
    "bench": "microseconds per run-step",
    "report": "tables from records",
    "studies": "recipes, units, workers, the store",
    "protocol": "choose on D^CV, learn D^EV once",
    "recording": "the raw record of a run",
    "feed": "batches for all runs",
    "live": "OnePass: the user's module",
    "learners": "one file per method",
    "memory": "the episodic memory",
    "streams": "where tasks come from",
    "engine": "the fleet: theta [R, P]",
    "models": "plain nn.Modules",
}
FOUNDATION = "foundations"  # modules below all rooms, such as errors, files and random numbers
STUDY, OBSERVE = "#1f6feb", "#b35900"
WIDTH, MARGIN, GAP, LINE, ROW = 1220, 24, 26, 19, 62


@dataclass
class Box:
    """A room in the picture."""

    name: str
    purpose: str
    steps: list[tuple[str, int, str]] = field(default_factory=list)  # colour, number, function
    level: int = 0
    x: float = 0
    y: float = 0
    width: float = 0

    @property
    def height(self) -> float:
        return 50 + LINE * len(self.steps)


def room_of(module: str) -> str:
    """The room of a dotted name below the package.

    >>> room_of("engine.fleet"), room_of("errors")
    ('engine', 'foundations')
    """
    first = "cli" if module.split(".")[0] == "commands" else module.split(".")[0]
    return first if first in ROOMS else FOUNDATION


def imports() -> Iterator[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onepass."):
                one, other = room_of(name), room_of(str(node.module).removeprefix("onepass."))
                if one != other:
                    yield one, other


def needed(below: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """The arrows that do not follow from others: a transitive reduction."""

    def reach(room: str) -> set[str]:
        return {room}.union(*(reach(other) for other in below[room]))

    return {
        (room, other)
        for room, others in below.items()
        for other in others
        if not any(other in reach(between) for between in others - {other})
    }


def ways(page: str) -> list[list[str]]:
    """The functions that the numbered lists of a page name, list by list.

    >>> ways("1. `a.b` does\\n2. `c.d`: this\\n\\nand\\n\\n1. `e.f`")
    [['a.b', 'c.d'], ['e.f']]
    """
    found: list[list[str]] = []
    for number, name in re.findall(r"^(\d+)\. `([\w.]+)`", page, re.MULTILINE):
        if number == "1":
            found.append([])
        found[-1].append(name)
    return found


def boxes(page: str) -> dict[str, Box]:
    """The rooms with the steps of both ways in them, and how high they are."""
    made = {name: Box(name, purpose) for name, purpose in ROOMS.items()}
    made[FOUNDATION] = Box(FOUNDATION, "errors, files, random numbers, settings, metrics …")
    for colour, way in zip((STUDY, OBSERVE), ways(page), strict=True):
        for number, name in enumerate(way, start=1):
            short = ".".join(part for part in name.split(".")[-2:])
            made[room_of(name)].steps.append((colour, number, short))
    return made


def layout(made: dict[str, Box], below: Mapping[str, set[str]]) -> float:
    """Give every box its place, and return the height of the picture."""

    def level(room: str) -> int:
        return 1 + max((level(other) for other in below[room]), default=-1)

    for box in made.values():
        box.level = level(box.name)
    y = float(MARGIN + 34)
    for number in sorted({box.level for box in made.values()}, reverse=True):
        row = [box for box in made.values() if box.level == number]
        width = min(300.0, (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row))
        if row[0].name == FOUNDATION:
            width = WIDTH - 2 * MARGIN
        left = (WIDTH - len(row) * width - GAP * (len(row) - 1)) / 2
        for place, box in enumerate(row):
            box.x, box.y, box.width = left + place * (width + GAP), y, width
        y += max(box.height for box in row) + ROW - 20
    return y


def arrow(one: Box, other: Box) -> str:
    """A line from the bottom of one box to the top of another."""
    x1, y1 = one.x + one.width / 2, one.y + one.height
    x2, y2 = other.x + other.width / 2, other.y
    if other.name == FOUNDATION:
        x2 = x1
    x2 = min(max(x1, other.x + 20), other.x + other.width - 20) if x2 != x1 else x2
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f}"
    return f'<path d="{path} {x2:.0f},{y2 - 4:.0f}" class="arrow" marker-end="url(#head)"/>'


def drawn(box: Box) -> Iterator[str]:
    x, y, size = box.x, box.y, f'width="{box.width:.0f}" height="{box.height:.0f}"'
    yield f'<rect x="{x:.0f}" y="{y:.0f}" {size} rx="8"/>'
    yield f'<text x="{x + 14:.0f}" y="{y + 21:.0f}" class="room">{escape(box.name)}</text>'
    yield f'<text x="{x + 14:.0f}" y="{y + 39:.0f}" class="purpose">{escape(box.purpose)}</text>'
    for place, (colour, number, name) in enumerate(box.steps):
        line = y + 58 + LINE * place
        yield f'<circle cx="{x + 22:.0f}" cy="{line - 4:.0f}" r="8.5" fill="{colour}"/>'
        yield f'<text x="{x + 22:.0f}" y="{line - 0.5:.1f}" class="number">{number}</text>'
        yield f'<text x="{x + 36:.0f}" y="{line:.0f}" class="step">{escape(name)}</text>'


STYLE = """
  svg { background: #ffffff; font-family: system-ui, sans-serif; }
  rect { fill: #f6f8fa; stroke: #8c959f; }
  text { fill: #1f2328; font-size: 12.5px; }
  .room { font-weight: 700; font-size: 15px; }
  .purpose { fill: #59636e; }
  .step { font-family: ui-monospace, monospace; font-size: 11.5px; }
  .number { fill: #ffffff; font-size: 10px; text-anchor: middle; font-weight: 700; }
  .arrow { fill: none; stroke: #8c959f; stroke-width: 1.2; }
"""


def picture() -> str:
    """The whole SVG."""
    made = boxes(PAGE.read_text(encoding="utf-8"))
    below: dict[str, set[str]] = {name: set() for name in made}
    for one, other in imports():
        below[one].add(other)
    height = layout(made, below)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        "<title>The rooms of onepass, and two ways through them</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#8c959f"/></marker>'
        "</defs>",
    ]
    legend = ((STUDY, "a mini-batch from disk to table"), (OBSERVE, "an observe() call"))
    for place, (colour, text) in enumerate(legend):
        x = MARGIN + 10 + 250 * place
        lines += [f'<circle cx="{x}" cy="26" r="8.5" fill="{colour}"/>']
        lines += [f'<text x="{x + 16}" y="30">{escape(text)}</text>']
    lines += [f'<text x="{MARGIN + 420}" y="30">arrows: imports from</text>']
    lines += [arrow(made[one], made[other]) for one, other in sorted(needed(below))]
    lines += [part for box in made.values() for part in drawn(box)]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
