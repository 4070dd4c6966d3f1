"""Several studies of one recipe, brought together in one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from onepass.errors import InputError
from onepass.files import resolved
from onepass.studies.folder import FILE
from onepass.studies.recipe import Recipe, from_stored, united
from onepass.studies.store import Store


def merge(into: Path, others: Sequence[Path]) -> list[tuple[Path, int]]:
    """Take the finished units of other studies of the same recipe; return how many came from each.

    A unit that two studies have with different results is a conflict: nothing is changed then.
    """
    for other in others:
        if resolved(other) == resolved(into):
            raise InputError(
                f"{other} cannot be merged into itself: name the studies to take from after the one"
                " that takes"
            )
    with ExitStack() as stack:
        sources = [stack.enter_context(Store.read(other)) for other in others]
        with ExitStack() as short:  # a reader must not be in the way of the writer
            there = [short.enter_context(Store.read(into))] if os.path.exists(into / FILE) else []
            stores = [*there, *sources]
            recipe = _united(stores)
            for pair in combinations(stores, 2):
                _refuse_conflicts(*pair)
            # What is damaged, or does not go together, is refused before anything is made.
            for store in stores:
                store.tasks = stores[0].tasks
                for unit in store.contents.records:
                    store.record(unit)
        with Store.write_to(into, create={"recipe": recipe.stored()}) as store:
            return list(zip(others, store.take(sources, recipe=recipe.stored()), strict=True))


def _united(stores: Sequence[Store]) -> Recipe:
    recipe = from_stored(stores[0].contents.study["recipe"])
    for store in stores[1:]:
        try:
            recipe = united(recipe, from_stored(store.contents.study["recipe"]))
        except InputError as reason:
            raise InputError(
                f"{store.folder} is another study than {stores[0].folder} ({reason}): merge only"
                " studies of the same settings"
            ) from None
    return recipe


def _refuse_conflicts(ours: Store, theirs: Store) -> None:
    for unit in theirs.contents.records.keys() & ours.contents.records.keys():
        if not ours.record(unit).same_as(theirs.record(unit)):
            raise InputError(
                f"{ours.folder} and {theirs.folder} have different results for the unit {unit}:"
                f" keep them apart, or find out why with 'onepass show DIR {unit}'"
            )
