"""Ten thousand calls in random order, good and bad: model, memory and counters fit together."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from onepass import Memory, OnePass
from tests.live.driver import SPOILT, Driver
from tests.live.random_calls import KINDS, Net, check_memory
from tests.toys import FEATURES

CALLS = 10_000
CALLS_A_STREAM = 100


batches = st.tuples(
    st.sampled_from([3, 2, 4, 5, 6, 1]),
    st.integers(0, 2**20),
    st.sampled_from([None] * 8 + ["a", "b", "c", 1.5]),
)
troubles = st.sampled_from(["nan", "gradient", "raises", "shape"])
changes = st.sampled_from(["freeze", "replace", "add", "double"])
ends = st.sampled_from(["good", "good", "good", "none", "bad", "other labels"])
# How often each is called, and with what.
ARGUMENTS: dict[str, tuple[int, list[st.SearchStrategy[Any]]]] = {
    "observe": (8, [batches]),
    "new class": (1, [batches]),
    "spoilt": (2, [batches, st.sampled_from(range(len(SPOILT)))]),
    "trouble": (2, [batches, troubles, st.integers(1, 2)]),
    "tamper": (1, [batches, changes]),
    "end": (2, [ends]),
    "predict": (1, [batches, st.booleans()]),
    "report": (1, []),
    "reload": (1, []),
}
names = [name for name, (often, _) in ARGUMENTS.items() for _ in range(often)]
operations = st.sampled_from(names).flatmap(
    lambda name: st.tuples(st.just(name), *ARGUMENTS[name][1])
)


EVERY_SECOND = [
    pytest.param(kind, marks=pytest.mark.long) if place % 2 else kind
    for place, kind in enumerate(KINDS)
]


@pytest.mark.parametrize("kind", EVERY_SECOND)
def test_whatever_is_called_model_memory_and_counters_fit_together(kind: str) -> None:
    tally: Counter[str] = Counter()
    streams = -(-CALLS // (len(KINDS) * CALLS_A_STREAM))

    @settings(
        max_examples=streams,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(operations, min_size=CALLS_A_STREAM, max_size=CALLS_A_STREAM))
    def calls(drawn: list[tuple[Any, ...]]) -> None:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(KINDS[kind], Path(folder), tally)
            for operation in drawn:
                note(str(operation))
                driver.do(operation)

    calls()
    made = sum(tally[name] for name in ARGUMENTS)
    assert made * len(KINDS) >= CALLS
    assert tally["accepted"] > made / 5
    assert tally["refused"] > made / 10
    assert tally["reload"] > made / 50
    assert tally["ended"] > 7 or KINDS[kind].settings.get("task_free")


def test_a_memory_that_has_kept_nothing_yet_can_be_saved_and_loaded(tmp_path: Path) -> None:
    # One place, and it is for class 0.
    learner = OnePass(Net(), learning_rate=0.1, memory=Memory(per_task=1, policy="ring"))
    x = torch.randn(4, FEATURES)
    learner.observe(x, torch.tensor([1, 2, 3, 1]))
    learner.save(tmp_path / "saved")
    loaded = OnePass.load(tmp_path / "saved", Net())
    for one in (learner, loaded):
        one.observe(x, torch.tensor([1, 2, 3, 0]))
        assert one.memory is not None
        assert one.memory.size == 1
        check_memory(one.memory, 2)
