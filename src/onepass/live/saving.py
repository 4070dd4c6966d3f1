"""Saving a learner in the middle of its stream: one safetensors file with a JSON header, no pickle.

The file is written under a temporary name, flushed and renamed, so a process that is killed leaves
the old file or the new one. A file may come from elsewhere: it is data about a learner. Where to
write, how much to reserve and what to call is the caller's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onepass.engine.slots import Slots
from onepass.engine.snapshots import BufferSnapshot, OptimizerSnapshot
from onepass.errors import InputError, is_out_of_memory
from onepass.interrupts import Held
from onepass.learners import method
from onepass.live.consistency import check_counts, check_memory, check_module, check_sample
from onepass.live.container import AlteredError, pack, read, unpack
from onepass.live.exporting import written
from onepass.live.growth import grow
from onepass.live.header import Header, check_settings, placed, read_header
from onepass.live.inputs import Examples
from onepass.live.optimisers import check_optimizer, check_saved, optimizer_state, restore_optimizer
from onepass.live.plan import Memory
from onepass.live.settings import make_place, read_autosave
from onepass.live.wrapper import OnePass

# What a file cannot hold, or must not decide.
PLACE = {"where", "folder", "autosave"}
AGAIN = {"optimizer", "loss", "watch", "watch_every", "autosave_every"} | PLACE
PARTS = ("module", "learner", "memory", "sample", "optimizer")
State = Mapping[str, Mapping[str, Tensor]]  # of each part


def save(owner: OnePass, path: Path) -> None:
    """Write everything that decides how learning goes on."""
    owner.fleet.intact()
    written(path, packed(owner), "what was saved before is still there")


def packed(owner: OnePass) -> bytes:
    """The content of the file."""
    fleet, memory, module = owner.fleet, owner.memory, owner.module
    values = [*module.named_parameters(), *module.named_buffers()]
    parts: dict[str, Mapping[str, Tensor]] = {
        "module": {name: p.detach() for name, p in values},
        "learner": owner.learner.state(),
        "memory": memory.state() if memory is not None else {},
        "sample": {f"{i:03d}": tensor for i, tensor in enumerate(owner._sample)},
    }
    optimizer = None
    if fleet.optimizer is not None:
        parts["optimizer"], optimizer = optimizer_state(fleet.optimizer)
    tensors = {
        f"{part}.{name}": t.detach().cpu().contiguous().clone()
        for part, state in parts.items()
        for name, t in state.items()
    }
    # JSON has no other numbers.
    best = {group: score for group, score in owner._watch.best.items() if math.isfinite(score)}
    about = {
        "settings": settings(owner),
        "own_loss": not owner.classifies,
        "optimizer": optimizer,
        "fleet": fleet.counters(),
        "learner": owner.learner.counters(),
        "memory": memory.counters() if memory is not None else None,
        "outputs": owner.outputs,
        "examples": None if owner.examples is None else _described(owner.examples),
        "replays": sorted(fleet.traced_sizes),
        "segment": owner.segment,
        "batches": owner.batches,
        "task": owner.task,
        "best": [list(one) for one in best.items()],
    }
    return pack(about, tensors)


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
    """The learner of a file, in `module`, which is as before if the file is refused."""
    _check_given(module, given)
    with _one_sentence(str(path)):
        return _made(*read(path), str(path), module, given)


def unpacked(content: bytes, path: str, module: nn.Module, given: Mapping[str, Any]) -> OnePass:
    """The learner whose file has this content.

    The caller made it, as a part of something that is trusted: a memory on disk is where it was.
    """
    _check_given(module, given)
    with _one_sentence(path):
        about, tensors = unpack(content, path)
        plan = read_header(about).plan
        place = {"where": plan["where"], "folder": plan["folder"]}
        return _made(about, tensors, path, module, place | dict(given))


def _check_given(module: nn.Module, given: Mapping[str, Any]) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(f"a learner is loaded into an nn.Module, got {type(module).__name__}")
    for name in given:
        if name not in AGAIN:
            what = f"'{name}' is in the file and cannot be given again"
            raise InputError(f"{what}: load takes {', '.join(sorted(AGAIN))}")
    check_optimizer(given.get("optimizer"), module)


@contextmanager
def _one_sentence(path: str) -> Iterator[None]:
    try:
        yield
    except AlteredError as reason:
        what = f"{path} was altered after it was saved ({reason})"
        raise InputError(f"{what}: take another copy of it") from None
    except Exception as reason:
        if isinstance(reason, InputError) or not is_out_of_memory(reason):
            raise
        what = f"there is not enough memory to load {path}"
        raise InputError(f"{what}: make room, or load it on a larger machine") from reason


def _made(
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: str,
    module: nn.Module,
    given: Mapping[str, Any],
) -> OnePass:
    """A new learner in `module`, which goes on from what was saved."""
    header = read_header(about)
    saved, optimizer = header.optimizer, given.get("optimizer")
    autosave = read_autosave(given.get("autosave"))
    _check_needed(path, "a loss of its own", header.own_loss, "loss", given)
    _check_needed(path, "an optimizer", saved is not None, "optimizer", given)
    own, memory = check_settings(header), placed(header, given, path)
    if method(header.settings.method).learner.needs.own_examples:
        # Older files may have what is refused by now.
        own, memory = own | {"all_classes": False}, Memory()
    state: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for key in sorted(tensors):
        part, _, name = key.partition(".")
        if part not in PARTS or (part == "optimizer" and saved is None):
            raise AlteredError("tensors that belong to nothing")
        state[part][name] = tensors[key]
    check_module(header, state["module"], module)
    sample = check_sample(header, state["sample"])
    if optimizer is not None and saved is not None:
        check_saved(optimizer, saved.kind, saved.groups)
    with Held(), _unharmed(module, optimizer):
        owner = OnePass(
            module,
            header.settings.method,
            learning_rate=header.settings.learning_rate,
            tasks=header.tasks,
            task_free=header.settings.task_free,
            grow=header.settings.grow,
            memory=memory,
            precision=header.settings.precision,
            seed=header.settings.seed,
            **{name: value for name, value in given.items() if name not in PLACE},
            **own,  # whose names are the method's alone
        )
        check_memory(header, memory, state["memory"], owner.memory is not None)
        _restore(owner, header, state)
        if optimizer is not None and saved is not None:
            restore_optimizer(optimizer, state["optimizer"], saved.groups, saved.numbers)
        if header.examples is not None:
            owner.examples = header.examples.examples()
            owner.fleet.keywords, owner.fleet.traced_sizes = (
                owner.examples.keywords,
                set(header.replays),
            )
            owner._sample = [tensor.to(owner.fleet.device) for tensor in sample]
        owner._autosave = autosave
        make_place(autosave)
    return owner


def _check_needed(path: str, what: str, needed: bool, name: str, given: Mapping[str, Any]) -> None:
    if needed != (given.get(name) is not None):
        had, do = ("with", "give") if needed else ("without", "leave out")
        raise InputError(f"{path} was saved {had} {what}: {do} {name}=")


def _restore(owner: OnePass, header: Header, state: State) -> None:
    """Everything that is the learner's own."""
    fleet, module = owner.fleet, owner.module
    if owner.head is not None:
        head = module.get_submodule(owner.head)
        assert isinstance(head, nn.Linear)
        width = len(state["module"][f"{owner.head}.weight".lstrip(".")])
        if width != head.out_features:
            owner.learner.resize(grow(fleet, owner.head, width)[0])
    owner.outputs, owner.task = header.outputs, header.task
    owner.segment, owner.batches = header.segment, header.batches
    if owner.outputs is not None and not owner._tasks:
        fleet.compete(Slots((tuple(range(owner.outputs)),)))
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            tensor.copy_(state["module"][name])
    fleet.continue_at(header.fleet.model_dump())
    fleet.steps_in_task = header.batches
    example = None if header.examples is None else header.examples.examples().inputs[0]
    tasks = header.learner.get("seen", header.segment)  # of a method that counts them itself
    counters = {name: n for name, n in header.learner.items() if name not in owner.learner.former}
    fits = owner.learner.accepts(state["learner"], counters, example)
    if tasks != header.segment or not fits:
        raise AlteredError("the state of its method")
    check_counts(state["learner"])
    owner.learner.restore(state["learner"], counters)
    if owner.memory is not None and header.memory is not None:
        owner.memory.restore(state["memory"], header.memory.model_dump())
    owner._watch.best = dict(header.best)


@contextmanager
def _unharmed(module: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """After an error, the module and the optimizer are as they were before."""
    parts = list(module.modules())
    buffers = BufferSnapshot(parts)
    data = [(parameter, parameter.data) for parameter in module.parameters()]  # wrapping sets it
    before = [
        (part, dict(part._parameters), part.training, part.__dict__.get("out_features"))
        for part in parts
    ]
    settings = None if optimizer is None else OptimizerSnapshot(optimizer)
    try:
        yield
    except BaseException:
        for part, parameters, mode, width in before:
            part._parameters.update(parameters)
            part.training = mode
            if width is not None:
                part.out_features = width
        for parameter, values in data:
            parameter.data = values
        buffers.restore()
        if settings is not None:
            settings.restore()
        raise


def _described(examples: Examples) -> dict[str, Any]:
    kinds = (*examples.inputs, examples.target)
    names = [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in kinds]
    return {"kinds": names, "keywords": list(examples.keywords)}
