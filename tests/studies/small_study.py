"""A small study."""

from __future__ import annotations

from onepass.studies.recipe import Recipe, load

CHANGES = [
    "train_examples=30",
    "test_examples=20",
    "hidden=[16]",
    "grids.van.learning_rate=[0.1, 0.001]",
    "grids.a-gem.learning_rate=0.1",
]


def small(methods: str = "van", seeds: int = 2, changes: list[str] | None = None) -> Recipe:
    return load("quickstart", CHANGES + (changes or []), methods, seeds)
