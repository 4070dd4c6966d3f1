"""Data sets on mirrors of our own, and folders that may not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from onepass.studies import fetch
from tests.sentences import refusal_of


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def serve(
    patch: pytest.MonkeyPatch, name: str, mirrors: list[tuple[str, Mapping[str, str]]]
) -> None:
    changed = replace(fetch.DATA_SETS[name], mirrors=tuple(mirrors), on_npm=False)
    patch.setitem(fetch.DATA_SETS, name, changed)


def forbid(patch: pytest.MonkeyPatch, forbidden: Path) -> None:
    """As for a user without rights: what is in this folder cannot even be asked for."""
    real = Path.stat

    def stat(self: Path, **how: bool) -> object:
        if forbidden in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, **how)

    patch.setattr(Path, "stat", stat)


def refusal(data_set: str, data: str | None) -> str:
    """The one sentence with which a data set is not found."""
    return refusal_of(lambda: fetch.locate(data_set, data))
