"""Two machines' results in one study."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import combinations
from pathlib import Path

import numpy as np

from onepass.errors import InputError
from onepass.studies.recipe import from_stored, united
from onepass.studies.store import FILE, Store


def merge(into: Path, others: Sequence[Path]) -> dict[Path, int]:
    """Take the finished units of other studies of the same recipe; how many came from each.

    A unit that two studies have with different results is a conflict: nothing is changed then.
    """
    for other in others:
        if other.resolve() == into.resolve():
            raise InputError(f"{other} cannot be merged into itself: name the studies to take from after the one that takes")
    with ExitStack() as stack:
        sources = [stack.enter_context(Store.read(other)) for other in others]
        there = [stack.enter_context(Store.read(into))] if (into / FILE).exists() else []
        recipe = reduce(united, [from_stored(store.contents.study["recipe"]) for store in [*there, *sources]])
        for pair in combinations([*there, *sources], 2):
            _refuse_conflicts(*pair)
        counts = {}
        with Store.write_to(into, create={"recipe": recipe.stored()}) as store:
            for source in sources:
                new = [unit for unit in source.contents.records if unit not in store.contents.records]
                store.take(source, new)
                counts[source.folder] = len(new)
            store.note(recipe=recipe.stored())
    return counts


def _refuse_conflicts(ours: Store, theirs: Store) -> None:
    for unit in theirs.contents.records.keys() & ours.contents.records.keys():
        a, b = ours.record(unit), theirs.record(unit)
        same = (a.violations, a.diverged, a.state_bytes) == (b.violations, b.diverged, b.state_bytes) and all(
            np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in ("accuracy", "initial", "curve")
        )
        if same and a.memory_accuracy is not None and b.memory_accuracy is not None:
            same = np.array_equal(a.memory_accuracy, b.memory_accuracy, equal_nan=True)
        if not same:
            raise InputError(
                f"{ours.folder} and {theirs.folder} have different results for the unit {unit}: keep them apart, or find out why with"
                f" 'onepass show DIR {unit}'"
            )
