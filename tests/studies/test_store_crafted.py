"""A study that was written to deceive is refused with one sentence, or shown."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from onepass.cli import main
from tests.commands import setting
from tests.fuzzing import in_a_process, limited
from tests.studies.crafted import many_tensors, mutations, taken_from, written_to

SMALL = [
    *("run", "quickstart", "--methods", "van,a-gem", "--seeds", "1", "--workers", "1"),
    *setting("train_examples=20", "test_examples=10", "hidden=[4]"),
    *setting("grids.van.learning_rate=0.1", "grids.a-gem.learning_rate=0.1"),
]
READING = (
    ("status", "{}"),
    ("table", "{}", "--json", "{}/../t.json", "--csv", "{}/../t.csv"),
    ("show", "{}"),
    ("show", "{}", "{unit}"),
    ("verify", "{}"),
    ("companions", "{}", "--json", "{}/../c.json"),
    ("merge", "{}/../merged", "{}", "{sound}"),
)
RESUMING = ("run", "--out", "{}", "--workers", "1")
SECONDS = 60  # of any command, on a machine that does other things


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "study"
    assert ended([*SMALL, "--out", str(folder)]) == "0"
    return folder


def ended(command: list[str]) -> str:
    """The exit code of a command, or what it was that came instead."""
    try:
        with limited(SECONDS):
            main(command)
    except SystemExit as end:
        return str(end.code or 0)
    except BaseException as reason:  # this is what is looked for
        return f"{type(reason).__name__}: {reason}"[:200]
    return "no end"


def attack(
    sound: Path, folder: Path, chosen: list[int] | None, commands: tuple[tuple[str, ...], ...]
) -> tuple[Counter[str], list[str]]:
    """What became of commands on crafted studies."""
    counts, broken = Counter[str](), []
    names = {"unit": taken_from(sound).records[0]["unit"], "sound": sound}
    for number, (name, change) in enumerate(mutations()):
        if chosen is not None and number not in chosen:
            continue
        study = taken_from(sound)
        change(study)
        written_to(folder / "study", study)
        for command in commands:
            shutil.rmtree(folder / "merged", ignore_errors=True)
            began = time.monotonic()
            found = ended([word.format(folder / "study", **names) for word in command])
            counts[found if found in ("0", "1", "2") else "broken"] += 1
            if found not in ("0", "1", "2"):
                took = f"{time.monotonic() - began:.1f} s"
                broken.append(f"{command[0]} with {name}: {found} ({took})")
    return counts, broken


def test_crafted_studies_are_refused_or_shown(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, _ in mutations()]
    chosen = random.Random(0).sample(range(len(names)), 60)
    chosen.append(names.index(f"recipe.hidden={repr([2**31] * 40)[:30]}"))
    counts, broken = attack(sound, tmp_path, chosen, READING)
    assert broken == []
    assert counts.total() > 400
    assert counts["2"] > 250
    assert "not foreseen" not in capsys.readouterr().err


@pytest.mark.parametrize("table", ["study", "units"])
@pytest.mark.parametrize("command", ["status", "rescue"])
def test_rows_of_many_dictionaries_take_little_memory(
    command: str, table: str, sound: Path, tmp_path: Path
) -> None:
    value = [{"a": 1} for _ in range(2**20)]
    study = taken_from(sound)
    for number in range(3):
        if table == "study":
            study.study[f"more {number}"] = value
        else:
            last = study.units[-1]
            configuration = last["configuration"] | {"seed": 9 + number, "more": value}
            study.units.append({**last, "configuration": configuration, "changed": True})
    study.study["counts"]["units"] = len(study.units)
    written_to(tmp_path / "study", study)
    del study, value
    words, code = [command, str(tmp_path / "study")], "2"
    if command == "rescue":
        words, code = [*words, str(tmp_path / "rescued")], "1"
    assert in_a_process(lambda: [ended(words)], 2**29) == [code]


def test_a_file_of_many_arrays_takes_little_memory(sound: Path, tmp_path: Path) -> None:
    study = taken_from(sound)
    study.raw = dict.fromkeys(study.arrays, many_tensors())
    written_to(tmp_path / "study", study)
    del study
    assert in_a_process(lambda: [ended(["table", str(tmp_path / "study")])], 2**28) == ["2"]


MANY = [number / 1000 for number in range(1, 99_001)]


@pytest.mark.parametrize(
    ("methods", "grid", "code"),
    [
        (["van"] * 1000, {"learning_rate": MANY}, "0"),
        ([f"m{number}" for number in range(300)], {"learning_rate": MANY[:1000]}, "2"),
        ([f"m{number}" for number in range(1000)], {"learning_rate": MANY[:98]}, "0"),
        (["van"], {f"h{number}": MANY[:1] for number in range(99)} | {"learning_rate": MANY}, "0"),
    ],
    ids=["a method 1000 times", "too many units", "1000 methods", "many points"],
)
def test_the_status_of_a_study_that_plans_much_takes_seconds(
    methods: list[str], grid: dict[str, list[float]], code: str, sound: Path, tmp_path: Path
) -> None:
    study = taken_from(sound)
    study.study["recipe"] |= {"methods": methods, "grids": dict.fromkeys(methods, grid)}
    last = study.units[-1]
    for seed in range(9, 5009):
        configuration = last["configuration"] | {"seed": seed}
        study.units.append({**last, "configuration": configuration, "changed": True})
    study.study["counts"]["units"] = len(study.units)
    written_to(tmp_path, study)
    began = time.process_time()
    assert ended(["status", str(tmp_path)]) == code
    assert time.process_time() - began < 10


@pytest.mark.long
@pytest.mark.parametrize("resuming", [False, True])
def test_every_crafted_study_is_refused_or_shown(
    resuming: bool, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, broken = attack(sound, tmp_path, None, (RESUMING,) if resuming else READING)
    said = capsys.readouterr().err
    with capsys.disabled():
        print(dict(counts))
    assert broken == []
    assert "not foreseen" not in said
