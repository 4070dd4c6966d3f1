"""Whether the tensors of a saved learner fit its header, the module, and each other.

What is refused here would fail in a later batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from onepass.engine.module_passes import INPUT
from onepass.errors import InputError
from onepass.live.batches import THOUSANDS
from onepass.live.container import AlteredError
from onepass.live.growth import check_head
from onepass.live.header import LARGE, Header
from onepass.live.inputs import Kind, kind_of
from onepass.live.memory import even_shares
from onepass.live.plan import Memory

TABLE = 2**24  # entries of the table of which outputs compete, for a small module
Checks = Iterator[tuple[bool, str]]  # what must be true, and what it is true of


def check_module(header: Header, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
    """Raise unless the module has what was saved; a head may have to grow."""
    head, wrong = header.settings.grow, "the module does not fit the file"
    if isinstance(head, str) and head not in dict(module.named_modules()):
        raise InputError(f"{wrong}: it has no layer '{_shown(head)}' to grow")
    growing: list[str] = []
    if head is not False:
        layer = check_head(module, head)
        growing = [f"{layer}.{key}".lstrip(".") for key in ("weight", "bias")]
    parameters = dict(module.named_parameters())
    own: dict[str, Tensor] = {**parameters, **dict(module.named_buffers())}
    for key in sorted(tensors.keys() ^ own.keys()):
        where = "the file" if key in tensors else "the module"
        raise InputError(f"{wrong}: '{_shown(key)}' is only in {where}")
    for key, tensor in sorted(tensors.items()):
        mine = own[key]
        grown = key in growing and tensor.dim() > 0 and tensor.shape[1:] == mine.shape[1:]
        grown = grown and len(tensor) >= len(mine)
        if (tensor.shape != mine.shape and not grown) or tensor.dtype != mine.dtype:
            now = f"{mine.dtype} of shape {list(mine.shape)}"
            was = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise InputError(f"{wrong}: '{key}' is {now}, and was {was}")
        if key in parameters and not bool(tensor.isfinite().all()):
            what = f"parameter '{key}' in the file is not finite"
            raise InputError(f"{what}: load one that was saved before")
    if len({len(tensors[key]) for key in growing if key in tensors}) > 1:
        raise AlteredError("the layer that grows")
    _check_outputs(header, sum(tensor.numel() for tensor in tensors.values()))


def _check_outputs(header: Header, elements: int) -> None:
    """Raise if there are more outputs than a module with this many numbers can have.

    Tables of them are made.
    """
    tasks = [classes for _, classes in header.settings.tasks or ()]
    declared = 1 + max((c for classes in tasks for c in classes), default=-1)
    outputs, widest = max(declared, header.outputs or 0), max(map(len, tasks), default=0)
    if header.outputs is not None and declared > header.outputs:
        raise AlteredError("the number of outputs in its header")
    if outputs > max(elements, THOUSANDS) or outputs * widest > max(16 * elements, TABLE):
        raise AlteredError("more outputs in its header than the module can have")


def check_sample(header: Header, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Two examples to export with."""
    kinds = () if header.examples is None else header.examples.examples().inputs
    names = [f"{i:03d}" for i in range(len(kinds))]
    if sorted(tensors) != names or any(
        tensors[name].shape != (2, *shape) or tensors[name].dtype != kind
        for name, (kind, shape) in zip(names, kinds, strict=True)
    ):
        raise AlteredError("its sample of the examples")
    return [tensors[name] for name in names]


def check_memory(header: Header, plan: Memory, tensors: Mapping[str, Tensor], needed: bool) -> None:
    """Raise unless every row of the memory is in the lists that it must be in, once.

    Its example must be one that the learner can be given.
    """
    kept = header.memory
    if (kept is not None) != needed:
        raise AlteredError("a memory, or none, where the method has it otherwise")
    if kept is None or header.examples is None:
        if tensors or (kept is not None and (kept.groups or kept.number)):
            raise AlteredError("a memory of examples that never came")
        return
    kinds = {f"examples.{name}": kind for name, kind in _columns(header).items()}
    kinds |= dict.fromkeys(("members", "arrived", "visible", "fresh"), (torch.int64, ()))
    kinds["coming"] = torch.int64, (2,)
    if tensors.keys() != kinds.keys() or any(
        tensors[name].dim() == 0 or kind_of(tensors[name]) != kind for name, kind in kinds.items()
    ):
        raise AlteredError("the kinds of the tensors of its memory")
    for sound, what in _rows(header, plan, tensors):
        if not sound:
            raise AlteredError(f"{what} of its memory")


def _columns(header: Header) -> dict[str, Kind]:
    """What the memory keeps of an example."""
    assert header.examples is not None
    examples = header.examples.examples()
    columns: dict[str, Kind] = {"x": examples.inputs[0], "slots": (torch.int64, ())}
    columns |= {f"{INPUT}{i:03d}": kind for i, kind in enumerate(examples.inputs[1:], start=1)}
    return columns if not header.own_loss else columns | {"target": examples.target}


