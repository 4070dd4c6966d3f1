"""A file from elsewhere never says where to write, how much to reserve or what to call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onepass import InputError, Memory, OnePass
from onepass.engine.slots import Slots
from onepass.live import storage
from onepass.live.saving import packed
from tests.live.altered_files import changed, refusal, setting, taken_apart
from tests.live.saved_cases import CASES, content_of
from tests.live.saved_learners import MIDDLE, Case, classes, net

# ---- where to write, and how much


@pytest.mark.parametrize("where", ["own", "settings", "memory", "header"])
@pytest.mark.parametrize("wish", ["autosave", "watch", "loss", "module", "self"])
def test_a_file_cannot_name_what_is_written_or_called(
    where: str, wish: str, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], _: object) -> None:
        settings = about["settings"]
        places = {"own": settings["own"], "memory": settings["memory"]}
        places |= {"settings": settings, "header": about}
        places[where][wish] = str(tmp_path / "victim" / "file")

    assert "altered" in refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)


def test_the_folder_in_a_file_is_never_made(tmp_path: Path) -> None:
    def change(about: dict[str, Any], _: object) -> None:
        place = {"where": "disk", "folder": str(tmp_path / "victim")}
        about["settings"]["memory"] |= {**place, "bytes": 2**40}

    sentence = refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)
    assert "where='disk' and folder='…'" in sentence
    assert "where='cpu'" in sentence
    on_disk = {"where": "disk", "folder": tmp_path / "mine"}
    for place in ({"where": "cpu"}, {"where": "module"}, on_disk):
        learner = OnePass.load(tmp_path / "file", net(), **place)
        learner.observe(*classes(1, 2))
        assert not (tmp_path / "victim").exists()
        assert learner.plan.bytes == 2**40
    assert (tmp_path / "mine").exists()


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    content, case = content_of("a-gem", MIDDLE), CASES["a-gem"]
    assert "moon" in refusal(content, case, tmp_path, where="moon")
    assert "folder" in refusal(content, case, tmp_path, folder=tmp_path / "mine")
    assert "folder" in refusal(content, case, tmp_path, where="disk")


@pytest.mark.parametrize("place", ["cpu", "module", "disk"])
def test_a_memory_goes_on_bit_identically_in_another_place(place: Any, tmp_path: Path) -> None:
    memory = Memory(per_task=7, bytes=6000, where="disk", folder=tmp_path / "one")
    case = Case("mega-1", {"memory": memory})
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(tmp_path / "file")
    folder = {"folder": tmp_path / "other"} if place == "disk" else {}
    loaded = OnePass.load(tmp_path / "file", net(), where=place, **folder)
    assert loaded.plan.where == place
    assert case.run(loaded, MIDDLE) == case.run(learner, MIDDLE)
    assert taken_apart(packed(loaded))[1].keys() == taken_apart(packed(learner))[1].keys()


def limited_by(limit: dict[str, int], stop: int = MIDDLE) -> bytes:
    return changed("a-gem", lambda about, _: about["settings"]["memory"].update(limit), stop)


@pytest.mark.parametrize(
    "limit",
    [{"bytes": 2**45, "per_task": 500}, {"examples": 2**40, "per_task": 500}, {"per_task": 2**40}],
)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_nothing_is_reserved_for_examples_that_have_not_come(
    limit: dict[str, int], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = list[int]()
    allocate = os.posix_fallocate

    def counted(handle: int, offset: int, length: int) -> None:
        reserved.append(length)
        allocate(handle, offset, length)

    monkeypatch.setattr(storage.os, "posix_fallocate", counted)
    (tmp_path / "file").write_bytes(limited_by(limit))
    given = {"where": "disk", "folder": tmp_path / "mine"} if place == "disk" else {"where": place}
    learner = OnePass.load(tmp_path / "file", net(), **given)
    assert learner.memory is not None
    assert learner.memory.storage is not None
    assert learner.memory.storage.rows == learner.memory.size > 0
    for batch in range(30):
        learner.observe(*classes(1, batch))
        assert learner.memory.storage.rows <= 2 * (learner.memory.size + 6)
    assert learner.memory.size > 100, "the limit is what the file says"
    assert sum(reserved) < 50_000
    assert bool(reserved) == (place == "disk")


def test_nothing_is_reserved_by_a_file_that_was_saved_before_the_first_batch(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(limited_by({"bytes": 2**50}, stop=0))
    learner = OnePass.load(tmp_path / "file", net())
    learner.observe(*classes(0, 0))
    assert learner.memory is not None
    assert learner.memory.nbytes < 10_000


def test_a_loaded_memory_grows_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    case = Case(settings={"memory": Memory(per_task=100, examples=40)})
    whole, learner = case.start(), case.start()
    learner.observe(*classes(0, 0))
    whole.observe(*classes(0, 0))
    learner.save(tmp_path / "file")
    loaded = case.load(tmp_path / "file")
    assert loaded.memory is not None
    rows = list[int]()
    for batch in range(1, 20):
        assert loaded.observe(*classes(0, batch)) == whole.observe(*classes(0, batch))
        assert loaded.memory.storage is not None
        rows.append(loaded.memory.storage.rows)
    assert packed(loaded) == packed(whole)
    assert rows == sorted(rows)
    assert rows[-1] == 40
    assert len(set(rows)) <= 4, "room comes in large pieces"


# ---- containers that cannot be


@pytest.mark.parametrize("when", ["a report", "the end of a task"])
def test_examples_in_a_file_that_the_module_refuses_are_one_sentence(
    when: str, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["memory.examples.x"].fill_(1000)  # words that the module does not have

    case = CASES["mega-1, two inputs"]
    (tmp_path / "file").write_bytes(changed("mega-1, two inputs", change))
    ends = when == "the end of a task"
    learner = OnePass.load(tmp_path / "file", case.build(), **({"watch": print} if ends else {}))
    before = learner.segment, learner.batches
    says = r"refused examples of the memory .*forgetting cannot be measured"
    with pytest.raises(InputError, match=says):
        learner.end_task() if ends else learner.report()
    assert (learner.segment, learner.batches) == before


def test_a_module_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content_of("a-gem", MIDDLE))
    with pytest.raises(InputError, match=r"nn\.Module"):
        OnePass.load(tmp_path / "file", "module")  # type: ignore[arg-type]


# ---- what is still loaded


def test_one_head_of_many_classes_takes_no_table_of_its_square() -> None:
    competition = Slots((tuple(range(100_000)),)).on(torch.device("cpu"))
    assert not competition.evaluated.partial
    assert competition.evaluated.competitors.untyped_storage().nbytes() == 800_000
    small = Slots((tuple(range(3)),)).on(torch.device("cpu")).evaluated
    assert small.competitors.tolist() == [[0, 1, 2]] * 3
    assert small.position.tolist() == [0, 1, 2]


# ---- many attacks


def test_the_module_given_is_left_alone_when_a_tied_file_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    # It goes on although another one could not be loaded into its module.
    first = OnePass(module, learning_rate=0.1)
    first.observe(*classes(0, 0))
    (tmp_path / "file").write_bytes(changed("a-gem", setting("memory/task", 0)))
    with pytest.raises(InputError):
        OnePass.load(tmp_path / "file", module)
    first.observe(*classes(0, 1))
