"""The revision of a checkout is read, and nothing that its repository configures is run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from onepass.studies import checkout, provenance
from tests.fuzzing import limited

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout with one commit, and its package."""
    made = tmp_path / "root" / "src" / "onepass"
    (made / "inner").mkdir(parents=True)
    (made / "errors.py").write_text("one = 1\n")
    (made / "inner" / "é.py").write_text("two = 2\n")
    (tmp_path / "root" / "pyproject.toml").write_text('[project]\nname = "onepass"\n')
    git(tmp_path / "root", "init", "-q")
    git(tmp_path / "root", "add", ".")
    git(tmp_path / "root", "commit", "-qm", "first")
    return made


def head(package: Path) -> str:
    return git(package, "rev-parse", "HEAD")[:12]


def test_a_clean_checkout_is_its_commit_and_a_changed_one_has_a_plus(package: Path) -> None:
    assert checkout.revision(package) == head(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "errors.pyc").touch()
    assert checkout.revision(package) == head(package)
    for change in (
        lambda: (package / "errors.py").write_text("one = 3\n"),
        lambda: (package / "errors.py").unlink(),
        lambda: (package / "new.py").touch(),
    ):
        change()
        assert checkout.revision(package) == head(package) + "+"
        git(package, "add", "-A")
        assert checkout.revision(package) == head(package) + "+", "what is staged is a change"
        git(package, "commit", "-qm", "next")
        assert checkout.revision(package) == head(package)


def test_packed_references_detached_heads_and_further_working_trees_are_read(
    package: Path, tmp_path: Path
) -> None:
    expected = head(package)
    git(package, "pack-refs", "--all")
    git(package, "gc", "-q")
    assert checkout.revision(package) == expected
    git(package, "worktree", "add", "-q", str(tmp_path / "further"), "-b", "other")
    assert checkout.revision(tmp_path / "further" / "src" / "onepass") == expected
    git(package, "checkout", "-q", "--detach")
    assert checkout.revision(package) == expected


def test_nothing_that_the_repository_configures_is_run(package: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    (package.parents[1] / ".gitattributes").write_text("*.py filter=mine diff=mine\n")
    git(package, "add", "-A")
    git(package, "commit", "-qm", "attributes")
    commit = head(package)
    programs = ("filter.mine.clean", "filter.mine.process", "diff.mine.textconv", "diff.external")
    for key in (*programs, "core.fsmonitor", "core.pager", "core.sshCommand"):
        git(package, "config", key, str(program))
    (package / "errors.py").write_text("one = 4\n")
    assert checkout.revision(package) == commit + "+"
    assert not (tmp_path / "ran").exists()
    subprocess.run(
        ["git", "-C", str(package), "status", "--porcelain"], capture_output=True, check=False
    )
    assert (tmp_path / "ran").exists(), "git status runs it: this test shows what it says"


def test_missing_objects_are_not_fetched_by_a_program_of_the_repository(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial clone fetches what it lacks from a remote, whose address may be a command."""
    root, commit = package.parents[1], git(package, "rev-parse", "HEAD")
    tree = git(package, "rev-parse", "HEAD:src/onepass")
    (root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::sh -c touch% {tmp_path}/ran",
        "protocol.ext.allow": "always",
    }
    for key, value in settings.items():
        git(package, "config", key, value)
    monkeypatch.setenv("GIT_DIR", str(root / ".git"))
    assert checkout.revision(package) is None
    assert not (tmp_path / "ran").exists()
    subprocess.run(
        ["git", "-C", str(root), "ls-tree", "-r", commit], capture_output=True, check=False
    )
    assert (tmp_path / "ran").exists(), "git ls-tree runs it: this test shows what it says"


@pytest.mark.parametrize(
    "harm", ["name", "brackets", "head", "no git", "place", "commit", "gitdir", "pipe", "device"]
)
def test_what_is_no_checkout_of_onepass_has_no_revision(harm: str, package: Path) -> None:
    root = package.parents[1]
    if harm == "name":
        (root / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    elif harm == "brackets":
        (root / "pyproject.toml").write_text("x = " + "[" * 5000)
    elif harm == "head":
        (root / ".git" / "HEAD").write_text("ref: refs/../../../etc/passwd\n")
    elif harm == "no git":
        shutil.rmtree(root / ".git")
    elif harm == "place":
        package = package.rename(root / "onepass")
    elif harm == "commit":
        (root / ".git" / "HEAD").write_text("0" * 40)
    elif harm == "gitdir":
        shutil.rmtree(root / ".git")
        (root / ".git").write_bytes(b"\xff\0")
    elif harm == "pipe":
        (root / ".git" / "HEAD").unlink()
        os.mkfifo(root / ".git" / "HEAD")
    else:
        (root / ".git" / "HEAD").unlink()
        (root / ".git" / "HEAD").symlink_to("/dev/zero")
    with limited(10):
        assert checkout.revision(package) is None


def test_the_name_of_the_processor_is_found_without_starting_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SECURITY.md names the programs that are started."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(platform, "_uname_cache", None, raising=False)
    for cpuinfo, name in {
        "processor\t: 0\nmodel name\t: A Processor: 3 GHz\n": "A Processor: 3 GHz",
        "processor\t: 0\nCPU part\t: 0xd0c\n": platform.machine(),  # as on ARM
    }.items():
        monkeypatch.setattr(Path, "read_text", lambda _, text=cpuinfo: text)
        assert provenance._device("cpu") == name


def test_the_package_has_a_revision_wherever_it_is() -> None:
    assert provenance.revision.__wrapped__()
