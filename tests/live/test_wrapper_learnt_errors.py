"""What fails after a batch was learnt says that it was learnt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onepass import InputError, LearntError, OnePass
from onepass.live.saving import packed
from tests.live.modules import CLASSES, stream
from tests.toys import small_net


@pytest.fixture
def learner(tmp_path: Path) -> OnePass:
    (tmp_path / "folder").mkdir()
    return OnePass(small_net(CLASSES), learning_rate=0.1, autosave=tmp_path / "folder" / "saved")


def block(tmp_path: Path) -> None:
    """Where the file was, nothing can be written any more."""
    (tmp_path / "folder").rename(tmp_path / "elsewhere")


def test_an_autosave_that_fails_says_that_the_batch_was_learnt(
    learner: OnePass, tmp_path: Path
) -> None:
    first, second, *_ = stream()
    learner.observe(*first)
    block(tmp_path)
    with pytest.raises(
        LearntError,
        match=r"^the batch was learnt, and then something failed \(cannot write .*\): mend that",
    ) as caught:
        learner.observe(*second)
    assert isinstance(caught.value.__cause__, InputError)
    assert learner.steps == 2
    loaded = OnePass.load(tmp_path / "elsewhere" / "saved", small_net(CLASSES))
    loaded.observe(*second)
    assert packed(loaded) == packed(learner)


def test_an_autosave_that_fails_at_the_end_of_a_task_says_that_it_has_ended(
    learner: OnePass, tmp_path: Path
) -> None:
    learner.observe(*stream()[0])
    block(tmp_path)
    with pytest.raises(LearntError, match=r"^the task has ended, and then something failed"):
        learner.end_task()
    assert (learner.segment, learner.batches) == (1, 0)


def test_a_watch_that_fails_does_not_keep_the_file_from_being_saved(tmp_path: Path) -> None:
    def careless(_: object) -> None:
        raise LookupError("of my own")

    watch = {"watch": careless, "watch_every": 1}
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, **watch, autosave=tmp_path / "saved")
    with pytest.raises(LearntError, match="of my own"):
        learner.observe(*stream()[0])
    assert OnePass.load(tmp_path / "saved", small_net(CLASSES)).steps == 1


def test_an_error_that_generators_treat_specially_is_a_learnt_error_too() -> None:
    reports = iter([])
    learner = OnePass(
        small_net(CLASSES), learning_rate=0.1, watch=lambda _: next(reports), watch_every=1
    )
    with pytest.raises(LearntError) as caught:
        learner.observe(*stream()[0])
    assert isinstance(caught.value.__cause__, StopIteration)
    assert learner.steps == 1


class Strict(logging.Handler):
    """Takes every record for an error."""

    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError(record.getMessage())


@pytest.fixture
def strict() -> Iterator[None]:
    handler = Strict(logging.WARNING)
    logging.getLogger("onepass").addHandler(handler)
    yield
    logging.getLogger("onepass").removeHandler(handler)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("what", ["the stream seems to repeat", "no task has ended"])
def test_a_handler_of_the_log_that_raises_comes_after_the_batch(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.live.advice.PATIENCE", 3)
    learner = OnePass(
        small_net(CLASSES),
        learning_rate=0.1,
        autosave=tmp_path / "saved",
        task_free=what.startswith("the"),
    )
    x, y = stream()[0]
    said = []
    for number in range(4):
        try:
            learner.observe(x if what.startswith("the") else x + number, y)
        except LearntError as error:
            said.append(str(error))
        assert learner.steps == learner.batches == number + 1
        assert OnePass.load(tmp_path / "saved", small_net(CLASSES)).steps == number + 1
    assert len(said) == 1
    assert what in said[0]


def test_a_refused_batch_is_an_input_error_and_no_learnt_error(learner: OnePass) -> None:
    x, y = stream()[0]
    before = packed(learner)
    with pytest.raises(InputError) as caught:
        learner.observe(torch.full_like(x, torch.nan), y)
    assert not isinstance(caught.value, LearntError)
    assert packed(learner) == before
