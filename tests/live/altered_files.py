"""Files that were altered, and the sentences with which they are refused."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from onepass import OnePass
from onepass.files import canonical, digest
from tests.live.comparing import same
from tests.live.saved_cases import content_of
from tests.live.saved_learners import MIDDLE, Case
from tests.sentences import refusal_of

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def refusal(content: bytes, case: Case, here: Path, **given: Any) -> str:
    """The sentence with which a file is refused; module and optimizer are left alone."""
    path, module = here / "file", case.build()
    path.write_bytes(content)
    given = case.given(module) | given
    before = shape_of(module, given.get("optimizer"))
    sentence = refusal_of(lambda: OnePass.load(path, module, **given))
    assert same(before, shape_of(module, given.get("optimizer")))
    assert list(here.iterdir()) == [path]
    assert 15 < len(sentence) < 1000
    return sentence


def changed(name: str, change: Change, stop: int = MIDDLE) -> bytes:
    about, tensors = taken_apart(content_of(name, stop))
    change(about, tensors)
    return put_together(about, tensors)


def setting(place: str, value: Any) -> Change:
    def change(about: dict[str, Any], _: object) -> None:
        *path, key = place.split("/")
        holder: Any = about
        for part in path:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        holder[int(key) if isinstance(holder, list) else key] = value

    return change


def taken_apart(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    about: dict[str, Any] = json.loads(metadata["onepass"])
    del about["checksum"], about["tensors"]
    return about, safetensors.torch.load(content)


def put_together(about: Any, tensors: dict[str, Tensor]) -> bytes:
    """A file with the right checksums, whatever it says."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    if isinstance(about, dict):
        about = about | {"tensors": about.get("tensors", found.hexdigest())}
        about = about | {"checksum": about.get("checksum", digest(canonical(about)))}
    return safetensors.torch.save(tensors, metadata={"onepass": canonical(about)})


def shape_of(module: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """All that a load may not touch if it is refused."""
    values = {
        name: (tensor.detach().clone(), tensor.requires_grad, id(tensor))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    modes = [(part.training, getattr(part, "out_features", None)) for part in module.modules()]
    if optimizer is None:
        return values, modes
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return values, modes, repr(optimizer.state_dict()), groups
