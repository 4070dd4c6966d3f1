"""`onepass` and `python -m onepass`."""

from __future__ import annotations

import sys

from onepass.output import open_closed_streams


def main() -> None:
    open_closed_streams()
    try:
        from onepass import cli  # takes a second or two: torch
        from onepass.stopping import end

        try:
            cli.main()
        except SystemExit as stop:
            end(stop.code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
