"""onepass learns from a stream of tasks in a single pass and does not forget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepass.errors import InputError as InputError
    from onepass.errors import LearntError as LearntError
    from onepass.live.classifier import OnePassClassifier as OnePassClassifier
    from onepass.live.plan import Memory as Memory
    from onepass.live.watching import LiveView as LiveView
    from onepass.live.watching import TensorBoard as TensorBoard
    from onepass.live.wrapper import OnePass as OnePass

_HOMES = {
    "InputError": "onepass.errors",
    "LearntError": "onepass.errors",
    "LiveView": "onepass.live.watching",
    "Memory": "onepass.live.plan",
    "OnePass": "onepass.live.wrapper",
    "OnePassClassifier": "onepass.live.classifier",
    "TensorBoard": "onepass.live.watching",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Imported on first use: a command that only reads results needs none of them.
    if name not in _HOMES:
        raise AttributeError(f"module 'onepass' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