def _rows(header: Header, plan: Memory, tensors: Mapping[str, Tensor]) -> Checks:
    """What must be true of the rows, one thing after the other: each relies on those before."""
    kept, free = header.memory, header.settings.task_free
    assert kept is not None
    learning = free or header.batches > 0
    yield kept.task == (header.segment if learning else max(header.segment - 1, 0)), "the task"
    slots = tensors["examples.slots"]
    rows = len(slots)
    examples = [tensor for name, tensor in tensors.items() if name.startswith("examples.")]
    yield all(len(t) == rows for t in examples), "the lengths"
    real = [t for t in examples if t.is_floating_point()]
    yield all(bool(t.isfinite().all()) for t in real), "the examples"

    groups = torch.tensor(kept.groups, dtype=torch.int64).view(-1, 4)
    tasks, labels, counts, seen = groups.unbind(1)
    yield len({(task, label) for task, label, *_ in kept.groups}) == len(groups), "the groups"
    within = (tasks <= kept.task).all() and (counts <= seen).all() and (counts <= rows).all()
    yield bool(within), "the groups"
    current = (tasks == kept.task) & learning
    yield bool(((counts > 0) | current).all()) and int(counts.sum()) == rows, "the groups"
    members = tensors["members"]
    yield _each_once(members, rows) and len(members) == rows, "the groups"
    task_of = torch.empty(rows, dtype=torch.int64)
    task_of[members] = tasks.repeat_interleave(counts)
    label_of = torch.empty(rows, dtype=torch.int64)
    label_of[members] = labels.repeat_interleave(counts)
    yield from _labels(header, plan, labels, label_of, slots)

    shared = plan.policy in ("class-reservoir", "ring")
    sharing = [label for label, _ in kept.quota]
    yield len(set(sharing)) == len(sharing) and bool(sharing) == shared, "the shares"
    yield list(map(list, kept.quota)) == even_shares(sharing, plan.per_task), "the shares"

    arrived, visible, fresh = tensors["arrived"], tensors["visible"], tensors["fresh"]
    last = header.fleet.number
    yield _within(arrived, 1, last) and len(arrived) == rows, "the times"
    yield _each_once(visible, rows) and _each_once(fresh, rows), "the rows that may be drawn"
    hidden = torch.ones(rows, dtype=torch.bool)
    hidden[visible] = False
    held_out = label_of < 0
    steps, coming = tensors["coming"].unbind(1)
    if free:
        possible = len(fresh) == 0 and _within(coming, 0, rows - 1) and _within(steps, 1, last)
        yield possible, "the rows that come"
        yield bool((steps.diff() >= 0).all()), "the rows that come"
        young = coming[arrived[coming] == steps]
        known = bool(torch.isin((hidden & ~held_out).nonzero()[:, 0], young).all())
        yield known and bool(hidden[held_out].all()), "the rows that come"
    else:
        own = (task_of == kept.task) & learning
        drawn = len(coming) == 0 and torch.equal(hidden, own | held_out)
        yield drawn, "the rows that may be drawn"
        yield len(fresh) == int(own.sum()) and bool(own[fresh].all()), "the rows of the task"


def _labels(
    header: Header, plan: Memory, labels: Tensor, label_of: Tensor, slots: Tensor
) -> Checks:
    """What must be true of the classes of the groups, `labels`, and of the rows, `label_of`.

    Groups with a negative number instead of a class are held out: only if the plan has such.
    """
    free, classifies = header.settings.task_free, not header.own_loss
    named, negative = labels[labels >= 0], labels[labels < 0]
    yield bool(getattr(plan, "held_out", 0)) or not len(negative), "the groups"
    balanced = plan.policy != "reservoir" and classifies
    if classifies:
        assert header.outputs is not None
        declared = {c for _, classes in header.settings.tasks or () for c in classes}
        possible = torch.tensor(sorted(declared or range(header.outputs)))
        yield bool(torch.isin(slots, possible).all()), "the labels"
        known = bool(torch.isin(named, possible).all())
        yield known if balanced else not bool(named.any()), "the groups"
        sound = torch.isin(~negative, possible) if free else negative == -1
        yield bool(sound.all()), "the groups"
    else:
        yield not bool(slots.any() or named.any()) and bool((negative == -1).all()), "the labels"
    kept = label_of >= 0
    yield not balanced or torch.equal(label_of[kept], slots[kept]), "the groups"


def _within(tensor: Tensor, least: int, most: int) -> bool:
    return not len(tensor) or bool(tensor.min() >= least and tensor.max() <= most)


def _each_once(rows: Tensor, count: int) -> bool:
    """Whether they are different rows, of `count` in all."""
    return _within(rows, 0, count - 1) and bool((rows.sort().values.diff() > 0).all())


def check_counts(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless whole numbers in a method's state are counts."""
    counts = [t.reshape(-1) for t in tensors.values() if t.dtype == torch.int64]
    if not all(_within(count, 0, LARGE) for count in counts):
        raise AlteredError("the state of its method")


def _shown(name: str) -> str:
    """A name from a file, in one short line."""
    return ascii(name)[1:-1][:80]
