"""Mirrors of data sets on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler

import pytest

from onepass.studies import fetch


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


class Trickling(Quiet):
    """Sends a byte now and then."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with suppress(OSError):  # the client has gone
            while not self.server.ended:  # type: ignore[attr-defined]
                self.wfile.write(b".")
                time.sleep(0.02)


def serve(
    patch: pytest.MonkeyPatch, name: str, mirrors: list[tuple[str, Mapping[str, str]]]
) -> None:
    patch.setitem(
        fetch.DATA_SETS, name, replace(fetch.DATA_SETS[name], mirrors=tuple(mirrors), on_npm=False)
    )
