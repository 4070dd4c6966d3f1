"""Where commands print: messages on standard error, tables on standard output."""

from __future__ import annotations

from rich.console import Console

from onepass import output

output.forget_odd_sizes()  # which a console reads when it is made
screen = Console(stderr=True, markup=False, highlight=False, emoji=False)


def wide(least: int = 0) -> Console:
    """Standard output, at least `least` columns wide.

    Where it is no terminal, lines are not cut at 80 columns.
    """
    terminal = Console()
    width = max(terminal.width, least if terminal.is_terminal else 120)
    return Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
