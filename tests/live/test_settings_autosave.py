"""The place for autosaves is made before anything is learnt, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from onepass import InputError, OnePass
from tests.live.altered_files import changed, setting
from tests.live.refused_calls import Rich, batch, check_sentence
from tests.live.saved_cases import content_of
from tests.live.saved_learners import MIDDLE, classes, net


def test_a_place_for_autosaves_that_cannot_be_written_is_refused_before_anything_is_learnt(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError) as caught:
        OnePass(Rich(), learning_rate=0.1, autosave=tmp_path / "file" / "saved").observe(*batch())
    check_sentence(caught.value, ("cannot write", "choose another"))


@pytest.mark.parametrize("wrap", [True, False])
def test_a_learner_that_is_refused_has_made_no_folder_for_autosaves(
    wrap: bool, tmp_path: Path
) -> None:
    path, autosave = tmp_path / "altered", tmp_path / "two" / "folders" / "file"
    path.write_bytes(changed("a-gem", setting("memory/task", 0)))
    if wrap:
        with pytest.raises(InputError, match="no trainable parameters"):
            OnePass(nn.ReLU(), learning_rate=0.1, autosave=autosave)
    else:
        with pytest.raises(InputError, match="was altered"):
            OnePass.load(path, net(), autosave=autosave)
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_for_autosaves_of_a_loaded_learner_that_cannot_be_written_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "saved").write_bytes(content_of("a-gem", MIDDLE))
    with pytest.raises(InputError) as caught:
        OnePass.load(tmp_path / "saved", net(), autosave=tmp_path / "saved" / "file")
    check_sentence(caught.value, ("cannot write", "choose another"))


@pytest.mark.parametrize("load", [False, True])
def test_a_folder_for_autosaves_is_made_before_anything_is_learnt(
    load: bool, tmp_path: Path
) -> None:
    path, autosave = tmp_path / "saved", tmp_path / "two" / "folders" / "file"
    path.write_bytes(content_of("a-gem", MIDDLE))
    if load:
        learner = OnePass.load(path, net(), autosave=autosave)
    else:
        learner = OnePass(net(), learning_rate=0.1, autosave=autosave)
    assert autosave.parent.is_dir()
    learner.observe(*classes(1, 1))
    assert autosave.is_file()
