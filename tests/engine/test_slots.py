from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from onepass.engine.slots import Slots
from onepass.streams.base import separate_heads, shared_heads

CPU = torch.device("cpu")


def test_only_the_slots_of_an_examples_own_task_compete() -> None:
    logits = torch.randn(5, 6, requires_grad=True)
    slots = torch.tensor([0, 3, 5, 2, 4])
    loss = Slots(separate_heads(3, 2)).on(CPU).cross_entropy(logits, slots)
    expected = cross_entropy(
        torch.stack([logits[i, s // 2 * 2 : s // 2 * 2 + 2] for i, s in enumerate(slots.tolist())]),
        slots % 2,
    )
    assert torch.allclose(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[0, 2:] == 0).all()


def test_a_shared_head_is_a_plain_softmax() -> None:
    logits, slots = torch.randn(5, 10), torch.arange(5)
    assert torch.equal(
        Slots(shared_heads(4, 10)).on(CPU).cross_entropy(logits, slots),
        cross_entropy(logits, slots),
    )


def test_a_union_competes_in_the_loss_but_not_in_evaluation() -> None:
    rivals = Slots(((0, 1), (2, 3)), union=True).on(CPU)
    logits, slots = torch.tensor([[0.0, 1.0, 5.0, 0.0]]), torch.tensor([1])
    assert torch.equal(rivals.cross_entropy(logits, slots), cross_entropy(logits, slots))
    assert rivals.correct(logits, slots).all()


def test_tasks_may_have_different_numbers_of_classes() -> None:
    rivals = Slots(((0, 1, 2), (3, 4))).on(CPU)
    logits = torch.randn(2, 5, requires_grad=True)
    loss = rivals.cross_entropy(logits, torch.tensor([2, 3]))
    expected = (
        cross_entropy(logits[:1, :3], torch.tensor([2]))
        + cross_entropy(logits[1:, 3:], torch.tensor([0]))
    ) / 2
    assert torch.allclose(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()


def test_a_score_that_is_not_a_number_is_never_right() -> None:
    scores = torch.full((2, 4), torch.nan)
    assert not Slots(shared_heads(1, 4)).on(CPU).correct(scores, torch.tensor([0, 1])).any()


def test_it_works_on_a_fleets_three_dimensions() -> None:
    scores = torch.zeros(2, 3, 4)
    scores[1, :, 3] = 1
    right = (
        Slots(separate_heads(2, 2)).on(CPU).correct(scores, torch.tensor([[0, 1, 2], [0, 2, 3]]))
    )
    assert right.tolist() == [[True, False, True], [True, False, True]]
