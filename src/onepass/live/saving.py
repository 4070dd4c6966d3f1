"""Saving a learner in the middle of its stream: one safetensors file with a JSON header, no pickle.

The file is written under a temporary name, flushed and renamed, so a process that is killed leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from onepass.errors import InputError
from onepass.files import StorageError, canonical, digest, write
from onepass.learners import method
from onepass.live.growth import check_head, grow
from onepass.live.inputs import Examples
from onepass.live.memory import Memory
from onepass.live.optimisers import check_optimizer, check_saved, optimizer_state, restore_optimizer
from onepass.live.wrapper import OnePass
from onepass.streams.slots import Slots

FORMAT = 1
AGAIN = {"optimizer", "loss", "watch", "watch_every", "autosave", "autosave_every"}  # what a file cannot hold


def save(owner: OnePass, path: Path) -> None:
    """Write everything that decides how learning goes on."""
    owner.fleet.intact()
    try:
        write(path, packed(owner))
    except StorageError as reason:  # whose advice is for a command
        why = str(reason).partition(": make room")[0]
        raise InputError(f"{why}: make room or choose another place; what was saved before is still there") from None


def packed(owner: OnePass) -> bytes:
    """The content of the file."""
    fleet, memory = owner.fleet, owner.memory
    parts: dict[str, Mapping[str, Tensor]] = {
        "module": {name: p.detach() for name, p in [*owner.module.named_parameters(), *owner.module.named_buffers()]},
        "learner": owner.learner.state(),
        "memory": memory.state() if memory is not None else {},
        "sample": {f"{i:03d}": tensor for i, tensor in enumerate(owner._sample)},
    }
    optimizer = None
    if fleet.optimizer is not None:
        parts["optimizer"], optimizer = optimizer_state(fleet.optimizer)
    tensors = {f"{part}.{name}": t.detach().cpu().contiguous().clone() for part, state in parts.items() for name, t in state.items()}
    about = {
        "format": FORMAT,
        "settings": settings(owner),
        "own_loss": not owner.classifies,
        "optimizer": optimizer,
        "fleet": fleet.counters(),
        "learner": owner.learner.counters(),
        "memory": memory.counters() if memory is not None else None,
        "outputs": owner.outputs,
        "examples": None if owner.examples is None else _described(owner.examples),
        "replays": sorted(fleet.replays),
        "segment": owner.segment,
        "batches": owner.batches,
        "task": owner.task,
        "best": [[group, score] for group, score in owner._watch.best.items()],
        "tensors": _digest(tensors),
    }
    return safetensors.torch.save(tensors, metadata={"onepass": canonical(about | {"checksum": digest(canonical(about))})})


def settings(owner: OnePass) -> dict[str, Any]:
    """What `OnePass` was made with, as JSON."""
    plan = asdict(owner.plan)
    if not plan["held_out"]:
        del plan["held_out"]  # as in older files
    return {
        "method": owner.method,
        "learning_rate": owner.learning_rate,
        "tasks": [[name, list(classes)] for name, classes in owner._tasks.items()] or None,
        "task_free": owner.task_free,
        "grow": False if owner.head is None else owner.head,
        "memory": plan | {"folder": None if plan["folder"] is None else str(plan["folder"])},
        "precision": owner._precision,
        "seed": owner._seed,
        "own": owner._columns | asdict(owner._options),
    }


def load(path: Path, module: nn.Module, given: Mapping[str, Any]) -> OnePass:
    try:
        content = path.read_bytes()
    except OSError as reason:
        raise InputError(f"cannot read {path} ({reason.strerror or reason}): give the path of a file that save() wrote") from None
    return unpacked(content, str(path), module, given)


def unpacked(content: bytes, path: str, module: nn.Module, given: Mapping[str, Any]) -> OnePass:
    """The learner whose file has this content, in `module`."""
    about, tensors = _read(content, path)
    for name in given:
        if name not in AGAIN:
            raise InputError(f"'{name}' is in the file and cannot be given again: load takes {', '.join(sorted(AGAIN))}")
    for what, needed, name in (("a loss of its own", about["own_loss"], "loss"), ("an optimizer", about["optimizer"] is not None, "optimizer")):
        if needed != (given.get(name) is not None):
            raise InputError(f"{path} was saved with{'' if needed else 'out'} {what}: {'give' if needed else 'leave out'} {name}=")
    was = dict(about["settings"])
    own, memory = was.pop("own"), Memory(**was.pop("memory"))
    if method(was["method"]).learner.one_input:  # older files may have what is refused by now
        own, memory = own | {"all_classes": False}, Memory()
    tasks = dict(was.pop("tasks")) if was["tasks"] else was.pop("tasks")
    _fit(module, tensors, was["grow"])
    if given.get("optimizer") is not None:
        check_optimizer(given["optimizer"], module)
        check_saved(given["optimizer"], about["optimizer"])
    owner = OnePass(module, tasks=tasks, memory=memory, **was, **own, **given)
    fleet = owner.fleet
    if owner.head is not None and about["outputs"] is not None:
        size, width = fleet.theta.shape[1], cast(nn.Linear, module.get_submodule(owner.head)).out_features
        if width != about["outputs"]:
            owner.learner.resize(size, grow(fleet, owner.head, about["outputs"])[0])
    owner.outputs, owner.segment, owner.batches, owner.task = about["outputs"], about["segment"], about["batches"], about["task"]
    if owner.outputs is not None and not owner._tasks:
        fleet.compete(Slots((tuple(range(owner.outputs)),)))
    with torch.no_grad():
        for name, own_tensor in [*module.named_parameters(), *module.named_buffers()]:
            own_tensor.copy_(tensors[f"module.{name}"])
    fleet.continue_at(about["fleet"])
    owner.learner.restore(_part(tensors, "learner"), about["learner"])
    if owner.memory is not None:
        owner.memory.restore(_part(tensors, "memory"), about["memory"])
    if fleet.optimizer is not None:
        restore_optimizer(fleet.optimizer, _part(tensors, "optimizer"), about["optimizer"])
    if about["examples"] is not None:
        owner.examples = _examples(about["examples"])
        fleet.keywords, fleet.replays = owner.examples.keywords, set(about["replays"])
        owner._sample = [tensor.to(fleet.device) for tensor in _part(tensors, "sample").values()]
    owner._watch.best = {int(group): float(score) for group, score in about["best"]}
    return owner


def _fit(module: nn.Module, tensors: Mapping[str, Tensor], head: str | bool) -> None:
    """Raise unless the module has the parameters and buffers that were saved; a head may have to grow."""
    name = check_head(module, head) if head is not False else None
    saved = {key.removeprefix("module."): t for key, t in tensors.items() if key.startswith("module.")}
    own: dict[str, Tensor] = dict([*module.named_parameters(), *module.named_buffers()])
    for key in sorted(saved.keys() ^ own.keys()):
        raise InputError(f"the module does not fit the file: '{key}' is only in {'the file' if key in saved else 'the module'}")
    for key, tensor in sorted(saved.items()):
        grown = (
            name is not None
            and key in (f"{name}.weight".lstrip("."), f"{name}.bias".lstrip("."))
            and tensor.shape[1:] == own[key].shape[1:]
            and len(tensor) >= len(own[key])
        )
        if (tensor.shape != own[key].shape and not grown) or tensor.dtype != own[key].dtype:
            now = f"{own[key].dtype} of shape {list(own[key].shape)}"
            raise InputError(f"the module does not fit the file: '{key}' is {now}, and was {tensor.dtype} of shape {list(tensor.shape)}")


def _read(content: bytes, path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["onepass"])
        version, checksum = about["format"], about.pop("checksum")
        sound = checksum == digest(canonical(about))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} is damaged or not a file that save() wrote") from None
    if version != FORMAT:
        raise InputError(f"{path} has format {version}, and this version of onepass reads {FORMAT}: load it with the version that wrote it")
    if not sound:
        raise InputError(f"{path} is damaged: its header is not the one that was saved")
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError):
        raise InputError(f"{path} is damaged: its tensors cannot be read") from None
    if _digest(tensors) != about["tensors"]:
        raise InputError(f"{path} is damaged: its tensors are not those that were saved")
    return about, tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensors[key] for key in sorted(tensors) if key.startswith(f"{name}.")}


def _described(examples: Examples) -> dict[str, Any]:
    kinds = [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in (*examples.inputs, examples.target)]
    return {"kinds": kinds, "keywords": list(examples.keywords)}


def _examples(described: Mapping[str, Any]) -> Examples:
    kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in described["kinds"]]
    return Examples(tuple(kinds[:-1]), tuple(described["keywords"]), kinds[-1])
