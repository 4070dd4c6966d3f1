"""The commit of a checkout of onepass, read without running what its repository configures.

A repository may name programs in its configuration (`core.fsmonitor`, filters, hooks), and git runs
them. So HEAD and references are read here. Git lists the commit's files from a repository of our
own, which only shares the objects: these are data.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from onepass.files import read_plain

WATCHED = (".py", ".toml")  # a new file with one of these endings is a change, too
_COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST = 2**26  # bytes of a list of references


def revision(package: Path) -> str | None:
    """The first 12 digits of the commit, with `+` if files of the package differ from it.

    None if this is no checkout of onepass.
    """
    root = package.parents[1]
    try:
        if (
            package != root / "src" / "onepass"
            or tomllib.loads(_text(root / "pyproject.toml"))["project"]["name"] != "onepass"
        ):
            return None
        own, shared = _git_folders(root / ".git")
        commit = _commit(own, shared)
        committed = _blobs(shared / "objects", commit)
        present = {
            path.relative_to(root).as_posix(): path
            for path in package.rglob("*")
            if path.is_file() and path.suffix in WATCHED
        }
        changed = present.keys() - committed.keys() or any(
            _blob(root / name) != blob for name, blob in committed.items()
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, subprocess.SubprocessError):
        return None  # there is no git, say
    return commit[:12] + ("+" if changed else "")


def _text(path: Path) -> str:
    return read_plain(path, LARGEST).decode()


def _git_folders(git: Path) -> tuple[Path, Path]:
    """The folder of this working tree, and the one that it shares with others of the repository."""
    if git.is_file():  # a further working tree
        git = git.parent / _text(git).removeprefix("gitdir:").strip()
    common = git / "commondir"
    return git, git / _text(common).strip() if common.is_file() else git


def _commit(own: Path, shared: Path) -> str:
    """What HEAD points to."""
    found, limit = _text(own / "HEAD").strip(), 5  # git follows as many references
    while not _COMMIT.fullmatch(found) and limit:
        name, limit = found.removeprefix("ref:").strip(), limit - 1
        if not name.startswith("refs/") or ".." in name:
            break
        places = [folder / name for folder in (own, shared) if (folder / name).is_file()]
        found = _text(places[0]).strip() if places else _packed(shared, name)
    if not _COMMIT.fullmatch(found):
        raise ValueError("HEAD points to no commit")
    return found


def _packed(shared: Path, name: str) -> str:
    for line in _text(shared / "packed-refs").splitlines():
        commit, _, of = line.partition(" ")
        if of == name:
            return commit
    raise KeyError(name)


def _blobs(objects: Path, commit: str) -> dict[str, str]:
    """The files of the package in a commit, each with the hash of its content."""
    with tempfile.TemporaryDirectory(prefix="onepass-") as folder:
        for name in ("objects", "refs"):
            (Path(folder) / name).mkdir()
        (Path(folder) / "HEAD").write_text("ref: refs/heads/none\n")
        settings = {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_DIR": folder,
            "GIT_OBJECT_DIRECTORY": str(objects.resolve()),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "ls-tree", "-r", "-z", "--full-tree", commit, "--", "src/onepass"]
        listed = subprocess.run(
            command, cwd=folder, env=clean | settings, capture_output=True, check=True, timeout=10
        ).stdout.decode()
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return {name: about.split()[2] for about, _, name in entries}


def _blob(path: Path) -> str:
    """The name that git gives to the content of a file."""
    if not path.is_file():
        return ""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
