"""What processes measure: fleets in the middle of a stream, pass after pass."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from onepass.bench import measure, processes
from onepass.bench.measure import Plan
from onepass.bench.processes import Case, Sizes, middle
from onepass.engine.gradients import Mode
from onepass.errors import InputError

IMAGES, TASKS = 1000, 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("mode", ["stacked", "looped", None])
def test_a_gpu_is_measured_as_a_cpu_is(mode: Mode | None) -> None:
    assert Case("a-gem", 2 if mode else 1, mode, 1, IMAGES).loop("cuda")(50) >= 50


def test_constraints_are_violated_as_often_whatever_the_number_of_runs() -> None:
    for name, steps, low, high in (("gem", 8, 0.7, 1.0), ("a-gem", 30, 0.3, 0.7)):
        feed, fleet, learner, phase = middle(name, 2, 4, IMAGES)
        for batch in islice(feed.batches(phase), steps):
            fleet.learn(learner, batch)
        assert learner.violations is not None
        first, second = (int(n) / steps for n in learner.violations)
        assert first == second
        assert low <= first <= high


@pytest.mark.parametrize("mode", ["stacked", "looped"])
def test_a_fleet_takes_steps_pass_after_pass(mode: Mode) -> None:
    take = Case("er", 2, mode, 1, IMAGES).loop("cpu")
    assert [take(1), take(IMAGES // 10)] == [1, IMAGES // 10]


def test_a_fleet_in_the_middle_of_a_stream_has_a_full_memory_and_a_past_to_stay_close_to() -> None:
    memory = middle("a-gem", 2, TASKS, IMAGES).learner.memory
    assert memory is not None
    assert memory.sizes == [500, 500]
    _, _, learner, phase = middle("mas", 2, TASKS, IMAGES)
    assert phase == TASKS
    assert bool((learner.state()["pull"].amax(1) > 0).all())
    assert middle("multi-task", 2, TASKS, IMAGES).phase == 0


def test_an_error_in_a_process_is_raised_here() -> None:
    with processes.workers("cpu", cores=1) as started, pytest.raises(KeyError, match="prog-nn"):
        started.time(started.plain[:1], [Case("prog-nn", 1, None, 1, IMAGES)], 1)


@pytest.mark.parametrize("reason", [EOFError(), MemoryError("not enough")])
def test_what_does_not_fit_is_one_sentence(
    reason: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise reason

    monkeypatch.setattr(processes.Workers, "time", fail)
    why = r"there is no room for er with up to 900 runs .*: use fewer --runs"
    with pytest.raises(InputError, match=why):
        measure.run(Plan("cpu", ["er"], [1, 900], images=IMAGES, cores=1, sizes=Sizes(64, 1000)))
