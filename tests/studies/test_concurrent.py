"""What is done to the file of a study while it runs is noticed, and nothing finished is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from onepass.errors import InputError
from onepass.studies.folder import FILE
from onepass.studies.store import Store
from tests.commands import TINY, exit_code
from tests.studies.stored import MADE, RUNS, fill, record, records_in, study


@pytest.mark.usefixtures("locks_that_do_nothing")
def test_a_driver_that_another_one_has_written_beside_stops_and_nothing_is_damaged(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    with study(tmp_path) as first, study(tmp_path) as second:
        first.plan([RUNS])
        for change in (
            lambda: second.plan([RUNS]),
            lambda: second.note(packing={}),
            lambda: second.plan([RUNS[:1]]),
        ):
            with pytest.raises(InputError, match="another process has written to the study in"):
                change()
        first.add({unit.id: record(unit) for unit in RUNS}, MADE)
    assert len(records_in(tmp_path)) == 4


@pytest.mark.parametrize("when", ["before the end", "at the end"])
def test_a_file_that_is_removed_while_the_study_runs_is_put_back(when: str, tmp_path: Path) -> None:
    fill(tmp_path)

    def run() -> None:
        with study(tmp_path) as opened:
            opened.plan([RUNS])
            (tmp_path / FILE).unlink()
            if when == "before the end":
                with pytest.raises(InputError, match="was removed"):
                    opened.add({RUNS[0].id: record(RUNS[0])}, MADE)
                opened.add({RUNS[1].id: record(RUNS[1])}, MADE)

    why = "was removed or replaced while the study ran; all that is finished was saved as"
    with pytest.raises(InputError, match=why):
        run()
    assert len(records_in(tmp_path)) == (4 if when == "before the end" else 2)
    with study(tmp_path) as opened:
        assert len(opened.contents.entries) == 4


def test_a_private_file_that_is_put_back_is_private(tmp_path: Path) -> None:
    def run() -> None:
        with study(fill(tmp_path)) as opened:
            (tmp_path / FILE).chmod(0o600)
            opened.plan([RUNS])
            (tmp_path / FILE).unlink()

    with pytest.raises(InputError, match="was removed or replaced"):
        run()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_moved_while_the_study_runs_has_all_that_is_finished(
    tmp_path: Path,
) -> None:
    def run() -> None:
        with study(fill(tmp_path / "before")) as opened:
            (tmp_path / "before").rename(tmp_path / "after")
            opened.plan([RUNS])

    why = r"was removed or moved while .* give the same command with its new place"
    with pytest.raises(InputError, match=why):
        run()
    assert not (tmp_path / "before").exists()
    assert len(records_in(tmp_path / "after")) == 2
    with study(tmp_path / "after") as opened:
        assert len(opened.contents.entries) == 4


def test_a_file_that_is_replaced_while_the_study_runs_stays_and_ours_is_saved_beside_it(
    tmp_path: Path,
) -> None:
    other = fill(tmp_path / "other")

    def run() -> None:
        with study(tmp_path / "ours") as opened:
            opened.plan([RUNS])
            shutil.copy(other / FILE, tmp_path / "new")
            os.replace(tmp_path / "new", tmp_path / "ours" / FILE)
            opened.add({unit.id: record(unit) for unit in RUNS}, MADE)

    with pytest.raises(InputError, match=r"saved as .*study.sqlite.kept"):
        run()
    assert (tmp_path / "ours" / FILE).read_bytes() == (other / FILE).read_bytes()
    os.replace(tmp_path / "ours" / f"{FILE}.kept", tmp_path / "ours" / FILE)
    assert len(records_in(tmp_path / "ours")) == 2


def test_neither_the_users_nor_an_earlier_kept_file_is_replaced(tmp_path: Path) -> None:
    other = fill(tmp_path / "other") / FILE
    (tmp_path / f"{FILE}.kept").write_bytes(b"mine")
    (tmp_path / f"{FILE}.kept-2").symlink_to("nowhere")

    def run() -> None:
        with study(tmp_path):
            os.replace(shutil.copy(other, tmp_path / "new"), tmp_path / FILE)

    for number in (3, 4):
        with pytest.raises(InputError, match=rf"saved as .*study.sqlite.kept-{number}:"):
            run()
    assert (tmp_path / f"{FILE}.kept").read_bytes() == b"mine"
    assert (tmp_path / f"{FILE}.kept-2").is_symlink()


def test_a_run_whose_file_is_removed_ends_with_a_sentence_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adding = Store.add

    def remove_and_add(self: Store, *arguments: object) -> None:
        monkeypatch.setattr(Store, "add", adding)
        (tmp_path / FILE).unlink()
        adding(self, *arguments)  # type: ignore[arg-type]

    command = (*TINY, "--out", str(tmp_path))
    monkeypatch.setattr(Store, "add", remove_and_add)
    assert exit_code(*command) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert "was removed" in said
    assert "Traceback" not in said
    before = len(records_in(tmp_path))
    assert before > 0
    assert exit_code(*command) == 0
    assert len(records_in(tmp_path)) > before
