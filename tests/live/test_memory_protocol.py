"""The memory of a stream is an episodic memory as learners and recorders know it."""

from __future__ import annotations

import torch

from onepass import Memory
from onepass.memory import EpisodicMemory
from tests.live.memories import Offered, memory_of


def test_the_contents_are_what_may_be_drawn_and_their_tasks() -> None:
    memory, offered = memory_of(Memory(per_task=6), "class-balanced"), Offered()
    kept: EpisodicMemory = memory
    assert kept.contents() is None
    for task in range(3):
        for _ in range(4):
            offered(memory, [0, 1, 2])
        if task < 2:
            kept.end_task()
            kept.begin_task(task + 1)
    contents = kept.contents()
    assert contents is not None
    batch, tasks = contents
    assert kept.task == 2
    assert list(kept.sizes) == [12] == [batch.x.shape[1]]
    numbers = batch.x[0, :, 0].long().tolist()
    assert tasks[0].tolist() == [offered.task[n] for n in numbers]
    assert batch.slots[0].tolist() == [offered.labels[n] for n in numbers]
    assert sorted(tasks[0].tolist()) == [0] * 6 + [1] * 6


def test_its_steps_are_never_captured() -> None:
    memory, offered = memory_of(Memory(), "reservoir"), Offered()
    offered(memory, [0, 1, 2])
    memory.end_task()
    assert memory.form(2) is None
    memory.look_ahead(3)
    with memory.captured():
        memory.turn(1)
        drawn = memory.draw(5)
    assert drawn is not None
    assert torch.equal(drawn.slots.sort().values, torch.tensor([[0, 1, 2]]))
