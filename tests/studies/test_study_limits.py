"""What cannot be planned or started is refused in one sentence, before anything is made."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.studies import packing, work
from onepass.studies.recipe import MOST_UNITS, Recipe, from_stored, load, united
from onepass.studies.study import try_stream
from tests.commands import refusal
from tests.studies.small_study import small

EWC, EWC_RATE = "--set grids.ewc.strength", "--set grids.ewc.learning_rate"
MANY = "[" + ",".join(str(number / 1000) for number in range(1, 401)) + "]"


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ("--seeds 2147483648", "use fewer seeds"),
        ("--set cv_seeds=2147483648", "use fewer seeds"),
        (f"--seeds {MOST_UNITS + 1}", "up to 100000 can be planned"),
        (f"--methods ewc {EWC}={MANY} {EWC_RATE}={MANY}", "a study of 160005 units is too large"),
        ("--workers 1025", "--workers 1025 is not possible: use at most 1024"),
        ("--threads 1000000000", "--threads 1000000000 is not possible: use at most 1024"),
        ("--scheduler tcp://a..b:1", "no Dask scheduler answers at tcp://a..b:1"),
        (f"--scheduler tcp://{'a' * 300}:1", "no Dask scheduler answers at tcp://a"),
        (f"--scheduler tcp://{'ä.' * 2000}:1", "no Dask scheduler answers at tcp://ä"),
    ],
)
def test_more_than_can_be_planned_or_started_is_one_sentence(
    arguments: str, mentions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "scheduler" in arguments:
        pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    command = ["run", "quickstart", *arguments.split(), "--out", str(tmp_path / "out")]
    assert mentions in refusal(capsys, *command)
    assert not (tmp_path / "out").exists()


def test_a_stored_or_grown_study_is_bounded_too() -> None:
    with pytest.raises(InputError, match="too large"):
        from_stored({**small().stored(), "seeds": 2**31})
    one, other = (
        small(changes=[f"cv_seeds={MOST_UNITS // 3}", f"grids.van.learning_rate={rates}"])
        for rates in ([0.1, 0.2], [0.3, 0.4])
    )
    with pytest.raises(InputError, match="too large"):
        united(one, other)


@pytest.mark.parametrize(
    ("method", "change"), [("van", "hidden=[50000, 50000]"), ("gem", "memory_per_task=100000000")]
)
def test_what_does_not_fit_is_counted_and_not_built(
    method: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "memory", lambda _: 8_000_000_000)
    recipe: Recipe = load("quickstart", [change], method)
    source = try_stream(recipe, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=f"a single run of {method} does not fit into the 8.0 GB"):
        packing.most_rows(source, recipe, method, "ev", "cpu", 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_worker_says_which_process_has_the_gpu_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(work, "SOON", 0.0)
    monkeypatch.setattr(work, "LONGEST", 0.5)
    one, other = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    fcntl.flock(one, fcntl.LOCK_EX)
    why = rf"no GPU became free within .* \(in use by process {os.getpid()}\)"
    with caplog.at_level(logging.WARNING), pytest.raises(InputError, match=why):
        work._first_free([other])
    said = f"waiting for a GPU: all are in use by other fleets (process {os.getpid()})"
    assert any(said in message for message in caplog.messages)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work._first_free([other], interrupted)
    os.close(one)
    assert work._first_free([other], interrupted) == 0
    os.close(other)
