"""`onepass` and `python -m onepass`."""

from __future__ import annotations

from onepass.output import open_closed_streams
from onepass.stopping import end


def main() -> None:
    open_closed_streams()
    try:
        from onepass import cli  # takes a second or two: torch

        try:
            cli.main()
        except SystemExit as stop:
            end(stop.code)
    except KeyboardInterrupt:
        end(130)


if __name__ == "__main__":
    main()
