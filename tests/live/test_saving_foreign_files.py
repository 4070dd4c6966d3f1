"""A file may come from elsewhere: it says what was learnt, and never where to write, how much to reserve or what to call."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from onepass import InputError, Memory, OnePass, OnePassClassifier
from onepass.engine.slots import Slots
from onepass.files import canonical, digest
from onepass.live import saving, storage
from onepass.live.saving import packed
from tests.fuzzing import in_a_process, outcome
from tests.live import attacking
from tests.live.altered_files import changed, refusal, setting, taken_apart
from tests.live.saved_cases import CASES, content_of
from tests.live.saved_learners import (
    MIDDLE,
    OPTIMIZERS,
    TASKS,
    Case,
    appearing,
    classes,
    net,
    square,
    values,
)

SAVED = Path(__file__).parent / "saved"  # by an earlier version
# ---- where to write, and how much


@pytest.mark.parametrize("where", ["own", "settings", "memory", "header"])
@pytest.mark.parametrize("wish", ["autosave", "watch", "loss", "module", "self"])
def test_a_file_cannot_name_what_is_written_or_called(
    where: str, wish: str, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], _: object) -> None:
        settings = about["settings"]
        {
            "own": settings["own"],
            "settings": settings,
            "memory": settings["memory"],
            "header": about,
        }[where][wish] = str(tmp_path / "victim" / "file")

    assert "altered" in refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)


def test_the_folder_in_a_file_is_never_made(tmp_path: Path) -> None:
    def change(about: dict[str, Any], _: object) -> None:
        about["settings"]["memory"] |= {
            "where": "disk",
            "folder": str(tmp_path / "victim"),
            "bytes": 2**40,
        }

    sentence = refusal(changed("a-gem", change), CASES["a-gem"], tmp_path)
    assert "where='disk' and folder='…'" in sentence
    assert "where='cpu'" in sentence
    for place in (
        {"where": "cpu"},
        {"where": "module"},
        {"where": "disk", "folder": tmp_path / "mine"},
    ):
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
    case = Case(
        "mega-1", {"memory": Memory(per_task=7, bytes=6000, where="disk", folder=tmp_path / "one")}
    )
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(tmp_path / "file")
    folder = {"folder": tmp_path / "other"} if place == "disk" else {}
    loaded = OnePass.load(tmp_path / "file", net(), where=place, **folder)
    assert loaded.plan.where == place
    assert case.run(loaded, MIDDLE) == case.run(learner, MIDDLE)
    assert taken_apart(packed(loaded))[1].keys() == taken_apart(packed(learner))[1].keys()


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
    (tmp_path / "file").write_bytes(
        changed("a-gem", lambda about, _: about["settings"]["memory"].update(limit))
    )
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
    (tmp_path / "file").write_bytes(
        changed("a-gem", lambda about, _: about["settings"]["memory"].update(bytes=2**50), stop=0)
    )
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


def test_lengths_depths_and_repetitions_are_bounded(tmp_path: Path) -> None:
    content, case = content_of("a-gem", MIDDLE), CASES["a-gem"]
    (length,) = struct.unpack("<Q", content[:8])
    text, rest = content[8 : 8 + length], content[8 + length :]
    for number in (0, 1, 2**31, 2**62, 2**64 - 1, len(content)):
        refusal(struct.pack("<Q", number) + content[8:], case, tmp_path)
    for other in (
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b"[" + b"[]," * 1_500_000 + b"[]]",
        b'{"__metadata__":{},' + text[1:],
        text.replace(b'"format\\":1', b'"format\\":1,\\"format\\":1'),
        text.replace(b'"format\\":1', b'"format\\": 1'),
    ):
        assert other != text
        refusal(struct.pack("<Q", len(other)) + other + rest, case, tmp_path)
    entries = json.loads(text)
    for change in (
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [0, 0]},
        {"data_offsets": [8, 0]},
        {"shape": [2**62, 2**62]},
        {"shape": [0, 2**62, 2**62]},
        {"shape": [1] * 500},
        {"shape": [True]},
        {"dtype": "F99"},
        {"more": 1},
    ):
        other = json.dumps(
            entries | {"module.0.weight": entries["module.0.weight"] | change}
        ).encode()
        refusal(struct.pack("<Q", len(other)) + other + rest, case, tmp_path)
    for other in (rest[:-1], rest + b"\0", b"", rest * 2):
        refusal(content[: 8 + length] + other, case, tmp_path)


@pytest.mark.parametrize(
    ("value", "comma"),
    [
        (r"\u007b\"a\":1}", r"\u002c"),
        (r"\u005b]", r"\u002c"),
        (r"1.5", r"\u002c"),
        (r"{\"a\":1}", "," + " " * 6),
        (r"[]", "," + " " * 14),
    ],
    ids=[
        "dictionaries as numbers",
        "lists as numbers",
        "commas as numbers",
        "dictionaries",
        "lists",
    ],
)
def test_the_values_of_a_header_are_counted_however_they_are_written(
    value: str, comma: str, tmp_path: Path
) -> None:
    count = 60_000_000 // len(value + comma)
    inner = rf"{{\"checksum\":\"\",\"format\":1,\"x\":[{(value + comma) * count}0]}}"
    header = f'{{"__metadata__":{{"onepass":"{inner}"}}}}'.encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    module = net()
    del inner, header

    def load() -> list[str]:
        return [outcome(lambda: OnePass.load(tmp_path / "file", module), InputError)]

    assert in_a_process(load, 600 * 2**20) == ["refused"]


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (
        tmp_path / "pipe",
        tmp_path / "link",
        Path("/dev/zero"),
        Path("/dev/null"),
        tmp_path,
    ):
        with pytest.raises(InputError, match="not a plain file"):
            OnePass.load(path, net())
    (tmp_path / "loop").symlink_to("loop")
    for odd in (tmp_path / "loop", tmp_path / ("x" * 300), "a\0b", tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"cannot (read|be)"):
            OnePass.load(odd, net())


def test_a_large_file_of_another_kind_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**42)
    began = time.monotonic()
    with pytest.raises(InputError, match="not a file that save"):
        OnePass.load(tmp_path / "large", net())
    content = content_of("a-gem", MIDDLE)
    with open(tmp_path / "large", "wb") as file:
        file.write(content)
        file.truncate(2**42)
    with pytest.raises(InputError, match="damaged"):
        OnePass.load(tmp_path / "large", net())
    assert time.monotonic() - began < 60


def test_a_header_of_many_tensors_is_refused_before_they_are_made(tmp_path: Path) -> None:
    about, _ = taken_apart(content_of("a-gem", MIDDLE))
    entries = [
        f'"{number:x}":{{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}'
        for number in range(500_000)
    ]
    about |= {"format": 1, "tensors": "0" * 64}
    own = json.dumps({"onepass": canonical(about | {"checksum": digest(canonical(about))})})
    header = ("{" + ",".join([f'"__metadata__":{own}', *entries]) + "}").encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    module = net()
    del entries, header

    def load() -> list[str]:
        return [outcome(lambda: OnePass.load(tmp_path / "file", module), InputError)]

    assert in_a_process(load, 2**29) == ["refused"]


@pytest.mark.parametrize("when", ["a report", "the end of a task"])
def test_examples_in_a_file_that_the_module_refuses_are_one_sentence(
    when: str, tmp_path: Path
) -> None:
    def change(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["memory.examples.x"].fill_(1000)  # words that the module does not have

    case = CASES["mega-1, two inputs"]
    (tmp_path / "file").write_bytes(changed("mega-1, two inputs", change))
    learner = OnePass.load(
        tmp_path / "file", case.build(), **({"watch": print} if when == "the end of a task" else {})
    )
    before = learner.segment, learner.batches
    with pytest.raises(
        InputError, match=r"refused examples of the memory .*forgetting cannot be measured"
    ):
        learner.end_task() if when == "the end of a task" else learner.report()
    assert (learner.segment, learner.batches) == before


def test_a_module_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content_of("a-gem", MIDDLE))
    with pytest.raises(InputError, match=r"nn\.Module"):
        OnePass.load(tmp_path / "file", "module")  # type: ignore[arg-type]


# ---- what is still loaded

OLD = {
    "a-gem": Case(optimizer=OPTIMIZERS["Adam"], tasks=TASKS),
    "icarl": Case("icarl", tasks=TASKS),
    "ewc": Case("ewc", optimizer=OPTIMIZERS["momentum"]),
    "grown": Case("er", {"grow": True}, partial(net, 2), appearing, OPTIMIZERS["Adam"]),
    "task-free": Case("er", {"task_free": True, "memory": Memory(examples=9, recent=1)}),
    "disk": Case(
        "mega-1", {"memory": Memory(per_task=7, bytes=5000, where="disk", folder="memory")}
    ),
    "own-loss": Case("rwalk", data=values, loss=square),
}


@pytest.mark.parametrize("name", OLD)
def test_a_file_of_an_earlier_version_is_loaded_and_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a relative folder is
    learner = OLD[name].load(SAVED / f"{name}.safetensors")
    (was, tensors), (now, same) = (
        taken_apart(content)
        for content in ((SAVED / f"{name}.safetensors").read_bytes(), packed(learner))
    )
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensor, same[key]) for key, tensor in tensors.items())
    assert {key for key in was if was[key] != now[key]} <= {"settings"}
    OLD[name].run(learner, MIDDLE)
    assert learner.steps == 9


def test_a_head_that_is_not_the_last_layer_is_loaded(tmp_path: Path) -> None:
    case = Case(settings={"grow": "0"})
    learner = case.start()
    case.run(learner, 0, MIDDLE)
    learner.save(tmp_path / "file")
    assert case.run(case.load(tmp_path / "file"), MIDDLE) == case.run(learner, MIDDLE)


def test_a_scheduler_and_other_settings_of_the_optimizer_go_on(tmp_path: Path) -> None:
    module = net()
    adam = optim.Adam(module.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.ExponentialLR(adam, 0.5)
    learner = OnePass(module, optimizer=adam)
    learner.observe(*classes(0, 0))
    scheduler.step()
    learner.save(tmp_path / "file")
    other = net()
    again = optim.Adam(other.parameters(), lr=7, betas=(0.1, 0.2), foreach=False)
    loaded = OnePass.load(tmp_path / "file", other, optimizer=again)
    assert again.param_groups[0]["lr"] == 0.05
    assert again.param_groups[0]["betas"] == (0.9, 0.999)
    assert again.param_groups[0]["initial_lr"] == 0.1
    assert again.param_groups[0]["foreach"] is False, "how it is computed is the caller's"
    assert loaded.observe(*classes(0, 1)) == learner.observe(*classes(0, 1))


def test_an_optimizer_of_ones_own_that_refuses_its_state_is_one_sentence(tmp_path: Path) -> None:
    class Own(optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("mine")

    module = net()
    learner = OnePass(module, optimizer=Own(module.parameters(), lr=0.1))
    learner.save(tmp_path / "file")
    other = net()
    with pytest.raises(InputError, match="optimizer"):
        OnePass.load(tmp_path / "file", other, optimizer=Own(other.parameters(), lr=0.1))


def test_numbers_that_a_file_cannot_hold_do_not_stop_a_save(tmp_path: Path) -> None:
    module = net()
    sgd = optim.SGD(module.parameters(), lr=0.1)
    learner = OnePass(module, optimizer=sgd)
    learner.observe(*classes(0, 0))
    learner._watch.best = {0: 0.5, 1: float("-inf")}
    learner.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    assert taken_apart(before)[0]["best"] == [[0, 0.5]]
    sgd.param_groups[0]["lr"] = float("inf")
    with pytest.raises(InputError, match="'lr' of SGD cannot be saved: it is inf"):
        learner.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before


def test_a_classifier_with_its_memory_on_disk_is_pickled_and_copied_as_before(
    tmp_path: Path,
) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 3
    learner = OnePassClassifier(
        memory=Memory(bytes=10**5, where="disk", folder=tmp_path / "memory"), random_state=0
    )
    learner.partial_fit(x, y, task_ends=True)
    for other in (pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner)):
        assert str(other.learner_.plan.folder) == str(tmp_path / "memory")
        assert packed(other.learner_) == packed(learner.learner_)
        other.partial_fit(x, y)
    learner.partial_fit(x, y)
    assert packed(other.learner_) == packed(learner.learner_)


def test_one_head_of_many_classes_takes_no_table_of_its_square() -> None:
    competition = Slots((tuple(range(100_000)),)).on(torch.device("cpu"))
    assert not competition.evaluated.partial
    assert competition.evaluated.competitors.untyped_storage().nbytes() == 800_000
    small = Slots((tuple(range(3)),)).on(torch.device("cpu")).evaluated
    assert small.competitors.tolist() == [[0, 1, 2]] * 3
    assert small.position.tolist() == [0, 1, 2]


# ---- many attacks


def attacked(folder: Path, first: int, last: int) -> Counter[str]:
    """What became of these attacks, each in a process with a memory limit and a clock."""
    found: Counter[str] = Counter()
    while first < last:
        command = [
            sys.executable,
            "-m",
            "tests.live.attacking",
            str(folder / f"from {first}"),
            str(first),
            str(last),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for line in done.stdout.splitlines():
            number, _, rest = line.partition(" ")
            first = int(number) + 1
            what = rest.rpartition("] ")[2] if rest else "died"
            found["refuses batches" if what.startswith("refuses batches: ") else what] += 1
        if done.returncode == 0:
            break
        assert done.stdout.endswith(" "), done.stderr
    return found


def test_an_attack_that_uses_up_the_memory_is_not_taken_for_one_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(saving, "_made", too_large)
    (tmp_path / "in").mkdir()
    found = attacking.outcome("a-gem", content_of("a-gem", MIDDLE), tmp_path)
    assert "there is not enough memory to load" in found
    assert found != "refused"


def test_hundreds_of_attacks_end_in_a_sentence_or_a_learner_that_goes_on(tmp_path: Path) -> None:
    found = attacked(tmp_path, 0, 300)
    assert found.keys() <= {"refused", "goes on", "refuses batches"}, found
    assert found.total() == 300
    assert found["goes on"] > 10, "some changes are harmless"


@pytest.mark.long
def test_thousands_of_attacks_end_in_a_sentence_or_a_learner_that_goes_on(tmp_path: Path) -> None:
    found = attacked(tmp_path, 10_000, 16_000)
    assert found.keys() <= {"refused", "goes on", "refuses batches"}, found
    assert found.total() == 6000


def test_the_module_given_is_left_alone_when_a_tied_file_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    first = OnePass(
        module, learning_rate=0.1
    )  # which goes on although another one could not be loaded into its module
    first.observe(*classes(0, 0))
    (tmp_path / "file").write_bytes(changed("a-gem", setting("memory/task", 0)))
    with pytest.raises(InputError):
        OnePass.load(tmp_path / "file", module)
    first.observe(*classes(0, 1))
