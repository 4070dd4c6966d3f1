"""What the benchmarks share: arguments, a clock, and tables in Markdown."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the description as it is written."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def machine(device: str) -> str:
    """The name of the GPU, or "CPU", and the version of torch."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def now(device: str) -> float:
    """The time in seconds at which the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def heading(*names: str) -> tuple[str, str]:
    return row(*names), "|" + "---|" * len(names)


class Lines:
    """Lines that are printed as they come, and can be written to a file in the end."""

    def __init__(self) -> None:
        self.printed: list[str] = []

    def add(self, *lines: str) -> None:
        self.printed += lines
        print("\n".join(lines), flush=True)

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text("\n".join(self.printed) + "\n")
