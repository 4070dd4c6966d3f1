"""The current model as a file that other programs can run."""

from __future__ import annotations

import copy
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onepass.errors import InputError, first_line
from onepass.files import StorageError, check_writable, make_folder, resolved, write


def written(path: Path, content: bytes, otherwise: str) -> None:
    """Write a file whole or not at all; `otherwise` says what is true if that fails."""
    try:
        write(path, content)
    except StorageError as reason:  # whose advice is for a command
        why = str(reason).partition(": make room")[0]
        raise InputError(f"{why}: make room or choose another place; {otherwise}") from None


def export(module: nn.Module, inputs: list[Tensor], keywords: tuple[str, ...], path: Path) -> None:
    """Write the module in evaluation mode with a free batch size; it is not touched itself.

    By `torch.export`, or as ONNX.
    """
    onnx = path.suffix == ".onnx"
    if onnx and not (find_spec("onnx") and find_spec("onnxscript")):
        what = "exporting to ONNX needs the packages onnx and onnxscript"
        raise InputError(f"{what}: install them, or export to another suffix by torch.export")
    check_writable(path)
    free = {0: torch.export.Dim.DYNAMIC}
    shapes: Any = dict.fromkeys(keywords, free) if keywords else (free,) * len(inputs)
    positional = () if keywords else tuple(inputs)
    named = dict(zip(keywords, inputs, strict=True)) if keywords else {}
    try:
        program = torch.export.export(
            copy.deepcopy(module).eval(), positional, named, dynamic_shapes=shapes
        )
    except Exception as reason:  # whatever cannot be copied, or the exporter could not follow
        why = f"torch.export cannot follow the module ({first_line(reason)})"
        raise InputError(f"{why}: nothing was written") from reason
    try:
        # Not beside the target, where a kill would leave it.
        with tempfile.TemporaryDirectory(prefix="onepass-") as folder:
            temporary = Path(folder) / path.name
            if onnx:
                torch.onnx.export(
                    program, (), str(temporary), dynamo=True, verbose=False, external_data=False
                )
            else:
                torch.export.save(program, temporary)
            make_folder(resolved(path).parent)
            written(path, temporary.read_bytes(), "nothing was exported")
    except OSError as reason:
        why = f"cannot write {path} ({reason.strerror or reason})"
        how = "make room or choose another place; nothing was exported"
        raise InputError(f"{why}: {how}") from None
    except InputError:
        raise
    except Exception as reason:
        why = f"the model cannot be written in this format ({first_line(reason)})"
        raise InputError(f"{why}: nothing was written") from reason
