"""Packing: which runs share a fleet.

Runs of one method on one part of the stream have the same shapes, so they can be rows of one fleet.
How many rows pay was measured (`python benchmarks/packing.py`); how many fit is counted from the
shapes. Neither depends on the moment, so the same command packs in the same way. The plan is stored
with the study all the same: different packings agree only within float32 rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from onepass.errors import InputError
from onepass.feed import Feed
from onepass.learners import method
from onepass.learners.declarations import Workload
from onepass.protocol import Run, Setup, assemble, grid_points
from onepass.streams.base import TASKS, Part, Stream
from onepass.studies.recipe import Recipe

# With more rows a run-step gets no cheaper, and a failure costs more.
MOST_ROWS = {"cpu": 64, "cuda": 256}
# In examples: the cost of a step besides its examples, and that of each tensor of a method's state.
STEP, STATE = 15, 3
SHARE = 0.5  # of the memory may be filled by plan; the rest is for data and what was not counted

PARTS: tuple[Part, Part] = ("cv", "ev")

Item = TypeVar("Item")


def deal(items: Sequence[Item], fleets: int) -> list[list[Item]]:
    """Deal items out like cards, so that slow and fast grid points mix.

    >>> deal("abcde", 2)
    [['a', 'c', 'e'], ['b', 'd']]
    """
    return [list(items[i::fleets]) for i in range(fleets)]


def plan(
    stream: Stream, recipe: Recipe, device: str, workers: int
) -> dict[str, dict[Part, list[int]]]:
    """For each method and part: the least number of fleets, and the most runs that one may hold.

    A method gets as many workers as its share of the study's work deserves: fewer fleets of more
    runs cost less in all, but no worker shall wait for the longest method in the end. The parts of
    a method follow each other, so both are dealt in the same way.
    """
    costs = {name: cost(stream, recipe, name) for name in recipe.methods}
    total = sum(costs.values())
    made: dict[str, dict[Part, list[int]]] = {}
    for name in recipe.methods:
        least = math.ceil(workers * costs[name] / total)
        made[name] = {
            part: [least, most_rows(stream, recipe, name, part, device, workers)] for part in PARTS
        }
    return made


def fleets(count: int, least: int, most_rows: int) -> int:
    """How many fleets `count` runs make.

    >>> [fleets(40, 2, most_rows=64), fleets(40, 2, most_rows=10), fleets(1, 2, most_rows=64)]
    [2, 4, 1]
    """
    return max(min(least, count), -(-count // most_rows))


def cost(stream: Stream, recipe: Recipe, name: str) -> int:
    """The work of a method, in examples."""
    runs = {"cv": len(grid_points(recipe.grids[name])) * recipe.cv_seeds, "ev": recipe.seeds}
    size, joined = recipe.setup().batch_size, method(name).joined
    steps = sum(runs[part] * Feed(stream, part, [0], size, joined=joined).steps() for part in PARTS)
    return steps * cost_of_step(recipe, name)


def cost_of_step(recipe: Recipe, name: str) -> int:
    """The work of one step of one run of a method, in examples."""
    learner, setup = method(name).learner, recipe.setup()
    seen = learner.cost(recipe.method_options(name), workload(setup, "ev")).examples
    return STEP + setup.batch_size + seen + STATE * len(learner.state_names())


def workload(setup: Setup, part: Part) -> Workload:
    """What decides the cost of a run besides its method."""
    repeats = setup.memory_with_replacement or setup.memory_includes_current_task
    return Workload(TASKS[part], setup.batch_size, setup.memory_per_task, repeats)


def most_rows(
    stream: Stream, recipe: Recipe, name: str, part: Part, device: str, workers: int
) -> int:
    """How many runs of a method one fleet should hold on this machine."""
    kind = torch.device(device).type
    there = memory(kind)
    try:
        needed = least_bytes(stream, recipe, name, part)
        if needed <= there:  # only then is it built
            needed = bytes_per_row(stream, recipe, name, part)
    except (MemoryError, RuntimeError):
        needed = there + 1
    if needed > there:
        raise InputError(
            f"a single run of {name} does not fit into the {there / 1e9:.1f} GB of memory here:"
            " leave it out by --methods, make the model or the batches smaller,"
            " or use another machine"
        )
    room = int(SHARE * there / (workers if kind == "cpu" else 1))
    return max(1, min(MOST_ROWS[kind], room // needed))


def least_bytes(stream: Stream, recipe: Recipe, name: str, part: Part) -> int:
    """Memory that a run takes at the very least, counted without building anything.

    That is its parameters, three gradients of their size, and its episodic memory.
    """
    pool, setup = stream.pool, recipe.setup()
    with torch.device("meta"):
        network = setup.build(pool.shape, outputs=1)
    needed = 4 * sum(parameter.nbytes for parameter in network.parameters())
    if method(name).learner.needs.memory:
        example = pool.x[0].nbytes + 2 * 8  # and its class and task
        needed += TASKS[part] * setup.memory_per_task * example
    return needed


def bytes_per_row(stream: Stream, recipe: Recipe, name: str, part: Part) -> int:
    """Memory that one more run takes while it trains.

    That is its state, its gradients and its activations on the largest batch.
    """
    options, setup = recipe.method_options(name), recipe.setup()
    run = Run(0, grid_points(recipe.grids[name])[0])
    feed, fleet, learner = assemble(stream, part, method(name), [run], setup, options)
    batch, work = next(feed.batches(0)), workload(setup, part)
    estimate = learner.cost(options, work)
    one = _activations(fleet.architecture.module, lambda: fleet.forward(batch.piece(0, 1)))
    activations = max(setup.batch_size, estimate.largest_batch) * one
    examples = estimate.held * batch.x[0, 0].nbytes
    passes = 3  # forward, backward, and what both hold meanwhile
    return int(learner.peak_bytes(work) + examples + passes * activations)


def _activations(module: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that the layers of a module put out in a forward pass."""
    made: list[int] = []
    layers = [layer for layer in module.modules() if not list(layer.children())]
    hooks = [
        layer.register_forward_hook(lambda _, __, output: made.append(output.nbytes))
        for layer in layers
    ]
    forward()
    for hook in hooks:
        hook.remove()
    return sum(made)


def memory(kind: str) -> int:
    """Return the bytes of memory that this machine, or its GPU, has in all."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return physical
