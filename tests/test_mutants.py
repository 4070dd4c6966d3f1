"""The tests notice wrong implementations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant, check


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place_in_the_source(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.file, "exec")


def test_every_method_has_mutants() -> None:
    broken = {Path(mutant.file).stem for mutant in MUTANTS}
    assert len(MUTANTS) >= 40
    assert {"agem", "gem", "sgem", "er", "mega1", "mega2"} <= broken
    assert {"ewc", "pi", "mas", "rwalk", "prognn", "icarl"} <= broken


@pytest.mark.long
def test_of_wrong_implementations_at_least_95_percent_are_noticed() -> None:
    survivors = check(MUTANTS, os.cpu_count() or 1)
    assert len(survivors) <= 0.05 * len(MUTANTS), [mutant.name for mutant in survivors]
